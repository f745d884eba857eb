"""A name that one file states masks the paths and ids of its siblings, which state none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.ingest import build_store
from octjepa.ingest.sibling_names import SiblingNames
from octjepa.read.personal_data import StatedPerson, pseudonym
from octjepa.recipe import Preprocessing
from octjepa.store import Store

SMALL = Preprocessing(image_size=(16, 32, 32))


@pytest.mark.parametrize(
    ("learned_from", "path", "expected"),
    [
        ("jane_doe/a.dcm", "jane_doe/b.npy", "***/b.npy"),
        ("jane_doe/OD/a.dcm", "jane_doe/OS/doe.npy", "***/OS/***.npy"),
        ("1001/a.dcm", "1001/doe_od.npy", "1001/***.npy"),
        ("1001/a.dcm", "1001/deep/19500101.tif", "1001/deep/***.tif"),
        ("set/doe/a.dcm", "set/doe_visit2/a.npy", "set/***/a.npy"),
        ("1001/a.dcm", "1002/doe_od.npy", "1002/doe_od.npy"),  # another person's folder
        ("1001/a.dcm", "1001/b.npy", "1001/b.npy"),
    ],
)
def test_names_reach_the_siblings_and_no_further(learned_from: str, path: str, expected: str) -> None:
    names = SiblingNames()
    names.learn(learned_from, StatedPerson("Doe^Jane", "19500101"))
    names.learn(learned_from, StatedPerson("Anonymous", ""))
    assert names.masked(path, path) == expected
    assert names.masked(path, "***/" * path.count("/") + "***") == "***/" * path.count("/") + "***"
    assert names.identifies("1001/x.npy", "DOE-7") == (learned_from.startswith("1001"))


def test_an_ingest_writes_no_name_that_any_file_of_a_folder_states(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "Doe_Jane"
    named = make_dataset(retina(seed=1))
    named.PatientName, named.PatientBirthDate, named.PatientID = "Doe^Jane", "19500101", "P-1"
    save(named, folder / "z_last.dcm")  # read after its siblings
    cleaned = make_dataset(retina(seed=2))
    cleaned.PatientName, cleaned.PatientBirthDate, cleaned.PatientID = "", "", "DoeJane"
    save(cleaned, folder / "a_first.dcm")
    np.save(folder / "doe_segmentation.npy", np.zeros((5, 40, 40), bool))  # refused
    (folder / "jane.dcm").write_bytes(b"no DICOM at all" * 20)  # refused
    store = tmp_path / "store"
    build_store([tmp_path / "set"], store, SMALL, max_lost=1)
    save(cleaned_copy(), folder / "doe_second.dcm")
    build_store([tmp_path / "set"], store, SMALL, max_lost=1)  # the named file is not read again
    made = Store.open(store)
    assert len(list(made.entries())) == 3
    assert len(made.quarantine) == 2
    for file in (*(entry.file for entry in made.entries()), *(refusal["file"] for refusal in made.quarantine)):
        assert file.startswith("***/"), file
    assert {entry.person_id[:2] for entry in made.entries()} == {"P-", "p-"}
    for path in store.rglob("*"):
        if path.is_file():
            content = path.read_bytes().lower()
            assert b"doe" not in content, path
            assert b"jane" not in content, path


def cleaned_copy() -> object:
    ds = make_dataset(retina(seed=3))
    ds.PatientName, ds.PatientBirthDate, ds.PatientID = "", "", "P-1"
    return ds


def test_an_id_that_is_a_name_elsewhere_is_one_person_in_one_split(tmp_path: Path) -> None:
    """Only the export of the first visit holds the name that the id repeats."""
    store = tmp_path / "store"
    for number, (visit, name) in enumerate({"visit1": "Miller^Jo", "visit2": "", "visit3": ""}.items()):
        ds = make_dataset(retina(seed=number))
        ds.PatientID, ds.PatientName, ds.PatientBirthDate = "MILLERF", name, ""
        save(ds, tmp_path / visit / "0" / "x.dcm")
    build_store([tmp_path / "visit2"], store, SMALL)
    Store.open(store).set_split({"MILLERF": "test"})
    build_store([tmp_path / "visit1"], store, SMALL)
    summary = build_store([tmp_path / "visit2", tmp_path / "visit3"], store, SMALL)
    assert summary.people == 1
    assert {(entry.person_id, entry.split) for entry in Store.open(store).entries()} == {(pseudonym("MILLERF"), "test")}
    for path in store.rglob("*"):
        assert not path.is_file() or b"miller" not in path.read_bytes().lower(), path
