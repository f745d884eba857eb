"""A person's name and birth date stay in the file they came in: nothing octjepa writes or prints holds them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pydicom
import pytest

from command_line import Outcome, call, run
from flat_layers import FlatLayers

NAME, FIRST_NAME = "Quixano", "Alonsina"
BIRTH_DATE = "19470929"
SECRETS = (NAME, FIRST_NAME, BIRTH_DATE)
YEAR = "1947"
_MEASURED = re.compile(r"(?<=\d)\.\d{6,}")  # the digits of a measured time, which hold any year by chance


def named_copy(scan: Path, path: Path, spoil: str = "") -> Path:
    """The scan with a name and a birth date in every field that commonly holds one; `spoil` says how it is broken."""
    dataset = pydicom.dcmread(scan)
    dataset.PatientName = f"{NAME}^{FIRST_NAME}"
    dataset.PatientBirthDate = BIRTH_DATE
    dataset.OtherPatientNames = f"{NAME}^{FIRST_NAME}"
    dataset.ReferringPhysicianName = f"{NAME}^{FIRST_NAME}"
    dataset.OperatorsName = f"{NAME}^{FIRST_NAME}"
    dataset.PatientComments = f"{FIRST_NAME} {NAME}, born {BIRTH_DATE}"
    dataset.ImageComments = f"{FIRST_NAME} {NAME}"
    if spoil == "no pixels":
        del dataset.PixelData
    elif spoil == "odd size":
        dataset.Rows = int(dataset.Rows) + 1
    elif spoil == "odd date":  # pydicom quotes a value that breaks its rules
        dataset["PatientBirthDate"]._value = f"29 {NAME} 1947"
    dataset.save_as(path)
    if spoil == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def everything_in(folder: Path) -> str:
    """The text of all files, compressed tables unpacked."""
    parts = [path.read_bytes().decode("latin-1") for path in sorted(folder.rglob("*")) if path.is_file()]
    parts += [pd.read_parquet(path).to_csv() for path in sorted(folder.rglob("*.parquet"))]
    return "\n".join(parts)


def assert_silent(text: str) -> None:
    for secret in SECRETS:
        assert secret.lower() not in text.lower()
    assert YEAR not in _MEASURED.sub("", text)


def assert_nothing_reported(result: Outcome) -> None:
    assert_silent(result.out)
    assert_silent(result.err)


@pytest.fixture(scope="module")
def named(line: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans of a named person, one whole and four broken."""
    folder = tmp_path_factory.mktemp("named")
    scans = sorted(line.cohort.rglob("*.dcm"))
    for scan, spoil in zip(scans, ("", "no pixels", "odd size", "odd date", "cut"), strict=False):
        named_copy(scan, folder / f"{spoil or 'whole'}.dcm", spoil)
    return folder


@pytest.mark.parametrize(
    "text", ["ALONSINA", "x19470929y", "born 1947.", "(1947)", "P1947", "_1947_", "a51947f0", "29 Q 1947, 12"]
)
def test_a_name_or_a_year_is_seen(text: str) -> None:
    with pytest.raises(AssertionError):
        assert_silent(text)


def test_digits_of_a_measured_time_are_no_year() -> None:
    assert_silent("1.0919475504996745")


def test_the_files_do_hold_the_name(named: Path) -> None:
    with pytest.raises(AssertionError):
        assert_silent(everything_in(named))


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_inspect_tells_no_name(named: Path, form: tuple[str, ...]) -> None:
    kinds = []
    for scan in sorted(named.iterdir()):
        result = call("inspect", scan, *form)
        assert result.code == 0
        assert_nothing_reported(result)
        kinds.append("rejected" if "rejected" in result.out else "volume")
    assert set(kinds) == {"rejected", "volume"}


@pytest.mark.slow
def test_ingest_keeps_no_name(named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "octjepa.tasks.segmenter.store_layers.LayerCache", FlatLayers
    )  # a network takes seconds for every scan
    store = tmp_path / "store"
    result = run("ingest", named, "--store", store, "--workers", 1, "--max-lost", 1, "--json")
    assert result.json["accepted"] >= 1
    assert result.json["quarantined"] >= 2
    assert_nothing_reported(result)
    assert_silent(everything_in(store))
    result = call("report", store, "--json")
    assert_silent(Path(result.json["report"]).read_text(encoding="utf-8"))
    assert_nothing_reported(result)


def test_a_folder_called_after_a_person_does_not_reach_the_store(line: Any, tmp_path: Path) -> None:
    scans = sorted(line.cohort.rglob("*.dcm"))[:3]
    folder = tmp_path / "export" / f"{NAME}_{FIRST_NAME}"
    folder.mkdir(parents=True)
    for number, (scan, spoil) in enumerate(zip(scans, ("", "no pixels", ""), strict=True)):
        named_copy(scan, folder / f"{BIRTH_DATE}-{number}.dcm", spoil)
    store = tmp_path / "store"
    result = run("ingest", tmp_path / "export", "--store", store, "--workers", 1, "--max-lost", 1, "--json")
    assert result.json["accepted"] == 2
    assert result.json["personal_data"]["PatientName"] == 2
    assert_nothing_reported(result)
    assert_silent(everything_in(store))
    index = pd.read_parquet(store / "volumes.parquet")
    assert set(index["source"]) == {"***/***.dcm"}
    result = call("inspect", store, "--json")
    assert result.json["personal_data"]["PatientName"] == {"files": 2, "kind": "name", "direct": True}
    assert_nothing_reported(result)
