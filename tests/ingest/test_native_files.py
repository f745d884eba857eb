"""The files that a store was made from are found again by the names that its index shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oct_dicom import make_dataset, retina, save
from octjepa.ingest.native_files import NativeFiles
from octjepa.ingest.sources import discover
from octjepa.read.reader import read_volume
from octjepa.store.index import IndexEntry


def entry(file: str, content_hash: str) -> IndexEntry:
    texts = dict.fromkeys(("volume_id", "person_id", "eye", "personal", "notes", "split"), "")
    return IndexEntry(file=file, content_hash=content_hash, **texts)


def test_each_series_of_a_folder_is_found_by_its_number(tmp_path: Path) -> None:
    frames = retina(5)
    for uid, pixels in (("1.2.3", frames), ("1.2.4", frames[:, :, ::-1])):
        for number, frame in enumerate(pixels):
            dataset = make_dataset(np.ascontiguousarray(frame[None]), 0.05 * (number + 1))
            dataset.SeriesInstanceUID, dataset.InstanceNumber = uid, number
            del dataset.PerFrameFunctionalGroupsSequence
            save(dataset, tmp_path / "P9" / f"{uid}_{number}.dcm")
    files = discover([tmp_path]).files
    assert [file.name for file in files] == ["P9#1", "P9#2"]
    for file in files:
        volume = read_volume(file.path, dataset_path=file.dataset_path, member=file.member)
        found = NativeFiles([], [tmp_path]).read(entry(file.name, volume.content_hash))
        assert np.array_equal(found.pixels, volume.pixels)


def test_a_file_with_a_hash_sign_in_its_name_is_found(tmp_path: Path) -> None:
    path = save(make_dataset(retina()), tmp_path / "P#1.dcm")
    volume = read_volume(path)
    assert NativeFiles([], [tmp_path]).read(entry("P#1.dcm", volume.content_hash)).shape == volume.shape
