"""Commands that octjepa prints can be copied into a shell, also for paths with spaces."""

from __future__ import annotations

import shlex
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from command_line import call
from octjepa.cli import training
from octjepa.cli.output import print_adapted
from octjepa.errors import UsageError
from octjepa.store import Store


def next_command(text: str) -> list[str]:
    """The words of the command in the line that begins with "next"."""
    (line,) = [line for line in text.splitlines() if line.startswith("next ")]
    return shlex.split(line.removeprefix("next"))


def test_a_drawn_cohort_is_named_as_a_shell_takes_it(tmp_path: Path) -> None:
    cohort = tmp_path / "ph dir"
    drawn = call("phantom", cohort, "--people", 1, "--devices", "topcon_maestro2", "--workers", 1, "--quiet")
    assert next_command(drawn.out) == ["octjepa", "ingest", str(cohort), "--store", "STORE"]


def test_expand_names_the_target_and_the_next_command(tmp_path: Path) -> None:
    archive, target = tmp_path / "a b.zip", tmp_path / "eyes of 5"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("p1/scan.dcm", bytes(128) + b"DICM")
    dry = call("expand", archive, target, "--dry-run", "--quiet")
    assert next_command(dry.out) == ["octjepa", "expand", str(archive), str(target)]
    done = call("expand", archive, target, "--quiet")
    assert next_command(done.out) == ["octjepa", "ingest", str(target), "--store", "STORE"]
    assert "next" not in call("expand", archive, target, "--json").json


def test_an_adapted_network_is_named_as_a_shell_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    adapted: Any = SimpleNamespace(
        candidates=[], training_bscans=3, held_out_bscans=1, notes=[], folder=Path("my model")
    )
    print_adapted(adapted, as_json=False)
    assert "octjepa segment SCAN... --model 'my model' --out DIR" in capsys.readouterr().out


def test_stores_with_spaces_are_quoted_in_messages(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    store: Any = SimpleNamespace(table=pd.DataFrame({"person_id": ["1"]}), location="my store")
    training._warn_of_few_people(store)
    assert "octjepa embed phantom-unet --store 'my store' --out" in caplog.text
    assert "octjepa split 'my store' --by stratified" in training._verdict(None, 0, "my store", 50)
    with pytest.raises(UsageError, match=r"no store at .*: make one with `octjepa ingest SOURCE --store '.*/my store'"):
        Store.open(tmp_path / "my store")
