"""Volumes packed into shards: read as before, from a disk and a bucket; kills, damage and later ingests."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bucket_servers import Bucket
from command_line import call
from octjepa.config import load_recipe
from octjepa.errors import OctjepaError, UsageError
from octjepa.ingest import build_store
from octjepa.remote import join, list_objects
from octjepa.store import Store
from octjepa.store import shards as shards_module
from octjepa.store.shards import Packed, ShardTable, pack
from octjepa.store.storage import DamagedVolume

PREPROCESSING = load_recipe("tiny_cpu").preprocessing
TWO_VOLUMES_MB = 0.4  # a volume has 0.33 MB, and a shard ends with the volume that fills it


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of ten volumes, not packed."""
    path = tmp_path_factory.mktemp("whole") / "store"
    build_store([tiny], path, PREPROCESSING)
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to pack."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


def same(one: Store, other: Store) -> None:
    assert one.table.equals(other.table)
    for volume_id in one.table["volume_id"]:
        a, b = one.read(volume_id), other.read(volume_id)
        assert np.array_equal(a.pixels, b.pixels)
        assert np.array_equal(a.band, b.band)
        assert np.array_equal(a.shifts, b.shifts)
        assert np.array_equal(one.native_map(volume_id).frame_mm, other.native_map(volume_id).frame_mm)


def test_a_packed_store_is_read_as_before(whole: Path, path: Path) -> None:
    opened_before = Store.open(path)
    found = pack(Store.open(path), TWO_VOLUMES_MB)
    written = sum(file.stat().st_size for file in (path / "shards").iterdir())
    assert found == Packed(volumes=10, packed=10, shards=5, bytes=written, damaged=[])
    assert not list((path / "chunks").rglob("*.np*"))
    same(Store.open(path), Store.open(whole))
    same(opened_before, Store.open(whole))  # a reader that was there when it was packed
    assert Store.open(path).damaged() == []
    assert Store.open(path).describe().packed == 10


def test_whoever_may_read_the_index_may_read_the_pixels(path: Path) -> None:
    """The mode of a folder or file is that of the index, by the umask: a store on a shared disk is for colleagues."""
    expected = (path / "store.json").stat().st_mode & 0o777
    for file in path.glob("chunks/*/*/*"):
        assert file.stat().st_mode & 0o777 == expected
        assert file.parent.stat().st_mode & 0o777 == path.stat().st_mode & 0o777
    pack(Store.open(path), TWO_VOLUMES_MB)
    shards = list(path.glob("shards/*.bin"))
    assert {shard.stat().st_mode & 0o777 for shard in shards} == {expected}


def test_packing_again_does_nothing(path: Path) -> None:
    pack(Store.open(path))
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*.bin")}
    assert pack(Store.open(path)).packed == 0
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*.bin")} == before


@pytest.mark.slow
def test_ingest_finds_packed_volumes_and_adds_beside_them(tiny: Path, whole: Path, tmp_path: Path) -> None:
    files = sorted((tiny / "topcon_maestro2").iterdir())
    part = tmp_path / "part"
    part.mkdir()
    for file in files[:6]:
        shutil.copy(file, part)
    path = tmp_path / "store"
    build_store([part], path, PREPROCESSING)
    pack(Store.open(path))
    for file in files[6:]:
        shutil.copy(file, part)
    summary = build_store([part], path, PREPROCESSING)
    assert (summary.skipped, summary.accepted) == (6, 4)
    assert len(list((path / "chunks").rglob("pixels.npy"))) == 4
    assert pack(Store.open(path)).packed == 4
    assert len(Store.open(path).shards.names()) == 2
    for volume_id in Store.open(whole).table["volume_id"]:
        assert np.array_equal(Store.open(path).read(volume_id).pixels, Store.open(whole).read(volume_id).pixels)


def test_a_lost_shard_is_ingested_again(tiny: Path, whole: Path, path: Path) -> None:
    pack(Store.open(path), TWO_VOLUMES_MB)
    shard = next((path / "shards").iterdir())
    shard.unlink()
    with pytest.raises(DamagedVolume):
        [Store.open(path).read(name) for name in Store.open(path).table["volume_id"]]
    assert build_store([tiny], path, PREPROCESSING).accepted == 2
    assert shard.name not in ShardTable.read(path).names()
    assert Store.open(path).damaged() == []


