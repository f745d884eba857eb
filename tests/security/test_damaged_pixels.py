"""Pixels of a store that changed after ingest are not read: a process compares each volume once with the index."""

from __future__ import annotations

import io
import json
import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import Outcome, call
from index_entries import index_entry
from octjepa.config import to_yaml
from octjepa.files import read_json_lines, replace_folder
from octjepa.store import Store
from octjepa.store.index import IndexEntry
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
        store.add(IndexEntry(**{**entry, "chunk_hash": chunk_hash(files)}))
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


def change_geometry(store: Path, write: Callable[..., None], **changed: np.ndarray) -> str:
    """Writes other arrays of the first volume of a store as its maker would, with their hash in the index."""
    name = Store.open(store).table["volume_id"][0]
    folder = Store.open(store).chunk_folder(name)
    with np.load(folder / "geometry.npz") as arrays:
        write(folder / "geometry.npz", **{**arrays, **changed})
    table = pd.read_parquet(store / "volumes.parquet")
    digest = chunk_hash({file: folder / file for file in ("pixels.npy", "geometry.npz")})
    table.loc[table["volume_id"] == name, "chunk_hash"] = digest
    table.to_parquet(store / "volumes.parquet")
    return name


def test_a_geometry_that_would_fill_the_memory_is_damage(store: Path) -> None:
    band = np.zeros((2, 6000, 6000), np.int16)  # 144 MB, packed to 0.14 MB
    name = change_geometry(store, np.savez_compressed, band=band)
    del band
    opened = Store.open(store)
    tracemalloc.start()
    with pytest.raises(DamagedVolume, match="band is compressed"):
        opened.read(name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_an_array_that_declares_more_than_it_holds_is_damage(store: Path) -> None:
    def write(path: Path, **arrays: np.ndarray) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                member = io.BytesIO()
                np.save(member, array)
                content = member.getvalue()
                if name == "band":
                    about = io.BytesIO()
                    np.lib.format.write_array_header_1_0(
                        about, {"shape": (2, 10**6, 10**6), "fortran_order": False, "descr": "<i2"}
                    )
                    content = about.getvalue() + content[128:]
                archive.writestr(f"{name}.npy", content)

    name = change_geometry(store, write)
    with pytest.raises(DamagedVolume, match="band is shorter than its header says"):
        Store.open(store).read(name)


def test_a_band_of_another_size_than_the_shifts_is_damage(store: Path) -> None:
    name = change_geometry(store, np.savez, band=np.zeros((2, 3, 4), np.int16))
    with pytest.raises(DamagedVolume, match="do not belong together"):
        Store.open(store).read(name)


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


# -- a run on a store that changed --


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of 12 training volumes, a recipe, and a run of 4 updates on them."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = small_recipe(data={"min_quality": None}, checkpoint={"every_updates": 2}, monitor={"every_updates": None})
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    store = Store.create(folder / "store", recipe.preprocessing)
    for number in range(12):
        entry = index_entry(number, split="train" if number < 10 else "val", quality=0.8)
        chunk = store.chunk_folder(entry["volume_id"])
        made = volume(recipe.preprocessing, number)
        replace_folder(stage_chunk(chunk, made), chunk)
        files = {name: chunk / name for name in ("pixels.npy", "geometry.npz")}
        moments = {"tissue_mean": made.tissue_mean, "tissue_std": made.tissue_std}
        store.add(IndexEntry(**{**entry, **moments, "chunk_hash": chunk_hash(files)}))
    store.consolidate()
    assert pretrain(folder, folder).code == 0
    return folder


def pretrain(run: Path, folder: Path, *words: str) -> Outcome:
    return call(
        "pretrain",
        folder / "recipe.yaml",
        "--store",
        folder / "store",
        "--out",
        run / "run",
        "--json",
        "--quiet",
        *words,
    )


@pytest.fixture
def stopped(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained` whose run ended after update 2 of 4."""
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000004")
    (folder / "run" / "summary.json").unlink()
    return folder


def overwrite_volumes(folder: Path, share: float = 1.0) -> list[str]:
    """Puts other pixels of the right shape into the first volumes of the training set, with the old dates."""
    store = Store.open(folder / "store")
    names = store.table.loc[store.table["split"] == "train", "volume_id"].tolist()
    names = names[: round(share * len(names))]
    for name in names:
        path = store.chunk_folder(name) / "pixels.npy"
        about, pixels = path.stat(), np.load(path)
        path.unlink()
        np.save(path, np.roll(pixels, 7, axis=2))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    return names


@pytest.mark.slow
def test_a_run_resumes_on_the_store_that_it_began_with(stopped: Path) -> None:
    """Without this the tests below would pass whatever ended the run."""
    outcome = pretrain(stopped, stopped, "--resume")
    assert outcome.code == 0, outcome.err
    assert outcome.json["unreadable_volumes"] == 0


def test_a_run_stops_when_the_pixels_behind_its_ids_changed(stopped: Path) -> None:
    overwrite_volumes(stopped)
    outcome = pretrain(stopped, stopped, "--resume")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()[-1:]) == 1
    assert "changed after ingest" in outcome.err
    assert "Traceback" not in outcome.err
    assert not (stopped / "run" / "summary.json").exists()
    names = [path.name for path in (stopped / "run" / "checkpoints").iterdir()]
    assert "step-00000004" not in names


@pytest.mark.slow
def test_a_run_leaves_out_and_records_the_volumes_that_changed(stopped: Path) -> None:
    """One volume of ten: the run continues without it, and its records say so."""
    names = overwrite_volumes(stopped, 0.1)
    outcome = pretrain(stopped, stopped, "--resume")
    assert outcome.code == 0, outcome.err
    lines = read_json_lines(stopped / "run" / "metrics.jsonl")
    unreadable = {name for line in lines for name in line.get("unread", ())}
    assert unreadable <= set(names)
    assert outcome.json["unreadable_volumes"] == len(unreadable)
    rows = [json.loads(line) for line in (stopped / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert {row["file"] for row in rows if row["stage"] == "train"} == unreadable


def test_embed_and_verify_find_the_pixels_that_changed(stopped: Path) -> None:
    names = overwrite_volumes(stopped, 0.3)
    out = stopped / "table.parquet"
    outcome = call("embed", stopped / "run", "--store", stopped / "store", "--out", out, "--quiet")
    assert outcome.code == 2
    assert "changed after ingest" in outcome.err
    assert "Traceback" not in outcome.err
    assert not out.exists()
    outcome = call("inspect", stopped / "store", "--verify", "--json")
    assert outcome.code == 1
    assert sorted(outcome.json["damaged"]) == sorted(names)
