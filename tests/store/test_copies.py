"""Copies are told apart: under another person id, as the other eye, nearly the same; the named way out works."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from oct_dicom import make_dataset, save
from octjepa.cohort.split import apply_split
from octjepa.errors import OctjepaError
from octjepa.ingest import build_store
from octjepa.phantom import make_eye
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.store.shards import pack

CONTRACT = Preprocessing(image_size=(16, 64, 64))


@cache
def eye(index: int) -> np.ndarray:
    return make_eye(5, index, "OD", "heidelberg_spectralis").pixels[::2, ::2, ::2]


def write(pixels: np.ndarray, path: Path, person: str, side: str = "R") -> None:
    ds = make_dataset(pixels, 0.52)
    shared = ds.SharedFunctionalGroupsSequence[0]
    shared.PixelMeasuresSequence[0].PixelSpacing, shared.FrameAnatomySequence[0].FrameLaterality = [0.008, 0.06], side
    ds.PatientID, ds.ImageLaterality, ds.ProtocolName = person, side, ""
    save(ds, path)


def test_each_kind_of_copy_is_named_with_a_way_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "set"
    write(eye(0), folder / "a.dcm", "A")
    write(eye(0), folder / "a_left.dcm", "A", "L")
    write(eye(0), folder / "a_other.dcm", "Z")
    for number in range(2):
        noise = rng.integers(-2, 3, eye(1).shape)
        write(np.clip(eye(1) + noise, 0, 255).astype(np.uint8), folder / f"b{number}.dcm", f"B{number}")
    with caplog.at_level(logging.WARNING, "octjepa"):
        report = build_store([folder], tmp_path / "store", CONTRACT, max_lost=1)
    assert (report.accepted, report.by_reason) == (3, {"duplicate_content": 2})
    warnings = caplog.text
    assert "under another person id: 1 (duplicate_content" in warnings
    assert "1 pair of volumes with the same eye under two person ids" in warnings
    assert "2 volumes in 1 group: b0.dcm, b1.dcm." in warnings
    assert f"`octjepa split {tmp_path / 'store'} --assign-rest`" in warnings
    entries = [json.loads(line) for line in (tmp_path / "store" / "quarantine.jsonl").read_text().splitlines()]
    details = {entry["file"]: entry["detail"] for entry in entries}
    assert "there as the other eye (OD; here OS): one of the two files is mislabelled" in details["a_left.dcm"]
    assert "under another person id" in details["a_other.dcm"]
    result = apply_split(Store.open(tmp_path / "store"), "recommended", assign_rest=True)  # the command that is named
    assert {leak.kind for leak in result.leaks} <= {"near_duplicate"}
    assert result.train + result.val + result.test == 3


def test_inverted_intensities_are_called_inverted(tmp_path: Path) -> None:
    write(255 - eye(0), tmp_path / "set" / "inverted.dcm", "A")
    write(eye(0), tmp_path / "set" / "sound.dcm", "B")
    report = build_store([tmp_path / "set"], tmp_path / "store", CONTRACT, max_lost=1)
    assert report.by_reason == {"no_tissue": 1}
    (entry,) = Store.open(tmp_path / "store").quarantine
    assert "look inverted" in entry["detail"]
    assert "MONOCHROME1" in entry["detail"]


def test_a_copy_in_another_folder_does_not_change_the_person_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(eye(0), tmp_path / "old" / "a.dcm", "A")
    write(eye(0), tmp_path / "moved" / "a.dcm", "A")
    write(eye(0), tmp_path / "other" / "z.dcm", "Z")
    with caplog.at_level(logging.WARNING, "octjepa"):
        for folder in ("old", "moved"):
            build_store([tmp_path / folder], tmp_path / "store", CONTRACT)
        assert "another person id or eye" not in caplog.text
        build_store([tmp_path / "other"], tmp_path / "store", CONTRACT)
    assert "1 volume had another person id or eye" in caplog.text
    assert set(Store.open(tmp_path / "store").table["person_id"]) == {"Z"}


def test_a_damaged_index_file_that_is_removed_is_written_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(eye(0), tmp_path / "set" / "a.dcm", "A")
    build_store([tmp_path / "set"], store, CONTRACT)
    pack(Store.open(store))
    for name in ("volumes.parquet", "shards.parquet", "quarantine.jsonl", "journal.jsonl"):
        (store / name).write_bytes(b'{"volume": {}, "file": 1}\n')
        with pytest.raises(OctjepaError, match=f"{name}.* is damaged .*remove it and ingest again"):
            Store.open(store)
        (store / name).unlink()
        build_store([tmp_path / "set"], store, CONTRACT)
        assert not Store.open(store).damaged()
        assert len(Store.open(store)) == 1
