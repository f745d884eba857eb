"""A sweep: the same recipe with every combination of some keys' values, a run folder each, and one table.

Runs are done one after the other. A run that is finished is read, one that was stopped goes on, so the same command
ends a sweep that was interrupted or adds values to one. Runs are ordered by the online probe, which
reads neither labels nor test people; which run is best on labels is for `octjepa leaderboard` to say.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from octjepa.config import load_recipe, science_hash
from octjepa.distributed.runtime import distributed_context
from octjepa.distributed.signals import Interrupted
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import read_json_lines, write_atomic, write_json
from octjepa.locks import writer_lock
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.loop import pretrain

TABLE, RESULTS = "sweep.tsv", "sweep.json"
_SHOWN = ("probe", "cosine", "loss", "rankme", "updates", "state")
_SPLIT = re.compile(r",(?![^\[{(]*[\]})])")  # a comma outside brackets
_log = logging.getLogger(__name__)


def parse_sweep(given: Iterable[str]) -> dict[str, list[str]]:
    """{key: its values} of texts such as "train.base_lr=1e-4,3e-4"; a list of values is written [a, b].

    Raises UsageError: no key, fewer than two values, a value or a key twice.
    """
    axes: dict[str, list[str]] = {}
    for text in given:
        key, sign, values = (part.strip() for part in text.partition("="))
        found = [value.strip() for value in _SPLIT.split(values)]
        if not sign or not key or len(found) < 2 or not all(found) or len(set(found)) < len(found) or key in axes:
            raise UsageError(f"--sweep {text!r} is not of the form key=value,value, such as train.base_lr=1e-4,3e-4")
        axes[key] = found
    return axes


def run_name(values: Mapping[str, str]) -> str:
    """The folder of a run: "base_lr=1e-4,depth=6", each key by its last part where that is enough to tell it."""
    last = [key.rpartition(".")[2] for key in values]
    parts = [
        f"{short if last.count(short) == 1 else key}={value}"
        for short, (key, value) in zip(last, values.items(), strict=True)
    ]
    return re.sub(r"[^\w.,=+-]", "_", ",".join(parts))


def plan_sweep(
    recipe: str | Path, overrides: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> dict[str, tuple[dict[str, str], Recipe]]:
    """{folder name: (its values, its recipe)} of every combination, all checked before the first run.

    Raises RecipeError: a value that the recipe refuses; UsageError: two combinations that would be one run.
    """
    plans: dict[str, tuple[dict[str, str], Recipe]] = {}
    hashes: dict[str, str] = {}
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        resolved = load_recipe(recipe, [*overrides, *(f"{key}={value}" for key, value in values.items())])
        name, same = run_name(values), hashes.setdefault(science_hash(resolved), run_name(values))
        if name in plans or same != name:
            raise UsageError(f"--sweep makes the run {name} twice (as {same}): name only values that change the result")
        plans[name] = values, resolved
    return plans


def sweep(
    recipe: str | Path,
    overrides: Sequence[str],
    axes: Mapping[str, Sequence[str]],
    store: Store,
    out: Path,
    train: Callable[[Recipe, Store, Path, bool], dict[str, Any]] = pretrain,
) -> dict[str, Any]:
    """Runs every combination into `out/<values>`; returns {runs, table}, the best by the online probe first.

    A run that fails is listed with its message, and the others go on. Raises Interrupted on a signal, UsageError where
    another process writes to `out`, and what `plan_sweep` raises.
    """
    plans = plan_sweep(recipe, overrides, axes)
    with distributed_context() as runtime, ExitStack() as lock:
        runtime.run_on_rank_zero(lambda: lock.enter_context(writer_lock(out)))
        runs = _train_all(plans, store, out, axes, train)
    return {"runs": _ordered(runs), "table": str(out / TABLE)}


def _train_all(
    plans: Mapping[str, tuple[dict[str, str], Recipe]],
    store: Store,
    out: Path,
    axes: Mapping[str, Sequence[str]],
    train: Callable[[Recipe, Store, Path, bool], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The rows of all runs, in order; the table is written after each."""
    runs: list[dict[str, Any]] = []
    for number, (name, (values, resolved)) in enumerate(plans.items(), start=1):
        _log.info("run %d of %d: %s", number, len(plans), name)
        row: dict[str, Any] = {"run": name, **values}
        try:
            folder = out / name
            summary = train(resolved, store, folder, (folder / "run.json").is_file())
            row |= {key: summary.get(key) for key in ("cosine", "loss", "rankme", "updates")}
            row |= {"probe": _probe_score(folder, str(summary.get("encoder", "target"))), "state": "finished"}
        except Interrupted:
            raise
        except OctjepaError as error:
            row |= dict.fromkeys(_SHOWN) | {"state": f"failed: {str(error).splitlines()[0]}"}
        runs.append(row)
        _write(out, runs, axes)
    return runs


def _probe_score(folder: Path, encoder: str) -> float | None:
    """The last accuracy of the online probe on the encoder that is exported; None where the recipe has no monitor."""
    key = "monitor/layer_accuracy" + ("" if encoder == "target" else f"_{encoder}")
    scores = [line[key] for line in read_json_lines(folder / "metrics.jsonl") if line.get(key) is not None]
    return float(scores[-1]) if scores else None


def _ordered(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best online probe first; without one the order of the runs, failed ones last."""
    return sorted(
        runs, key=lambda run: (run["state"] != "finished", -(run["probe"] if run["probe"] is not None else -1))
    )


def _write(out: Path, runs: Sequence[dict[str, Any]], axes: Mapping[str, Sequence[str]]) -> None:
    """The table of the runs so far, as TSV and JSON."""
    import pandas as pd

    table = pd.DataFrame(_ordered(runs), columns=["run", *axes, *_SHOWN])
    write_atomic(out / TABLE, lambda file: table.to_csv(file, sep="\t", index=False, float_format="%.6g"))
    write_json(out / RESULTS, {"axes": dict(axes), "runs": _ordered(runs)})
