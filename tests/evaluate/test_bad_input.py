"""Wrong labels, tables and paths given to `octjepa probe`: a clear error or a stated degradation, never silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import call
from octjepa.embed.table import TableFacts, write_embeddings

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]
Save = Callable[..., tuple[Path, Path]]
Change = Callable[[pd.DataFrame, pd.DataFrame], tuple[pd.DataFrame, pd.DataFrame]]


def findings(table: Path, labels: Path, *words: object) -> tuple[int, str, str]:
    """Exit code, everything said, stdout."""
    done = call("probe", table, "--labels", labels, "--target", "lesion0", "--probe", "knn", "--pool", "mean", *words)
    assert "Traceback" not in done.err
    return done.code, done.err, done.out


def people(change: Callable[[str], str]) -> Change:
    return lambda frame, labels: (frame, labels.assign(person_id=labels["person_id"].map(change)))


def lesion(frame: pd.DataFrame, labels: pd.DataFrame, rows: object, value: object) -> tuple[pd.DataFrame, pd.DataFrame]:
    changed = labels.astype({"lesion0": object})
    changed.loc[rows, "lesion0"] = value
    return frame, changed


def split_of(frame: pd.DataFrame, split: str) -> pd.Series:
    return frame["split"] == split


REFUSED: dict[str, tuple[Change, str]] = {
    "no label meets a scan": (people(lambda one: f"X{one}"), "none of its 120 labels of lesion0 meets one of the 120"),
    "volumes that name no person": (
        lambda f, t: (f.assign(person_id=[f"unknown-{n:012x}" for n in range(len(f))]), t),
        "120 volumes are without a person id (unknown-...): put a manifest.tsv with person_id and filepath next to",
    ),
    "one class": (lambda f, t: lesion(f, t, slice(None), 1), "lesion0: all 120 labelled volumes have the same value"),
    "only NaN": (lambda f, t: lesion(f, t, slice(None), "NaN"), "lesion0 holds no label at all"),
    "a class that train lacks": (
        lambda f, t: lesion(f, t, split_of(f, "train"), 0),
        "split train has no volume of class 1",
    ),
    "a class that test lacks": (
        lambda f, t: lesion(f, t, split_of(f, "test"), 0),
        "`octjepa split STORE --by stratified --shares 0.6,0.1,0.3 --labels LABELS --target lesion0`, and embed again",
    ),
    "a person on two sides": (
        lambda f, t: (f.assign(split=np.where(f.index == 0, "test", f["split"])), t),
        "leak: 1 of 60 people",
    ),
    "one scan, two people, two sides": (
        lambda f, t: (f.assign(content_hash=["a" * 64, *f["content_hash"][1:-1], "a" * 64]), t),
        "leak: the same pixels are stored under two people in different splits, 1 time",
    ),
    "two rows that disagree": (
        lambda f, t: (f, pd.concat([t, t.iloc[:1].assign(lesion0=1 - t["lesion0"].iloc[0])])),
        "lesion0 is given twice with different values",
    ),
    "a slip in a quantity": (
        lambda f, t: (f, t.assign(lesion0=["inf" if n == 3 else str(300 + n) for n in range(120)])),
        "lesion0 holds 1 cell without a number among numbers: 'inf' in row 5",
    ),
    "nobody in train": (
        lambda f, t: (f.assign(split=f["split"].replace("train", "")), t),
        "no volume is in split 'train'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_a_reason(case: str, cohort: Cohort, saved: Save) -> None:
    change, message = REFUSED[case]
    code, err, out = findings(*saved(*change(*cohort(people=60))))
    assert (code, out) == (2, "")
    assert message in err
    assert not (set(cohort(people=60)[0]["person_id"]) & set(err.split()))  # nobody is named


def test_a_target_with_the_name_of_the_mean_over_targets_is_refused(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    code, err, _ = findings(*saved(frame, labels.assign(macro=labels["lesion0"])), "--target", "macro")
    assert code == 2
    assert "results name the mean over targets 'macro'; rename the column of that name" in err


STATED: dict[str, tuple[Change, str]] = {
    "labels without scans": (lambda f, t: (f.iloc[4:], t), "4 person-eye labels have no embedded scan"),
    "scans without labels": (lambda f, t: (f, t.iloc[4:]), "4 of 120 volumes (2 people) have no label"),
    "NaN labels": (lambda f, t: lesion(f, t, [0, 1, 2], "nan"), "3 of 120 label rows are empty or NaN"),
    "a class that val lacks": (lambda f, t: lesion(f, t, split_of(f, "val"), 0), "split val has no volume of class 1"),
    "a row given twice": (lambda f, t: (f, pd.concat([t, t.iloc[:1]])), "given more than once with equal values"),
    "one scan under two people of one side": (
        lambda f, t: (f.assign(content_hash=["a" * 64, f["content_hash"][1], "a" * 64, *f["content_hash"][3:]]), t),
        "the same pixels are stored under two people in one split, 1 time",
    ),
}


@pytest.mark.parametrize("case", STATED)
def test_it_is_stated(case: str, cohort: Cohort, saved: Save) -> None:
    change, message = STATED[case]
    code, _, out = findings(*saved(*change(*cohort(people=60))), "--json")
    assert code == 0
    assert any(message in note for note in json.loads(out)["notes"])


def test_pretraining_on_test_people_and_another_preprocessing(cohort: Cohort, saved: Save, tmp_path: Path) -> None:
    frame, labels = cohort(people=60)
    table, tsv = saved(frame, labels)
    knows = write_embeddings(tmp_path / "knows.parquet", frame, TableFacts(16, "knows", "c" * 64, leaked=3))
    code, err, _ = findings(knows, tsv)
    assert code == 2
    assert "leak: the encoder was pretrained on eyes of 3 people" in err
    other = write_embeddings(tmp_path / "other.parquet", frame, TableFacts(16, "other", "d" * 64))
    code, _, out = findings(table, tsv, other, "--json")
    assert code == 0
    (note,) = [note for note in json.loads(out)["notes"] if "preprocessed" in note]
    assert note.startswith("other and octjepa saw differently preprocessed volumes")


def test_what_is_no_table_of_embeddings_is_reported(cohort: Cohort, saved: Save, tmp_path: Path) -> None:
    _, tsv = saved(*cohort(people=60))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    for given, message in (
        (tmp_path, "octjepa embed"),
        (weights, "is not a readable parquet file"),
        ("phantom-tiny", "octjepa embed"),
    ):
        code, err, _ = findings(Path(given), tsv)
        assert code == 2
        assert message in err
