"""The line of verbs with its store and its checkpoints in a bucket, as a user types them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from bucket_servers import Bucket, bucket_of, s3_server
from command_line import call
from narrow_encoder import OVERRIDES
from octjepa.remote import bucket_lock, info, join, list_objects, put_bytes, remove
from short_pages import draw_flat_layers, shorten_pages

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with s3_server() as proxy, bucket_of("s3", proxy, tmp_path / "cache", timeout_seconds=20) as location:
        yield location


def done(*words: object) -> dict:
    outcome = call(*words, "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    return outcome.json


@pytest.mark.usefixtures("without_memory")
def test_every_verb_takes_a_bucket(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pages(monkeypatch)
    draw_flat_layers(monkeypatch)
    store, saves, run = join(bucket.url, "store"), join(bucket.url, "saves"), tmp_path / "run"
    done("phantom", tmp_path / "eyes", "--people", 4, "--devices", "topcon_maestro2", "--workers", 1)
    assert done("ingest", tmp_path / "eyes", "--store", store, "--workers", 1)["accepted"] == 8
    assert done("split", store, "--by", "stratified", "--shares", "0.5,0.25,0.25")["leaks"] == []
    assert done("plan", "tiny_cpu", "--store", store)["updates"] > 0
    result = done("inspect", store, "--verify")
    assert (result["kind"], result["volumes"], result["damaged"]) == ("store", 8, [])
    made = done(
        "pretrain",
        "tiny_cpu",
        "train.max_updates=2",
        "train.global_batch=2",
        "machine.loader_workers=1",
        *OVERRIDES,
        f"checkpoint.dir={saves}",
        "--store",
        store,
        "--out",
        run,
    )
    assert made["checkpoint"] == join(saves, "step-00000002")
    assert info(join(saves, "step-00000002", "manifest.json")) is not None
    assert not (run / "checkpoints").exists()
    assert done("inspect", made["checkpoint"])["kind"] == "checkpoint"
    assert done("embed", made["checkpoint"], "--store", store, "--out", tmp_path / "e.parquet")["rows"] == 8
    for source, page in ((store, tmp_path / "store.html"), (run, tmp_path / "run.html")):
        done("report", source, "--out", page, "--allow-outside")
        text = page.read_text(encoding="utf-8")
        assert str(bucket.cache) not in text
        assert "store.json" not in text  # nothing says that the store is missing
        assert "8 volumes" in text
    assert done("split", store, "--against", made["checkpoint"])["pretrained_on"] > 0
    refused = call("embed", run, "--store", store, "--out", tmp_path / "of the run.parquet")
    assert (refused.code, f"names {saves}, which is outside" in refused.err) == (2, True)
    assert done("embed", run, "--store", store, "--out", tmp_path / "r.parquet", "--allow-outside")["rows"] == 8


def test_a_scan_in_a_bucket_is_described_and_damage_is_listed(bucket: Bucket, tmp_path: Path) -> None:
    done("phantom", tmp_path / "eyes", "--people", 1, "--devices", "topcon_maestro2", "--workers", 1)
    scan = next((tmp_path / "eyes").rglob("*.dcm"))
    url = join(bucket.url, scan.name)
    put_bytes(scan.read_bytes(), url)
    assert done("inspect", url) == done("inspect", scan)
    assert (done("inspect", bucket.url)["kind"], done("inspect", bucket.url)["files"]) == ("source", 1)
    store = tmp_path / "store"
    done("ingest", tmp_path / "eyes", "--store", store, "--workers", 1)
    pixels = sorted(store.glob("chunks/*/*/pixels.npy"))[0]
    pixels.write_bytes(pixels.read_bytes()[:-1] + b"\x07")
    result = call("inspect", store, "--verify", "--json")
    assert result.code == 1
    assert result.json["damaged"] == [pixels.parent.name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("inspect", "s3:/eyes/store"), "lost a slash"),
        (("inspect", "https://eyes/store"), "https:// is not read"),
        (("embed", "{url}/none", "--store", "{url}/none", "--out", "e.parquet"), "no store at {url}/none"),
        (("split", "{url}/none"), "no store at {url}/none"),
        (("report", "{url}/none"), "no store at {url}/none"),
        (("ingest", "absent", "--store", "s3://absent/store"), "absent"),
    ],
)
def test_mistakes_are_reported(bucket: Bucket, words: tuple[str, ...], message: str) -> None:
    outcome = call(*(word.format(url=bucket.url) for word in words))
    assert outcome.code == 2
    assert message.format(url=bucket.url) in outcome.err
    assert list_objects(bucket.url) == []


def test_archives_of_a_bucket_are_expanded_into_it_and_ingested(bucket: Bucket, tmp_path: Path) -> None:
    done("phantom", tmp_path / "eyes", "--people", 2, "--devices", "topcon_maestro2", "--workers", 1)
    packed = tmp_path / "topcon_maestro2" / "part1.zip"
    packed.parent.mkdir()
    with ZipFile(packed, "w") as archive:
        for path in sorted((tmp_path / "eyes" / "retinal_oct").rglob("*.dcm")):
            archive.write(path, f"{path.parent.name}/{path.name}")
    put_bytes(packed.read_bytes(), join(bucket.url, "zips", "topcon_maestro2", "part1.zip"))
    source, tree = join(bucket.url, "zips"), join(bucket.url, "tree")
    assert done("expand", source, tree, "--dry-run")["written"] == 4
    assert not list_objects(tree)
    with bucket_lock(tree):
        second = call("expand", source, tree)
    assert second.code == 2
    assert f"another process is writing to {tree}: number {os.getpid()} on" in second.err
    made = done("expand", source, tree)
    assert (made["written"], made["skipped"]) == (4, 0)
    remove(list_objects(tree)[0].url)
    again = done("expand", source, tree)
    assert (again["written"], again["skipped"]) == (1, 3)
    put_bytes(b"something else", list_objects(tree)[0].url)
    result = call("expand", source, tree, "--json")
    assert (result.code, result.json["refused"][0]["reason"]) == (3, "other_file")
    remove(list_objects(tree)[0].url)
    done("expand", source, tree)
    assert done("ingest", tree, "--store", tmp_path / "store", "--workers", 1)["accepted"] == 4
