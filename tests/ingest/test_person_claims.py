"""Two people under one id are noticed by what their files state, and the note names nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from oct_dicom import make_dataset, save
from octjepa.ingest.build import build_store
from octjepa.ingest.person_claims import PersonClaims
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from shaped_eye import shaped_eye


@pytest.mark.parametrize(
    ("one", "other", "contradicted"),
    [
        (("Doe^Jane", ""), ("Roe^John", ""), True),
        (("Doe^Jane", "19500101"), ("Doe^Jane", "19610101"), True),
        (("Doe^Jane", "19500101"), ("DOE JANE", "1950-02-01"), False),
        (("Doe^Jane", ""), ("Smith^Jane", ""), False),  # a name changes by marriage
        (("Doe^Jane", ""), ("Anonymous", "19000101"), False),
        (("Doe^Jane", ""), ("", ""), False),
    ],
)
def test_names_and_birth_years_contradict(one: tuple[str, str], other: tuple[str, str], contradicted: bool) -> None:
    claims = PersonClaims()
    claims.learn("1111", *one)
    claims.learn("2222", "Other^Person", "19300101")
    claims.learn("1111", *other)
    assert claims.contradicted() == ({"1111"} if contradicted else set())


def test_ingest_notes_an_id_of_two_people_without_naming_them(tmp_path: Path) -> None:
    for number, name in enumerate(("Doe^Jane", "Roe^John")):
        volume = shaped_eye("topcon_maestro2", seed=number).volume
        ds = make_dataset(volume.pixels, round(volume.spacing_mm[0], 5))
        ds.PatientID, ds.PatientName, ds.PatientBirthDate = "1111", name, "19500101"
        save(ds, tmp_path / "scans" / f"{number}.dcm")
    summary = build_store([tmp_path / "scans"], tmp_path / "store", Preprocessing())
    assert summary["accepted"] == 2
    assert summary["people_contradicted"] == 1
    table = Store.open(tmp_path / "store").table
    assert table["notes"].str.contains("person_contradicted").all()
    assert not table.astype(str).apply(lambda column: column.str.contains("doe|roe", case=False)).to_numpy().any()
