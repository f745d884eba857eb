"""Text and tables from strangers (`octjepa.parsing`): bombs and damage end in one line, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command_line import call
from index_entries import index_entry, store_of
from octjepa.config import to_yaml
from octjepa.ingest import source_flow
from octjepa.parsing import (
    Malformed,
    parse_json,
    parse_json_object,
    printable,
    read_limited,
    read_parquet,
    shown,
)
from octjepa.yaml_text import parse_yaml
from synthetic import small_recipe


def alias_bomb(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


YAML_BOMBS = {
    "alias as a value": alias_bomb() + "extends: *a9\n",
    "alias as a key": alias_bomb() + "? *a9\n: 1\n",
    "merged aliases": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)),
    "long text by alias": "a: &a '" + "x" * 100_000 + "'\nb: [" + ", ".join(["*a"] * 100) + "]",
    "alias of itself": "name: &a [*a]",
    "brackets": "[" * 20_000,
    "objects": "{a: " * 20_000,
    "dashes": "- " * 20_000,
    "integer": "name: " + "9" * 6_000,
    "many keys": "".join(f"k{n}: 1\n" for n in range(25_000)),
    "too long": "#" * 300_000,
    "python object": "name: !!python/object:os.system x",
    "integer tag": "name: !!int x",
    "date tag": "name: !!timestamp 2020-99-99",
    "escape above U+10FFFF": 'name: "\\U00110000"',
    "half a surrogate pair": 'name: "\\ud800"',
    "version": "%YAML " + "9" * 9_000 + ".1\n---\nname: x",
    "zero byte": "name: \0",
}
JSON_BOMBS = {
    "brackets": b"[" * 100_000,
    "closed brackets": b"[" * 100_000 + b"]" * 100_000,
    "objects": b'{"a":' * 100_000,
    "integer": b'{"update": ' + b"9" * 6_000 + b"}",
    "not UTF-8": b'{"update": "\xff\xfe"}',
    "UTF-16": '{"update": 1}'.encode("utf-16"),
    "half a surrogate pair": b'{"update": "\\ud800"}',
    "a list": b"[1, 2]",
    "a text": b'"store"',
    "null": b"null",
    "nothing": b"",
    "zero bytes": b"\0" * 100,
}


@pytest.mark.parametrize("text", YAML_BOMBS.values(), ids=YAML_BOMBS)
def test_yaml_bombs_are_refused_at_once(text: str) -> None:
    started = time.process_time()
    with pytest.raises(Malformed) as refused:
        parse_yaml(text)
    assert time.process_time() - started < 5
    assert 5 < len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def test_aliases_and_merges_of_ordinary_size_are_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("08", 8),
        ("+5", 5),
        ("-5", -5),
        ("1_000", 1000),
        ("1e-4", 1e-4),
        ("5E3", 5000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("0x10", "0x10"),
        ("0b11", "0b11"),
        ("0o7", "0o7"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("2020-01-01", "2020-01-01"),
        ("=", "="),
        ("~", None),
        ("true", True),
        (".inf", float("inf")),
    ],
)
def test_numbers_of_recipes_are_decimal(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("content", JSON_BOMBS.values(), ids=JSON_BOMBS)
def test_json_bombs_are_refused_at_once(content: bytes) -> None:
    started = time.process_time()
    with pytest.raises(Malformed) as refused:
        parse_json_object(content)
    assert 5 < len(str(refused.value)) < 200
    assert time.process_time() - started < 2


def test_brackets_inside_texts_are_no_depth() -> None:
    assert parse_json(json.dumps(["[{" * 100, '\\"[['])) == ["[{" * 100, '\\"[[']
    assert parse_json("[" * 64 + "]" * 64) is not None


def test_shown_computes_only_what_it_shows() -> None:
    value: list = ["x" * 10]
    for _ in range(30):
        value = [value] * 10
    started = time.process_time()
    for foreign in (value, {"k": value}, "x" * 10**7, [1] * 10**6, 10**5000, b"x" * 10**6):
        assert len(shown(foreign)) <= 120
    assert time.process_time() - started < 1


def test_messages_cannot_rewrite_a_terminal() -> None:
    assert printable("a\x1b[2Jb\u202ec\nd\tü") == "a\\x1b[2Jb\\u202ec\nd\tü"
    assert len(printable("x" * 10**6)) < 21_000


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")  # nobody writes into it
    for path in (tmp_path / "run.json", Path("/dev/zero")):
        with pytest.raises(Malformed, match="not a regular file"):
            read_limited(path, 1000)
    (tmp_path / "long").write_bytes(b"x" * 1001)
    with pytest.raises(Malformed, match="more than the 1,000 bytes"):
        read_limited(tmp_path / "long", 1000)


def write_parquet_bomb(path: Path, kind: str) -> None:
    rows = 1_000_000
    if kind == "one text in every row":
        texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 1000]))
        table = pa.table({"volume_id": texts})
    elif kind == "lists of one text":
        ends = pa.array(np.arange(rows // 10 + 1, dtype=np.int32) * 10)
        texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 1000]))
        table = pa.table({"volume_id": pa.ListArray.from_arrays(ends, texts)})
    elif kind == "one wide binary":
        texts = pa.array([b"x" * 1000], pa.binary(1000)).dictionary_encode()
        texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), texts.dictionary)
        table = pa.table({"volume_id": texts})
    else:
        table = pa.table({"volume_id": pa.array(np.zeros(rows * 40, np.int8))})
    pq.write_table(table, path, compression="snappy")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one text in every row", "lists of one text", "one wide binary", "one number"])
def test_small_tables_take_little_memory(tmp_path: Path, kind: str) -> None:
    write_parquet_bomb(tmp_path / "volumes.parquet", kind)
    assert (tmp_path / "volumes.parquet").stat().st_size < 3 << 20
    code = (
        "import resource, sys; from pathlib import Path; from octjepa.parsing import Malformed, read_parquet\n"
        "import pyarrow.parquet, pandas; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_parquet(Path(sys.argv[1]))\n"
        "except Malformed as error: print(error)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; print((after - before) // 1024)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "volumes.parquet")]
    reason, mib = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert "MiB of memory" in reason
    assert int(mib) < 400


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: data[: len(data) // 2] + b"\0" * 50 + data[len(data) // 2 + 50 :],
        lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1",
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, damage) -> None:
    path = tmp_path / "volumes.parquet"
    pd.DataFrame({"volume_id": [f"v{n}" for n in range(1000)]}).to_parquet(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Malformed):
        read_parquet(path)
    pd.DataFrame({"other": [1]}).to_parquet(path)
    with pytest.raises(Malformed, match="column 'volume_id' is absent"):
        read_parquet(path, ["volume_id"])


def test_tables_are_read_as_pandas_reads_them(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "text": ["a", None, "b"],
            "lists": [["x", "y"], None, []],
            "numbers": [[1, 2], [3], None],
            "f": [1.5, None, 2],
            "switch": [True, False, None],
            "whole": [1, 2, 3],
        }
    )
    for rows in (3, 0):
        frame.iloc[:rows].to_parquet(tmp_path / "t.parquet", index=False, compression="snappy" if rows else None)
        pd.testing.assert_frame_equal(read_parquet(tmp_path / "t.parquet"), pd.read_parquet(tmp_path / "t.parquet"))


def a_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(to_yaml(small_recipe()), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"name": "theirs", "store": "../store"}), encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"update": 1, "train/loss": 0.5}\n', encoding="utf-8")
    return folder


def assert_one_reason(*words: object) -> str:
    started = time.process_time()
    outcome = call(*words)
    assert outcome.code in (1, 2), outcome
    assert "Traceback" not in outcome.err
    lines = outcome.err.strip().splitlines()
    assert len(lines) <= 35
    assert all(len(line) < 2500 for line in lines)
    assert time.process_time() - started < 30
    return outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("bomb", YAML_BOMBS)
def test_recipes_from_outside_are_refused_with_the_file(tmp_path: Path, bomb: str) -> None:
    run = a_run(tmp_path / "run")
    (run / "recipe.yaml").write_text(YAML_BOMBS[bomb], encoding="utf-8")
    assert "recipe.yaml" in assert_one_reason("plan", run / "recipe.yaml")
    assert "recipe.yaml" in assert_one_reason("report", run, "--out", tmp_path / "report.html")


def test_a_small_recipe_of_many_faults_is_a_short_message(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("".join(f"k{n}: 1\n" for n in range(9_000)), encoding="utf-8")
    assert "more" in assert_one_reason("plan", path)
    path.write_text(alias_bomb(2) + "train: *a2\ntokens: *a2\n" + "x" * 10_000 + ": 1\n", encoding="utf-8")
    assert_one_reason("plan", path)
    path.write_text(alias_bomb(2) + "extends: *a2\n", encoding="utf-8")
    assert "extends names one recipe" in assert_one_reason("plan", path)


def test_a_stored_recipe_extends_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (tmp_path / "secret.yaml").write_text("secret: 1\n", encoding="utf-8")
    (run / "recipe.yaml").write_text("extends: ../secret.yaml\n", encoding="utf-8")
    reason = assert_one_reason("report", run, "--out", tmp_path / "report.html")
    assert "extends" in reason
    assert "unknown key" not in reason


def test_long_chains_of_recipes_are_refused(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"r{number}.yaml").write_text(f"extends: r{number + 1}.yaml\n", encoding="utf-8")
    assert "extend one another" in assert_one_reason("plan", tmp_path / "r0.yaml")


@pytest.mark.parametrize("content", ["model: 3", "model: [1]", "objective: x", "data: null", "[]", "train: 1"])
def test_stored_recipes_of_a_wrong_form_are_refused(tmp_path: Path, content: str) -> None:
    run = a_run(tmp_path / "run")
    (run / "recipe.yaml").write_text(content, encoding="utf-8")
    assert_one_reason("report", run, "--out", tmp_path / "report.html")


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
@pytest.mark.parametrize("bomb", JSON_BOMBS)
def test_runs_from_outside_are_refused_with_the_file(tmp_path: Path, name: str, bomb: str) -> None:
    run = a_run(tmp_path / "run")
    (run / name).write_bytes(JSON_BOMBS[bomb] + b"\n" + b'{"update": 2}\n' * (name == "metrics.jsonl"))
    if name == "metrics.jsonl" and bomb == "nothing":
        return  # empty lines are none
    assert name in assert_one_reason("report", run, "--out", tmp_path / "report.html")


@pytest.mark.parametrize("name", ["store.json", "volumes.parquet"])
@pytest.mark.parametrize("bomb", JSON_BOMBS)
def test_stores_from_outside_are_refused_with_the_file(tmp_path: Path, name: str, bomb: str) -> None:
    store = store_of(tmp_path / "store", [index_entry(1)])
    (store.path / name).write_bytes(JSON_BOMBS[bomb])
    outcome = call("inspect", store.path)
    assert "Traceback" not in outcome.err
    assert outcome.code in (1, 2)
    assert name in outcome.err


@pytest.mark.parametrize("bomb", ["brackets", "integer", "not UTF-8", "a list", "nothing"])
def test_a_damaged_file_of_ignored_files_ends_in_no_traceback(tmp_path: Path, bomb: str) -> None:
    """It is read with the parser that refuses every bomb above; a report takes half a second."""
    store = store_of(tmp_path / "store", [index_entry(1)])
    (store.path / source_flow._FILE).write_bytes(JSON_BOMBS[bomb])
    assert "Traceback" not in call("report", store.path, "--out", tmp_path / "report.html").err


@pytest.mark.parametrize("bomb", [name for name in JSON_BOMBS if name not in ("nothing",)])
def test_damaged_quarantines_end_in_no_traceback(tmp_path: Path, bomb: str) -> None:
    store = store_of(tmp_path / "store", [index_entry(1)])
    (store.path / "quarantine.jsonl").write_bytes(JSON_BOMBS[bomb] + b"\n")
    outcome = call("inspect", store.path)
    assert "Traceback" not in outcome.err
    assert outcome.code == 0  # a line that a crash cut short is left out


def test_entries_of_another_form_are_refused_with_the_file(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(1)])
    for entry in ({}, {"file": 3, "reason": "x", "detail": "y"}, {"file": "x"}):
        (store.path / "quarantine.jsonl").write_text(json.dumps(entry) + "\n", encoding="utf-8")
        assert "quarantine.jsonl" in assert_one_reason("inspect", store.path)
    (store.path / "quarantine.jsonl").unlink()
    for change in ({"volume": {}}, {"volume": 3}, {"refused": ["x"]}, {"refused": {"file": "x"}}):
        (store.path / "journal.jsonl").write_text(json.dumps(change) + "\n", encoding="utf-8")
        assert "journal.jsonl" in assert_one_reason("inspect", store.path)


@pytest.mark.parametrize("codec", ["zstd", "gzip", "brotli", "lz4"])
def test_a_parquet_file_whose_pages_could_expand_without_bound_is_refused(codec: str, tmp_path: Path) -> None:
    """Its page headers, which pyarrow reads only while it unpacks, may state other sizes than the footer."""
    path = tmp_path / "volumes.parquet"
    pq.write_table(pa.table({"volume_id": ["a", "b"]}), path, compression=codec)
    with pytest.raises(Malformed, match=f"compressed by {codec.upper()}: write it with snappy"):
        read_parquet(path)