def test_a_shortened_shard_and_a_changed_one_are_damage(path: Path) -> None:
    pack(Store.open(path))
    (shard,) = (path / "shards").iterdir()
    content = shard.read_bytes()
    shard.write_bytes(content[:-1000])
    last = str(Store.open(path).shards.table["volume_id"].iloc[-1])
    with pytest.raises(DamagedVolume):
        Store.open(path).read(last)
    shard.write_bytes(content[:5000] + b"\xff" + content[5001:])
    assert Store.open(path).damaged() == [str(Store.open(path).shards.table["volume_id"].iloc[0])]


def test_a_damaged_volume_stays_where_it_is(path: Path) -> None:
    store = Store.open(path)
    bad = str(store.table["volume_id"].iloc[3])
    pixels = store.chunk_folder(bad) / "pixels.npy"
    pixels.write_bytes(pixels.read_bytes()[:-1] + b"\x01")
    assert pack(Store.open(path)).damaged == [bad]
    assert pixels.is_file()
    assert Store.open(path).describe().packed == 9


@pytest.mark.parametrize("after", range(0, 12))
def test_a_killed_call_loses_nothing(after: int, whole: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after so many steps that change the disk: written shards, tables, removed folders."""
    steps = iter(range(after))

    class Killed(BaseException): ...

    def dying(function):
        def call(*args, **named):
            if next(steps, None) is None:
                raise Killed
            return function(*args, **named)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(shards_module.os, "replace", dying(shards_module.os.replace))
        patched.setattr(ShardTable, "write", dying(ShardTable.write))
        patched.setattr("octjepa.store.storage.DiskStorage.drop", dying(Store.open(path).storage.__class__.drop))
        with suppress(Killed):
            pack(Store.open(path), TWO_VOLUMES_MB)
    same(Store.open(path), Store.open(whole))
    assert pack(Store.open(path), TWO_VOLUMES_MB).volumes == 10
    same(Store.open(path), Store.open(whole))
    store = Store.open(path)
    assert {file.name for file in (path / "shards").iterdir()} == store.shards.names()
    assert not list((path / "chunks").rglob("*.np*"))


def test_sizes_that_are_none_are_refused(path: Path) -> None:
    for size in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="expected a number above 0"):
            pack(Store.open(path), size)


def test_a_name_that_leads_out_of_the_store_is_refused(path: Path) -> None:
    pack(Store.open(path))
    table = pd.read_parquet(path / "shards.parquet")
    table["shard"] = "../../secret.bin"
    table.to_parquet(path / "shards.parquet", index=False)
    with pytest.raises(OctjepaError, match=r"shards\.parquet is damaged .*is not a name of a shard"):
        Store.open(path)


def test_a_damaged_table_is_reported(path: Path) -> None:
    pack(Store.open(path))
    (path / "shards.parquet").write_bytes(b"PAR1")
    with pytest.raises(OctjepaError, match=r"shards\.parquet is damaged"):
        Store.open(path)


@pytest.mark.slow
def test_a_packed_store_in_a_bucket(bucket: Bucket, tiny: Path, whole: Path) -> None:
    url = join(bucket.url, "store")
    build_store([tiny], url, PREPROCESSING)
    assert pack(Store.open(url), TWO_VOLUMES_MB).shards == 5
    assert not list_objects(join(url, "chunks"))
    same_columns = [name for name in Store.open(url).table if not name.startswith("file_")]
    one, other = Store.open(url), Store.open(whole)
    assert one.table[same_columns].equals(other.table[same_columns])
    bucket.proxy.requests.clear()
    for volume_id in one.table["volume_id"]:
        assert np.array_equal(one.read(volume_id).pixels, other.read(volume_id).pixels)
    assert [method for method, _ in bucket.proxy.requests] == ["GET"] * 10  # one request a volume
    assert build_store([tiny], url, PREPROCESSING).skipped == 10
    assert pack(Store.open(url)).packed == 0


def test_the_verb(path: Path) -> None:
    found = json.loads(call("pack", path, "--json").out)
    assert found["packed"] == 10
    refused = call("pack", path, "--shard-mb", 0)
    assert refused.code == 2
    assert "expected a number above 0" in refused.err
