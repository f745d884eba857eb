"""A cohort with broken files: what discovery, canonicalising and the index decide, and that nobody's name leaks."""

from __future__ import annotations

import csv

import pytest
from tests.zoo import DEFECTS
from tests.zoo.headers import PATIENT_NAME

from octjepa.errors import TooManyLostError
from octjepa.ingest import build_store
from octjepa.phantom import cohort
from octjepa.recipe import Preprocessing
from octjepa.store import Store

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)
CHOSEN = (
    "truncated",
    "resource_fork",
    "no_suffix",
    "constant",
    "all_black",
    "mostly_black",
    "blink",
    "white_fill",
    "same_pixels",
    "same_uid",
    "no_file",
    "no_row",
    "strange_name",
    "name_as_id",
    "upside_down",
    "radial",
)


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], Store]:
    root = tmp_path_factory.mktemp("zoo")
    chosen = [DEFECTS[name] for name in CHOSEN]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cohort, "defects_for", lambda _: chosen)
        patch.setattr(cohort, "DEFECTS", DEFECTS)
        cohort.write_cohort(
            root / "cohort", people=1, seed=4, devices=("zeiss_cirrus",), design=cohort.CohortDesign(broken=len(chosen))
        )
    with pytest.raises(TooManyLostError):
        build_store([root / "cohort"], root / "store", PREPROCESSING)
    with (root / "cohort" / "truth" / "broken.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t")), Store.open(root / "store")


@pytest.mark.parametrize("name", CHOSEN)
def test_every_fate_in_a_cohort(name: str, ingested: tuple[list[dict[str, str]], Store]) -> None:
    broken, store = ingested
    (row,) = [row for row in broken if row["kind"] == name]
    file = row["filepath"].lstrip("/")
    stored_files = {stored.file: stored for stored in store.entries()}
    refused = {line["file"]: line["reason"] for line in store.quarantine}
    if row["fate"] == "accepted":
        assert file in stored_files
        notes = {note.partition("=")[0] for note in stored_files[file].notes.split(";")}
        assert set(filter(None, row["notes"].split(";"))) <= notes
        assert int(row["frames"]) == stored_files[file].native_d or name == "radial"
    else:
        assert file not in stored_files
        assert refused.get(file, "") in row["reasons"].split(";")


def test_no_name_goes_on(ingested: tuple[list[dict[str, str]], Store]) -> None:
    _, store = ingested
    written = [path for path in store.path.rglob("*") if path.is_file()]
    assert written
    for word in (PATIENT_NAME, "19010203"):
        assert all(word.encode() not in path.read_bytes() for path in written)
