"""The ingest job and the store: idempotent, resumable, honest about what was lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from threadpoolctl import threadpool_limits

from eye_files import phantom
from oct_dicom import make_dataset, retina, save
from octjepa.errors import ContractError, OctjepaError, TooManyLostError, UsageError
from octjepa.ingest.build import IngestSummary
from octjepa.recipe import Preprocessing

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


def files_of(phantom_cohort: Path) -> list[Path]:
    return sorted(phantom_cohort.rglob("*.dcm"))


@pytest.fixture(scope="module")
def built(phantom_cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, IngestSummary]:
    from octjepa.ingest import build_store

    store = tmp_path_factory.mktemp("built") / "store"
    return store, build_store([phantom_cohort], store, PREPROCESSING)


def test_a_cohort_becomes_a_store(built: tuple[Path, IngestSummary], phantom_cohort: Path) -> None:
    from octjepa.store import Store
    from octjepa.store.index import COLUMNS

    path, summary = built
    assert (summary.accepted, summary.quarantined, summary.people, summary.eyes) == (8, 0, 4, 8)
    assert summary.by_device == dict.fromkeys(
        ("heidelberg_spectralis", "topcon_maestro2", "topcon_triton", "zeiss_cirrus"), 2
    )
    store = Store.open(path)
    table = store.table
    assert tuple(table.columns) == COLUMNS
    assert list(table["volume_id"]) == sorted(table["volume_id"])
    assert (table["volume_id"] == table["content_hash"].str[:16]).all()
    assert (table["mirrored"] == (table["eye"] == "OS")).all()
    assert set(table["pattern"]) == {"raster"}
    assert not table["source"].str.startswith("/").any()
    assert table["quality"].between(0.3, 1).all()
    for volume_id in table["volume_id"]:
        volume = store.read(volume_id)
        assert volume.pixels.shape == PREPROCESSING.stored_size
        assert isinstance(volume.pixels, np.memmap)
        inside = volume.band[0] >= 0
        assert (volume.band[1] >= volume.band[0])[inside].all()
        assert 0.05 < inside.mean() <= 1
    assert len(store.participants) == 4
    described = store.describe()
    assert (described.volumes, described.people) == (8, 4)
    assert json.loads((path / "store.json").read_text())["contract_hash"] == store.contract_hash


def test_recommended_splits_are_taken_and_nobody_leaks(built: tuple[Path, IngestSummary]) -> None:
    from octjepa.cohort.leaks import find_leaks
    from octjepa.store import Store

    store = Store.open(built[0])
    recommended = dict(zip(store.participants["person_id"], store.participants["recommended_split"], strict=True))
    assert all(row.split == recommended[row.person_id] for row in store.table.itertuples())
    assert find_leaks(store.table) == []
    name = store.table["person_id"].iloc[0]
    store.table.loc[0, "split"] = "test" if recommended[name] == "train" else "train"  # in memory only
    (leak,) = find_leaks(store.table)
    assert (leak.kind, len(leak.volumes)) == ("person_id", 2)
    assert name not in str(leak)


@pytest.mark.slow
def test_threads_of_the_calling_process_change_nothing(
    built: tuple[Path, IngestSummary], phantom_cohort: Path, tmp_path: Path
) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    with threadpool_limits(2):
        build_store([phantom_cohort], tmp_path / "store", PREPROCESSING)
    assert Store.open(tmp_path / "store").table.equals(Store.open(built[0]).table)


@pytest.mark.slow
def test_again_changes_nothing_and_workers_change_nothing(
    built: tuple[Path, IngestSummary], phantom_cohort: Path, tmp_path: Path
) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    before = (built[0] / "volumes.parquet").read_bytes()
    again = build_store([phantom_cohort], built[0], PREPROCESSING)
    assert (again.accepted, again.skipped) == (0, 8)
    assert (built[0] / "volumes.parquet").read_bytes() == before
    build_store([phantom_cohort], tmp_path / "two", PREPROCESSING, workers=2)
    one, two = Store.open(built[0]), Store.open(tmp_path / "two")
    assert one.table.equals(two.table)
    name = one.table["volume_id"].iloc[3]
    assert (one.chunk_folder(name) / "pixels.npy").read_bytes() == (two.chunk_folder(name) / "pixels.npy").read_bytes()


@pytest.mark.slow
def test_a_killed_ingest_is_continued(tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    store = tmp_path / "store"
    code = (
        "import sys, time\n"
        "from octjepa.ingest import build, build_store\n"
        "from octjepa.recipe import Preprocessing\n"
        "one = build.ingest_one\n"
        "def slow(*arguments, **settings):\n"
        "    time.sleep(0.1)\n"
        "    return one(*arguments, **settings)\n"
        "build.ingest_one = slow\n"
        f"build_store([{str(tiny)!r}], {str(store)!r}, Preprocessing.model_validate_json(sys.argv[1]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, PREPROCESSING.model_dump_json()])
    journal = store / "journal.jsonl"
    until = time.monotonic() + 30
    while time.monotonic() < until and (not journal.is_file() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with journal.open("ab") as file:
        file.write(b'{"volume": {"volume_id": "torn')
    half = len(Store.open(store).table)
    assert 4 <= half < 10
    summary = build_store([tiny], store, PREPROCESSING)
    assert summary.skipped == half
    assert summary.accepted == 10 - half
    assert not journal.exists()
    build_store([tiny], tmp_path / "whole", PREPROCESSING)
    assert Store.open(store).table.equals(Store.open(tmp_path / "whole").table)


def test_ctrl_c_leaves_a_store_that_goes_on(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa.ingest import build, build_store
    from octjepa.store import Store

    real, calls = build.ingest_one, []

    def interrupted(*arguments: object, **settings: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "ingest_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_store([tiny], tmp_path / "store", PREPROCESSING)
    assert len(Store.open(tmp_path / "store").table) == 3
    assert (tmp_path / "store" / "volumes.parquet").is_file()
    monkeypatch.setattr(build, "ingest_one", real)
    assert build_store([tiny], tmp_path / "store", PREPROCESSING).accepted == 7


@pytest.mark.slow
def test_bad_files_duplicates_and_absent_rows_are_listed(phantom_cohort: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root = tmp_path / "set"
    shutil.copytree(phantom_cohort, root)
    files = files_of(root)
    shutil.copy(files[0], files[0].with_name("copy.dcm"))
    files[2].write_bytes(files[2].read_bytes()[:20_000])
    files[7].unlink()
    (root / "page.dcm").write_text("<html></html>")
    summary = build_store([root], tmp_path / "store", PREPROCESSING, max_lost=0.3)
    reasons = summary.by_reason
    assert reasons.pop("truncated", 0) + reasons.pop("frames_missing", 0) + reasons.pop("frames_broken", 0) == 1
    assert reasons == {"duplicate_content": 1, "manifest_row_without_file": 1, "not_dicom": 1}
    assert (summary.accepted, summary.quarantined, summary.lost) == (6, 4, 2)
    assert summary.files_without_row == 2
    rows = Store.open(tmp_path / "store").quarantine
    fields = {"file", "hash", "stage", "reason", "detail", "when", "file_key"}
    assert all(set(row) - {"found_in"} == fields for row in rows)
    assert next(row for row in rows if row["reason"] == "not_dicom")["hash"]

    shutil.copy(files_of(phantom_cohort)[7], files[7])  # the download is finished: its row leaves the ledger
    again = build_store([root], tmp_path / "store", PREPROCESSING, max_lost=0.3)
    assert again.accepted == 1
    assert "manifest_row_without_file" not in again.by_reason
    assert len(Store.open(tmp_path / "store").quarantine) == 3


def test_the_same_uid_with_other_pixels(tmp_path: Path) -> None:
    from octjepa.ingest import build_store

    first, second = make_dataset(retina()), make_dataset(retina()[:, :, ::-1].copy())
    second.SOPInstanceUID = first.SOPInstanceUID
    second.file_meta.MediaStorageSOPInstanceUID = first.SOPInstanceUID
    save(first, tmp_path / "in" / "a.dcm")
    save(second, tmp_path / "in" / "b.dcm")
    summary = build_store([tmp_path / "in"], tmp_path / "store", PREPROCESSING)
    assert summary.by_reason == {"duplicate_sop_uid": 1}
    assert len(list((tmp_path / "store" / "chunks").rglob("pixels.npy"))) == 1


def test_a_moved_data_set_is_recognised(tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root = tmp_path / "here"
    shutil.copytree(tiny, root)
    (root / "page.dcm").write_text("<html>not found</html>")
    build_store([root], tmp_path / "store", PREPROCESSING)
    root.rename(tmp_path / "there")
    summary = build_store([tmp_path / "there"], tmp_path / "store", PREPROCESSING)
    assert summary.quarantined == 1
    assert len(Store.open(tmp_path / "store").table) == 10
    assert [entry["file"] for entry in Store.open(tmp_path / "store").quarantine] == ["page.dcm"]


def test_refused_files_that_are_alike_stay_listed(tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    for site, name in (("north", "a"), ("south", "b")):
        shutil.copytree(tiny, tmp_path / site)
        (tmp_path / site / f"{name}.dcm").write_text("<html>not found</html>")
        (tmp_path / site / "empty.dcm").touch()
        build_store([tmp_path / site], tmp_path / "store", PREPROCESSING)
    listed = [entry["file"] for entry in Store.open(tmp_path / "store").quarantine]
    assert listed == ["a.dcm", "b.dcm", "empty.dcm", "empty.dcm"]


@pytest.mark.slow
def test_a_file_that_comes_back_unchanged_leaves_the_quarantine(tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    pixels, spacing_mm = phantom()
    root, store = tmp_path / "in", tmp_path / "store"
    root.mkdir()
    for name, scan in (("a", pixels), ("b", pixels[::-1])):
        np.savez(root / f"{name}.npz", oct_bscans=scan, spacing_mm=np.array(spacing_mm))
    (root / "manifest.tsv").write_text("person_id\tfilepath\n1\t/a.npz\n2\t/b.npz\n")
    build_store([root], store, PREPROCESSING)
    (root / "b.npz").rename(tmp_path / "b.npz")
    build_store([root], store, PREPROCESSING, max_lost=1)
    assert [entry["reason"] for entry in Store.open(store).quarantine] == ["manifest_row_without_file"]
    (tmp_path / "b.npz").rename(root / "b.npz")
    assert build_store([root], store, PREPROCESSING).skipped == 2
    assert Store.open(store).quarantine == []


def test_too_many_lost_is_reported_after_the_work_is_done(tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root = tmp_path / "set"
    shutil.copytree(tiny, root)
    for path in files_of(root)[:6]:
        path.write_bytes(b"")
    with pytest.raises(TooManyLostError, match=r"6 of 10 files \(60%\)") as caught:
        build_store([root], tmp_path / "store", PREPROCESSING)
    assert caught.value.exit_code == 3
    assert "empty_file" in str(caught.value)
    assert "topcon_maestro2" in str(caught.value)
    assert len(Store.open(tmp_path / "store").table) == 4
    assert set(Store.open(tmp_path / "store").table["split"]) - {"train", "val", "test"} == set()
    build_store([root], tmp_path / "store", PREPROCESSING, max_lost=0.7)


def test_wrong_stores_and_sources_are_reported_apart(
    built: tuple[Path, IngestSummary], phantom_cohort: Path, tmp_path: Path
) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    with pytest.raises(UsageError, match="no store at"):
        Store.open(tmp_path / "absent")
    with pytest.raises(UsageError, match="is not a store"):
        Store.open(tmp_path)
    with pytest.raises(ContractError, match=r"preprocessing.flatten: store quadratic, expected plane"):
        build_store([phantom_cohort], built[0], PREPROCESSING.model_copy(update={"flatten": "plane"}))
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "store.json").write_text('{"schema_version": 99}')
    with pytest.raises(UsageError, match="update octjepa"):
        Store.open(newer)
    (tmp_path / "in").mkdir()
    with pytest.raises(UsageError, match="no OCT scan in"):
        build_store([tmp_path / "in"], tmp_path / "never", PREPROCESSING)
    assert not (tmp_path / "never").exists()
    (tmp_path / "in" / "a.dcm").write_bytes(b"")
    with pytest.raises(UsageError, match=r"no file can be read, of 1"):
        build_store([tmp_path / "in"], tmp_path / "none", PREPROCESSING)
    masks = tmp_path / "masks"
    masks.mkdir()
    for index in range(6):
        Image.fromarray(np.eye(64, dtype=np.uint8)).save(masks / f"m{index}.png")
    with pytest.raises(UsageError, match=r"of 1:\n.*not_structural_oct"):  # although it is rightly left out
        build_store([masks], tmp_path / "none", PREPROCESSING)


def test_one_writer_at_a_time(tmp_path: Path, tiny: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.locks import writer_lock
    from octjepa.store import Store

    store = Store.create(tmp_path / "store", PREPROCESSING)
    with writer_lock(store.path), pytest.raises(UsageError, match="another process"):
        build_store([tiny], store.path, PREPROCESSING)


def test_a_damaged_volume_is_named(built: tuple[Path, IngestSummary], tmp_path: Path) -> None:
    from octjepa.store import Store

    copy = tmp_path / "copy"
    shutil.copytree(built[0], copy)
    store = Store.open(copy)
    name = store.table["volume_id"].iloc[0]
    (store.chunk_folder(name) / "pixels.npy").write_bytes(b"short")
    with pytest.raises(OctjepaError, match="ingest again"):
        store.read(name)
    with pytest.raises(UsageError, match="has no volume"):
        store.read("0" * 16)


@pytest.mark.parametrize("part", ["pixels.npy", "geometry.npz"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 of an archive that was cut off"])
def test_a_volume_that_was_cut_off_is_damaged(
    built: tuple[Path, IngestSummary], tmp_path: Path, part: str, content: bytes
) -> None:
    from octjepa.store import Store

    store = Store.open(shutil.copytree(built[0], tmp_path / "copy"))
    name = store.table["volume_id"].iloc[0]
    (store.chunk_folder(name) / part).write_bytes(content)
    with pytest.raises(OctjepaError, match=rf"chunks/{name[:2]}/{name} (is damaged|changed) .* ingest again"):
        store.read(name)
    assert store.damaged() == [name]


def test_no_open_file_left_is_no_damage(built: tuple[Path, IngestSummary]) -> None:
    from octjepa.store import Store

    store = Store.open(built[0])
    name = store.table["volume_id"].iloc[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (built[0] / "store.json").open() as last:
        free = last.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OctjepaError) as read:
            store.read(name)
        with pytest.raises(OctjepaError) as verified:
            store.damaged()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for result in (read, verified):
        assert "cannot be read: Too many open files. The volume is not at fault: raise the limit" in str(result.value)
        assert "delete" not in str(result.value)
    assert store.read(name).volume_id == name


@pytest.mark.parametrize(
    ("number", "result"),
    [(errno.ENOMEM, "Cannot allocate memory.*fewer processes"), (errno.EIO, "Input/output error.*check the disk")],
)
def test_no_memory_and_a_failing_disk_are_reported_as_such(
    built: tuple[Path, IngestSummary], monkeypatch: pytest.MonkeyPatch, number: int, result: str
) -> None:
    from octjepa.store import Store

    def refuses(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    store = Store.open(built[0])
    name = store.table["volume_id"].iloc[0]
    monkeypatch.setattr("mmap.mmap", refuses)
    with pytest.raises(OctjepaError, match=f"cannot be read: {result}"):
        store.read(name)
    monkeypatch.setattr("zipfile.ZipFile", refuses)
    with pytest.raises(OctjepaError, match=f"cannot be read: {result}"):
        store.native_map(name)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa import files

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OctjepaError, match="disk is full"):
        files.write_new_folder(tmp_path / "chunks", {"a": lambda file: file.write(b"x")})
    with pytest.raises(OctjepaError, match="disk is full"):
        files.write_json(tmp_path / "a.json", {})
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_stratified_split_is_by_person_and_stable(tmp_path: Path, tiny: Path) -> None:
    from octjepa.cohort.split import split_counts, split_recommended, split_stratified
    from octjepa.ingest import build_store
    from octjepa.store import Store

    build_store([tiny], tmp_path / "store", PREPROCESSING)
    store = Store.open(tmp_path / "store")
    assert split_counts(store) == {"train": 3, "val": 1, "test": 1}
    assert store.table.groupby("person_id")["split"].nunique().eq(1).all()
    assert split_stratified(store, 0) == split_stratified(store, 0)
    assert any(split_stratified(store, 0) != split_stratified(store, seed) for seed in (1, 2, 3))
    with pytest.raises(UsageError, match="--by stratified"):
        split_recommended(store)
    with pytest.raises(UsageError, match="add up"):
        split_stratified(store, 0, (0.8, 0.1, 0.2))
    store.set_split(dict.fromkeys(store.table["person_id"], "test"))
    assert set(Store.open(tmp_path / "store").table["split"]) == {"test"}
    build_store([tiny], tmp_path / "store", PREPROCESSING)
    assert set(Store.open(tmp_path / "store").table["split"]) == {"test"}  # splits that are there are kept


def test_a_file_that_is_cut_for_a_while_comes_back_into_its_split(tmp_path: Path) -> None:
    """A copy was under way during the second ingest."""
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root, store = tmp_path / "in", tmp_path / "store"
    for number in range(3):
        scan = make_dataset(retina(seed=number))
        scan.PatientID = f"P{number}"
        save(scan, root / f"{number}.dcm")
    build_store([root], store, PREPROCESSING)
    Store.open(store).set_split(dict.fromkeys(("P0", "P1", "P2"), "test"))
    whole = (root / "0.dcm").read_bytes()
    (root / "0.dcm").write_bytes(whole[:20_000])
    assert build_store([root], store, PREPROCESSING, max_lost=1).by_reason == {"truncated": 1}
    (root / "0.dcm").write_bytes(whole)
    summary = build_store([root], store, PREPROCESSING)
    assert (summary.accepted, summary.split_by) == (1, {"kept": 3})
    assert set(Store.open(store).table["split"]) == {"test"}


def test_a_moved_data_set_without_person_ids_keeps_people_and_splits(tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root, store, spacing_mm = tmp_path / "in", tmp_path / "store", (0.05, 0.0026, 0.0117)
    root.mkdir()
    for number in range(3):
        np.save(root / f"{number}.npy", retina(seed=number))
    build_store([root], store, PREPROCESSING, spacing_mm=spacing_mm)
    made = Store.open(store)
    people = {entry.file: f"unknown-{entry.file}" for entry in made.entries()}
    with made.writing():  # as a store of before, which took the ids from the paths
        for entry in list(made.entries()):
            made.change(replace(entry, person_id=people[entry.file]))
        made.set_split(dict.fromkeys(people.values(), "test"))
        made.consolidate()
    root.rename(tmp_path / "moved")
    summary = build_store([tmp_path / "moved"], store, PREPROCESSING, spacing_mm=spacing_mm)
    assert (summary.accepted, summary.people, summary.split_by) == (3, 3, {"kept": 3})
    table = Store.open(store).table
    assert dict(zip(table["file"], table["person_id"], strict=True)) == people
    assert set(table["split"]) == {"test"}


@pytest.mark.data
@pytest.mark.slow
def test_real_scans_are_all_accepted(real_scans: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    summary = build_store([real_scans], tmp_path / "store", PREPROCESSING)
    assert (summary.accepted, summary.lost) == (3, 0)
    assert summary.by_reason in ({}, {"not_structural_oct": 2})  # fluid masks lie next to two of them
    uncertain = Store.open(tmp_path / "store").table.set_index("source")["uncertain"]
    assert uncertain.filter(like="duke").eq("slice").all()
    assert uncertain.filter(like="spectralis").eq("").all()
