"""What a user can get wrong: each mistake ends in one message that helps, the right exit code, and no traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from command_line import Outcome, call
from index_entries import index_entry, store_of
from narrow_encoder import OVERRIDES
from octjepa.locks import file_lock

FAST = ("tokens.select=tissue", "tokens.budget=32", "train.max_updates=4", "checkpoint.every_updates=2", *OVERRIDES)


def refused(result: Outcome, code: int, *words: str) -> None:
    """The exit code, nothing on stdout, no traceback, and every one of `words` in the message."""
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


@pytest.mark.parametrize("words", ["segment OUT --out OUT --max-lost nan", "demo --out OUT --minutes inf"])
def test_options_with_limits_refuse_nan_and_infinity(tmp_path: Path, words: str) -> None:
    positions = {"OUT": tmp_path / "out"}
    outcome = call(*(positions.get(word, word) for word in words.split()))
    refused(outcome, 2, "Input should be less than or equal to")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.base_lrr=1"], ["train.base_lrr", "unknown key", "did you mean 'base_lr'"]),
        (["trian.max_updates=3"], ["trian", "did you mean 'train'"]),
        (["train.base_lr=fast"], ["train.base_lr", "number", "'fast'"]),
        (["train.base_lr=yes"], ["train.base_lr", "switches"]),
        (["train.global_batch=0"], ["train.global_batch", "greater than 0"]),
        (["model.size=huge"], ["model.size", "'reference'", "'huge'"]),
        (["tokens.budget=20"], ["tokens.budget", "unused"]),
        (["checkpoint.dir=none"], ["checkpoint.dir", "null"]),
        (["base_lr"], ["'base_lr'", "key=value"]),
        (["=3"], ["'=3'", "key=value"]),
        (["train.base_lr.x=3"], ["'base_lr' is a value"]),
        (["train.betas=[0.9"], ["not readable YAML"]),
    ],
)
def test_a_wrong_override(overrides: list[str], words: list[str]) -> None:
    refused(call("plan", "smoke_test", *overrides, "--json"), 2, *words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("broken.yaml", b"train: {", ["broken.yaml", "not readable YAML", "line"]),
        ("image.yaml", b"\xff\xd8\xff\xe0", ["image.yaml", "cannot be read as a text file"]),
        ("list.yaml", b"[1, 2]", ["list.yaml", "expected a mapping"]),
        ("twice.yaml", b"train: {seed: 1}\ntrain: {seed: 2}", ["'train' is given twice"]),
        ("empty.yaml", b"", ["empty.yaml"]),
    ],
)
def test_an_unreadable_recipe(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refused(call("plan", path), 2, *words)


def test_an_unknown_recipe_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    for name in ("smoke_tset", tmp_path / "none.yaml", tmp_path):
        refused(call("plan", name), 2, "no recipe", "smoke_test, tiny_cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ingest"], "Missing argument"),
        (["ingest", "SCAN"], "--store"),
        (["pretrain", "smoke_test", "--store", "STORE"], "--out"),
        (["probe", "TABLE", "--labels", "LABELS"], "--target"),
        (["dissolve"], "No such command 'dissolve'"),
        (["plan", "smoke_test", "--jsn"], "No such option: --jsn"),
        (["ingest", "SCAN", "--store", "NEW", "--workers", "0"], "--workers"),
        (["ingest", "SCAN", "--store", "NEW", "--max-lost", "20"], "--max-lost"),
        (["phantom", "NEW", "--people", "two"], "--people"),
        (["phantom", "NEW", "--people", "2", "--devices", "zeiss_cirus"], "unknown device 'zeiss_cirus'"),
        (["phantom", "NEW", "--people", "2", "--devices", ""], "unknown device ''"),
        (["phantom", "COHORT", "--people", "2"], "not an empty folder"),
        (["ingest", "NEW", "--store", "NEW2"], "no file or folder at"),
        (["ingest", "EMPTY", "--store", "NEW"], "it is empty"),
        (["ingest", "SCAN", "--store", "TEXTS"], "is not a store"),
        (["ingest", "SCAN", "--store", "STORE", "--recipe", "LARGE"], "image_size: store [16, 128, 128], expected [64"),
        (["inspect", "NEW"], "nothing at"),
        (["inspect", "EMPTY"], "no store (store.json), run (run.json) or checkpoint (manifest.json)"),
        (["inspect", "/dev/null"], "neither a file nor a folder"),
        (["split", "NEW"], "no store at"),
        (["split", "EMPTY"], "is not a store"),
        (["split", "STORE", "--by", "luck"], "'recommended', 'stratified'"),
        (["plan", "smoke_test", "--store", "TEXTS"], "is not a store"),
        (["plan", "smoke_test", "--measure"], "give it by --store"),
        (["pretrain", "smoke_test", "--store", "NEW", "--out", "NEW2"], "no store at"),
        (["pretrain", "smoke_test", "--store", "EMPTY", "--out", "NEW"], "is not a store"),
        (["pretrain", "LARGE", "--store", "STORE", "--out", "NEW"], "image_size: store (16, 128, 128), recipe (64"),
        (["pretrain", "smoke_test", "--store", "STORE", "--out", "SCAN"], "is a file"),
        (
            ["pretrain", "smoke_test", "--store", "STORE", "--out", "SCAN/run"],
            "there is a file where a folder is needed",
        ),
        (["pretrain", "smoke_test", "--store", "STORE", "--out", "RUN"], "already holds a run: add --resume"),
        (["pretrain", "smoke_test", "--store", "STORE", "--out", "NEW", "--resume"], "holds no run to resume"),
        (["embed", "NEW", "--store", "STORE", "--out", "NEW"], "no checkpoint at"),
        (["embed", "EMPTY", "--store", "STORE", "--out", "NEW"], "holds no checkpoint"),
        (["embed", "RUN", "--store", "RUN", "--out", "NEW"], "is not a store"),
        (["embed", "RUN", "--store", "STORE", "--out", "EMPTY"], "is a folder"),
        (["embed", "RUN", "--store", "STORE", "--out", "NEW/table.parquet"], "no folder"),
        (["probe", "NEW", "--labels", "LABELS", "--target", "drusen"], "no embeddings at"),
        (["probe", "LABELS", "--labels", "LABELS", "--target", "drusen"], "not a readable parquet file"),
        (["probe", "TABLE", "--labels", "NEW", "--target", "drusen"], "no label file at"),
        (["probe", "TABLE", "--labels", "TABLE", "--target", "drusen"], "not a readable TSV or CSV"),
        (["probe", "TABLE", "--labels", "LABELS", "--target", "druse"], "has no column druse"),
        (["probe", "TABLE", "--labels", "LABELS", "--target", "drusen", "--probe", "magic"], "known are knn, linear"),
        (["probe", "TABLE", "--labels", "LABELS", "--target", "drusen", "--pool", "sum"], "mean, mean_std_max"),
        (["probe", "TABLE", "--labels", "LABELS", "--target", "drusen", "--out", "NEW/a.json"], "no folder"),
        (["report", "NEW"], "no folder"),
        (["report", "EMPTY"], "holds nothing to show"),
        (["report", "RUN", "--out", "EMPTY"], "is a folder"),
        (["demo", "--out", "TEXTS"], "give --out a new folder"),
        (["demo", "--out", "SCAN"], "is a file"),
    ],
)
def test_a_wrong_path_or_option(line: Any, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "page.dcm").write_text("<html>", encoding="utf-8")
    positions = {
        "SCAN": line.scan,
        "STORE": line.store,
        "RUN": line.run,
        "COHORT": line.cohort,
        "TABLE": line.embeddings,
        "LABELS": line.labels,
        "NEW": tmp_path / "new",
        "NEW2": tmp_path / "new2",
        "EMPTY": tmp_path / "empty",
        "TEXTS": tmp_path / "texts",
        "LARGE": "pretrain_vjepa_multi_domain",
    }
    given = [str(positions.get(part, part)) for part in words]
    given = [part.replace("NEW/", f"{tmp_path}/new/").replace("SCAN/", f"{line.scan}/") for part in given]
    refused(call(*given), 2, message)


def test_a_run_of_another_model_is_not_resumed(line: Any) -> None:
    before = sorted(path.name for path in line.run.rglob("*"))
    result = call(
        "pretrain", "smoke_test", *FAST, "model.size=reference", "--store", line.store, "--out", line.run, "--resume"
    )
    refused(
        result, 2, "started with another recipe", "model.size: checkpoint 'test', recipe 'reference'", "another --out"
    )
    assert sorted(path.name for path in line.run.rglob("*")) == before


def test_weights_and_a_store_of_another_contract_are_not_brought_together(line: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "wider.yaml"
    recipe.write_text(
        "preprocessing: {image_size: [16, 128, 160]}\ntokens: {select: all}\ntrain: {max_updates: 1}\n",
        encoding="utf-8",
    )
    other = tmp_path / "other"
    assert call("ingest", line.scan, "--store", other, "--recipe", recipe, "--workers", 1).code == 0
    out = tmp_path / "table.parquet"
    result = call("embed", line.run, "--store", other, "--out", out)
    refused(result, 2, str(other), "image_size", "(16, 128, 160)", "(16, 128, 128)", "octjepa ingest")
    assert not out.exists()


def damaged_byte(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"eye")


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def manifest(content: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "manifest.json").write_text(content, encoding="utf-8")

    return spoil


def test_inspect_names_the_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom no mode of a folder stops, so the system calls are replaced."""
    locked = tmp_path / "locked"
    locked.mkdir()
    stat, access = os.stat, os.access

    def refuse_inside(path: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int) and locked in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse_inside)
    monkeypatch.setattr(os, "access", lambda path, *mode: Path(path) != locked and access(path, *mode))
    outcome = call("inspect", locked)
    refused(outcome, 2, f"the folder {locked} cannot be read: change its permissions")
    assert "store.json" not in outcome.err


