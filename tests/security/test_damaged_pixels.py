"""Pixels of a store that changed after ingest are not read: a process compares each volume once with the index."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from command_line import call
from index_entries import index_entry
from octjepa.files import replace_folder
from octjepa.store import Store
from octjepa.store.shards import pack
from octjepa.store.storage import DamagedVolume, chunk_hash, stage_chunk
from synthetic import small_recipe, volume


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preprocessing = small_recipe().preprocessing
    store = Store.create(tmp_path_factory.mktemp("original") / "store", preprocessing)
    for number in range(4):
        entry = index_entry(number)
        folder = store.chunk_folder(entry["volume_id"])
        replace_folder(stage_chunk(folder, volume(preprocessing, number)), folder)
        files = {name: folder / name for name in ("pixels.npy", "geometry.npz")}
        store.add({**entry, "chunk_hash": chunk_hash(files)})
    store.consolidate()
    return store.path


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "store"))


def overwrite(path: Path, start: int = -500) -> None:
    """Other bytes of the same length, with the same date of the last change."""
    about, content = path.stat(), bytearray(path.read_bytes())
    content[start : start + 100] = bytes(255 - byte for byte in content[start : start + 100])
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize("name", ["pixels.npy", "geometry.npz"])
def test_a_changed_file_is_damage(store: Path, name: str) -> None:
    first, second = Store.open(store).table["volume_id"][:2]
    overwrite(Store.open(store).chunk_folder(first) / name)
    with pytest.raises(DamagedVolume):
        Store.open(store).read(first)
    assert Store.open(store).read(second).pixels.any()
    assert Store.open(store).damaged() == [first]
    outcome = call("inspect", store, "--verify")
    assert outcome.code == 1
    assert "1 volumes of" in outcome.err


def test_exchanged_volumes_are_damage(store: Path) -> None:
    opened = Store.open(store)
    first, second = (opened.chunk_folder(name) / "pixels.npy" for name in opened.table["volume_id"][:2])
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert len(Store.open(store).damaged()) == 2


def test_a_changed_shard_is_damage(store: Path) -> None:
    pack(Store.open(store))
    (shard,) = (store / "shards").glob("*.bin")
    overwrite(shard, 5000)
    assert len(Store.open(store).damaged()) == 1


def test_a_volume_that_changes_after_it_was_read_is_compared_again(store: Path) -> None:
    opened = Store.open(store)
    name = opened.table["volume_id"][0]
    opened.read(name)
    path = opened.chunk_folder(name) / "pixels.npy"
    pixels = np.load(path)
    np.save(path, 255 - pixels)
    with pytest.raises(DamagedVolume):
        opened.read(name)


def test_each_volume_is_hashed_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[object] = []
    monkeypatch.setattr("octjepa.store.folder.chunk_hash", lambda files: hashed.append(1) or chunk_hash(files))
    opened = Store.open(store)
    for _ in range(3):
        for name in opened.table["volume_id"]:
            opened.read(name)
    assert len(hashed) == 4
