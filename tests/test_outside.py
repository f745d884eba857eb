"""A folder from somebody else: what it names outside itself is neither asked nor read unless the user says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import call
from index_entries import index_entry, store_of
from octjepa.checkpoint.weights import newest_checkpoint
from octjepa.config import to_yaml
from octjepa.encoders import load_encoder
from octjepa.errors import UsageError
from octjepa.outside import allow_outside, named_by, set_named
from octjepa.report.contents import read_contents
from synthetic import small_recipe


class Contacted(BaseException):  # which nothing turns into a message
    """A bucket was asked for something."""


@pytest.fixture(autouse=True)
def _no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection(*_: Any) -> None:
        raise Contacted

    monkeypatch.setattr("octjepa.remote.bucket.connection", connection)
    set_named([])


def stranger(folder: Path, saves: str = "s3://theirs/saves", store: str = "s3://theirs/store") -> Path:
    """A run that names its checkpoints and its store elsewhere."""
    folder.mkdir()
    recipe = small_recipe(checkpoint={"dir": saves})
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"name": "theirs", "store": store}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("address", ["s3://theirs/saves", "gs://theirs/saves", "/disk/of/somebody/saves"])
def test_checkpoints_elsewhere_are_not_opened(tmp_path: Path, address: str) -> None:
    run = stranger(tmp_path / "run", saves=address)
    with pytest.raises(UsageError) as refused:
        load_encoder(run)
    for word in (str(run / "recipe.yaml"), address, "--allow-outside"):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ("embed", "{run}", "--store", "{store}", "--out", "{out}"),
        ("export", "{run}", "--format", "safetensors", "--out", "{out}"),
        ("split", "{store}", "--against", "{run}"),
        ("leaderboard", "{run}", "--labels", "{labels}", "--target", "drusen", "--store", "{store}", "--out", "{out}"),
        (
            "finetune",
            "finetune",
            "--from",
            "{run}",
            "--store",
            "{store}",
            "--labels",
            "{labels}",
            "--target",
            "drusen",
            "--out",
            "{out}",
        ),
        ("pretrain", "{run}/recipe.yaml", "--store", "{store}", "--out", "{run}", "--resume"),
    ],
    ids=lambda words: words[0],
)
def test_no_verb_opens_the_bucket_that_a_run_names(tmp_path: Path, words: tuple[str, ...]) -> None:
    run, labels = stranger(tmp_path / "run"), tmp_path / "labels.tsv"
    store_of(tmp_path / "store", [index_entry(number, split="train") for number in range(4)])
    labels.write_text("person_id\tdrusen\n1001\t1\n", encoding="utf-8")
    paths = {"run": run, "store": tmp_path / "store", "labels": labels, "out": tmp_path / "out"}
    outcome = call(*(word.format(**paths) for word in words))
    assert outcome.code == 2
    assert "names s3://theirs/saves, which is outside that folder and was not opened" in outcome.err
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_the_bucket_is_opened_where_the_user_names_it_or_allows_all(tmp_path: Path) -> None:
    run = stranger(tmp_path / "run")
    for words in (["octjepa", "x", "--store", "s3://theirs"], ["checkpoint.dir=s3://theirs/saves"]):
        set_named(words)
        with pytest.raises(Contacted):
            newest_checkpoint(run)
    set_named(["s3://theirs/save", "s3://their"])
    with pytest.raises(UsageError, match="outside"):
        newest_checkpoint(run)
    with allow_outside(), pytest.raises(Contacted):
        newest_checkpoint(run)
    with pytest.raises(Contacted):
        call("export", run, "--format", "safetensors", "--out", tmp_path / "out", "--allow-outside")
    call("doctor", "--help")  # the flag holds for one command
    with pytest.raises(UsageError, match="outside"):
        newest_checkpoint(run)


def test_a_report_goes_on_without_the_store_that_a_run_names(tmp_path: Path) -> None:
    contents = read_contents(stranger(tmp_path / "run"))
    assert contents.store is None
    (missing,) = contents.missing_parts("the store")
    assert "names s3://theirs/store, which is outside" in missing.reason


@pytest.mark.parametrize("text", ["https://theirs/store", "s3:/theirs/store"])
def test_another_address_is_refused_and_no_fault_of_the_page(tmp_path: Path, text: str) -> None:
    contents = read_contents(stranger(tmp_path / "run", store=text))
    assert text in contents.missing_parts("the store")[0].reason


@pytest.mark.parametrize("inside", [lambda run: "../store", lambda run: "checkpoints", lambda run: str(run / "saves")])
def test_what_lies_in_or_beside_the_folder_is_followed(tmp_path: Path, inside: Callable[[Path], str]) -> None:
    found = named_by(tmp_path / "run", "run.json", inside(tmp_path / "run"))
    assert Path(found) == tmp_path / "run" / inside(tmp_path / "run")


def test_an_index_whose_volumes_lie_elsewhere_is_damaged(tmp_path: Path) -> None:
    rows = [index_entry(0, split="train") | {"volume_id": "../../precious"}]
    (tmp_path / "precious").mkdir()
    outcome = call("inspect", store_of(tmp_path / "store", rows).path, "--verify")
    assert (outcome.code, "is not a volume id" in outcome.err) == (1, True)