@pytest.mark.parametrize(
    "spoil",
    [
        damaged_byte,
        gone,
        manifest(""),
        manifest("{"),
        manifest("[1]"),
        manifest("{}"),
        manifest('{"schema": 1}'),
        manifest('{"schema": 1, "update": 4, "files": {}}'),
    ],
)
def test_a_damaged_checkpoint(line: Any, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / line.checkpoint.name
    shutil.copytree(line.checkpoint, folder)
    spoil(folder)
    out = tmp_path / "table.parquet"
    refused(call("embed", folder, "--store", line.store, "--out", out, "--json"), 1, folder.name)
    refused(call("inspect", folder), 1, folder.name)
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"weights", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_that_is_no_weights(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(call("inspect", path), 1, "not a weights file of octjepa")


@pytest.mark.parametrize("content", ["{", "[]", "\0"])
def test_a_damaged_run_file(line: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content, encoding="utf-8")
    refused(call("inspect", tmp_path), 1, "run.json", "damaged")


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    line: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(line.run, run)
    damaged_byte(run / "checkpoints" / line.checkpoint.name)
    done = call("pretrain", "smoke_test", *FAST, "--store", line.store, "--out", run, "--resume", "--json")
    assert done.code == 0
    assert f"{line.checkpoint.name} NOT USED" in caplog.text
    assert "is damaged" in caplog.text
    assert done.json["cosine"] == pytest.approx(line.results["pretrain"]["cosine"], rel=1e-5)


def test_too_much_lost_is_reported_after_the_work_is_done(line: Any, tmp_path: Path) -> None:
    cohort, store = tmp_path / "cohort", tmp_path / "store"
    drawn = call("phantom", cohort, "--people", 1, "--broken", 6, "--workers", 1)
    assert drawn.code == 0
    assert f"octjepa ingest {cohort} --store STORE" in drawn.out
    result = call("ingest", cohort, "--store", store, "--workers", 1, "--json")
    assert result.code == 3
    assert result.json["lost"] == sum(result.json["by_reason"].values()) > 0
    assert result.json["accepted"] >= 2
    for word in ("more than the allowed 20%", "quarantine.jsonl", "--max-lost", *result.json["by_reason"]):
        assert word in result.err
    ledger = [json.loads(row) for row in (store / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(ledger) == result.json["quarantined"]
    assert call("ingest", cohort, "--store", store, "--workers", 1, "--max-lost", 1).code == 0


def test_a_single_picture_is_refused_with_the_option_that_reads_it(tmp_path: Path) -> None:
    for number in (1, 2):
        Image.new("L", (64, 64)).save(tmp_path / f"{number}.png")
    result = call("ingest", tmp_path / "1.png", tmp_path / "2.png", "--store", tmp_path / "store", "--workers", 1)
    assert result.code == 2
    assert "2  unknown_format: a single picture, not a volume" in result.err
    assert "add --images" in result.err
    assert "docs/formats.md" not in result.err
    (tmp_path / "scan.foo").write_bytes(b"neither a picture nor a scan")  # another detail of the same reason
    result = call("ingest", tmp_path / "1.png", tmp_path / "scan.foo", "--store", tmp_path / "s2", "--workers", 1)
    assert "unknown_format: neither DICOM nor another format that octjepa reads; see docs/formats.md" in result.err


def test_nothing_read_still_prints_what_was_done(tmp_path: Path) -> None:
    (tmp_path / "eyes").mkdir()
    for name in ("a.dcm", "b.dcm"):
        (tmp_path / "eyes" / name).write_bytes(b"")
    result = call("ingest", tmp_path / "eyes", "--store", tmp_path / "store", "--workers", 1, "--max-lost", 1, "--json")
    assert result.code == 2
    assert "no file can be read, of 2" in result.err
    assert result.json["by_reason"] == {"empty_file": 2}
    assert (result.json["accepted"], result.json["quarantined"], result.json["people"]) == (0, 2, 0)


def test_two_results_of_a_command_do_not_share_a_file(tmp_path: Path) -> None:
    words = ("probe", tmp_path / "table.parquet", "--labels", tmp_path / "labels.tsv", "--target", "grade")
    for option in ("--out", "--attention"):
        outcome = call(*words, "--predictions", tmp_path / "p.parquet", option, tmp_path / "p.parquet")
        refused(outcome, 2, "two of --out, --predictions and --attention are the same file")
    store_of(tmp_path / "store", [index_entry(0)])
    outcome = call("report", tmp_path / "store", "--card", tmp_path / "store" / "report.html")
    refused(outcome, 2, "give each a separate file")
    assert not (tmp_path / "store" / "report.html").exists()


def test_one_process_at_a_time_writes_a_table_of_biomarkers(tmp_path: Path) -> None:
    store_of(tmp_path / "store", [index_entry(0)])
    with file_lock(tmp_path / "b.parquet"):
        outcome = call("embed", "biomarkers", "--store", tmp_path / "store", "--out", tmp_path / "b.parquet")
    refused(outcome, 2, "another process is writing to")
