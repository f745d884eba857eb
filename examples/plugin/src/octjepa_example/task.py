"""A task with a verb: `octjepa age TABLE --out FOLDER` predicts age from embeddings, `octjepa inspect` describes it."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from sklearn.linear_model import Ridge

from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError


def age(
    table: Annotated[Path, typer.Argument(help="A table of octjepa embed.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
):
    """Fits age on the training people and writes the mean absolute error on test people."""
    embeddings = read_embeddings(table)
    years, split = embeddings.frame["age"].to_numpy(float), embeddings.frame["split"].to_numpy()
    train, test = ((split == name) & np.isfinite(years) for name in ("train", "test"))
    if not train.any() or not test.any():
        raise UsageError(f"{table} holds no ages of training and test people")
    predicted = Ridge(alpha=10.0).fit(embeddings.vector[train], years[train]).predict(embeddings.vector[test])
    out.mkdir()
    found = {"kind": "age", "mae_years": float(np.abs(predicted - years[test]).mean()), "n": int(test.sum())}
    (out / "run.json").write_text(json.dumps(found))
    print("mean absolute error {mae_years:.1f} years on {n} volumes".format(**found))


class AgeTask:
    """Tells `octjepa inspect` whether a folder is this task's, and what it holds."""

    @staticmethod
    def holds(folder):
        path = folder / "run.json"
        return path.is_file() and json.loads(path.read_text()).get("kind") == "age"

    @staticmethod
    def describe(folder):
        return json.loads((folder / "run.json").read_text())
