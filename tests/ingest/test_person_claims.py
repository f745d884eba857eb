"""Two people under one id are noticed by what their files state, and the note names nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from oct_dicom import make_dataset, save
from octjepa.ingest.build import build_store
from octjepa.ingest.person_claims import PersonClaims
from octjepa.notes import read_notes
from octjepa.read.personal_data import StatedPerson
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from shaped_eye import shaped_eye


def _entry(person_id: str, device: str = "unknown", site: str = "") -> IndexEntry:
    ids = {"volume_id": "a", "content_hash": "a", "eye": "OD", "notes": "", "split": "", "file": "a.dcm"}
    return IndexEntry(person_id=person_id, device=device, site=site, personal="", **ids)


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        (("Doe^Jane", ""), ("Roe^John", ""), ("names",)),
        (("Doe^Jane", "19500101"), ("Doe^Jane", "19610101"), ("birth_years",)),
        (("Doe^Jane", "19500101"), ("DOE JANE", "1950-02-01"), ()),
        (("Doe^Jane", ""), ("Smith^Jane", ""), ()),  # a name changes by marriage
        (("Doe^Jane", ""), ("Anonymous", "19000101"), ()),
        (("Doe^Jane", ""), ("", ""), ()),
        (("Patient1 AMD", "20000101"), ("Patient1 Healthy", "20000101"), ("names",)),  # as in genuine exports
        (("Doe^Jane", "", "F"), ("Doe^John", "", "male"), ("sex",)),
        (("Doe^Jane", "19500101", "F"), ("Roe^John", "19610101", "M"), ("names", "birth_years", "sex")),
        (("Doe^Jane", "", "F"), ("Doe^Jane", "", "O"), ()),
        (("", "", "1"), ("", "", "2"), ("sex",)),  # as Topcon writes it
        (("", "", "0"), ("", "", "2"), ()),
    ],
)
def test_names_birth_years_and_sex_contradict(
    one: tuple[str, ...], other: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    claims = PersonClaims()
    claims.learn(_entry("4711"), StatedPerson(*one))
    claims.learn(_entry("2222"), StatedPerson("Other^Person", "19300101", "M"))
    claims.learn(_entry("4711"), StatedPerson(*other))
    assert claims.contradictions() == ({"4711": kinds} if kinds else {})


def test_devices_and_sites_count_for_ids_that_exports_write_for_everyone_and_beside_another_contradiction() -> None:
    claims = PersonClaims()
    for person_id, name in (("1111", ""), ("001234", ""), ("4711", ""), ("2222", "Doe^Jane")):
        claims.learn(_entry(person_id, "topcon_triton", "site-1"), StatedPerson(name))
        claims.learn(_entry(person_id, "zeiss_cirrus", "site-2"), StatedPerson())
    claims.learn(_entry("8", "topcon_triton"), StatedPerson(sex="F"))
    claims.learn(_entry("8", "zeiss_cirrus"), StatedPerson(sex="M"))
    assert claims.contradictions() == {
        "1111": ("devices", "sites"),
        "001234": ("devices", "sites"),
        "8": ("sex", "devices"),
    }


def _save_scan(path: Path, seed: int, name: str, sex: str) -> None:
    volume = shaped_eye("topcon_maestro2", seed=seed).volume
    ds = make_dataset(volume.pixels, round(volume.spacing_mm[0], 5))
    ds.PatientID, ds.PatientName, ds.PatientBirthDate, ds.PatientSex = "1111", name, "19500101", sex
    path.parent.mkdir(exist_ok=True)
    save(ds, path)


def test_ingest_notes_an_id_of_two_people_without_naming_them_and_a_manifest_parts_them(tmp_path: Path) -> None:
    scans, store = tmp_path / "scans", tmp_path / "store"
    _save_scan(scans / "0.dcm", 0, "Doe^Jane", "F")
    assert build_store([scans], store, Preprocessing()).people_contradicted == 0
    _save_scan(scans / "1.dcm", 1, "Roe^Jane", "M")  # read in a later run
    summary = build_store([scans], store, Preprocessing())
    assert (summary.accepted, summary.people_contradicted) == (1, 1)
    table = Store.open(store).table
    for cell in table["notes"]:
        assert [note for note in read_notes(cell) if note.code == "person_contradicted"] == ["person_contradicted=sex"]
    assert not table.astype(str).apply(lambda column: column.str.contains("doe|roe|jane", case=False)).to_numpy().any()

    _save_scan(scans / "1.dcm", 1, "Roe^John", "M")  # corrected: what it stated before is no longer noted alone
    build_store([scans], store, Preprocessing())
    assert Store.open(store).table["notes"].str.contains("person_contradicted=names+sex", regex=False).all()

    (scans / "manifest.tsv").write_text("person_id\tfilepath\nclinic1-1111\t0.dcm\nclinic2-1111\t1.dcm\n")
    assert build_store([scans], store, Preprocessing()).people_contradicted == 0
    assert set(Store.open(store).table["person_id"]) == {"clinic1-1111", "clinic2-1111"}


def test_the_note_of_a_contradiction_ends_when_one_of_the_two_people_gets_another_id(tmp_path: Path) -> None:
    scans, store = tmp_path / "scans", tmp_path / "store"
    contract = Preprocessing(image_size=(8, 64, 64), margin=(0, 8, 8))
    for number, (name, sex) in enumerate((("Doe^Jane", "F"), ("Roe^John", "M"))):
        _save_scan(scans / f"{number}.dcm", number, name, sex)

    def contradicted() -> list[bool]:
        return ["person_contradicted=" in entry.notes for entry in Store.open(store).entries()]

    assert build_store([scans], store, contract).people_contradicted == 1
    assert build_store([scans / "0.dcm"], store, contract).people_contradicted == 1  # the other file is not looked at
    assert contradicted() == [True, True]
    (scans / "manifest.tsv").write_text("person_id\tfilepath\n2222\t1.dcm\n")
    assert build_store([scans], store, contract).people_contradicted == 0
    assert contradicted() == [False, False]
