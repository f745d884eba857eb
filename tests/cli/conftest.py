"""One small cohort taken through every verb, in a folder with spaces and letters of several alphabets in its name."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from command_line import call
from narrow_encoder import OVERRIDES
from short_pages import draw_flat_layers, shorten_pages


@dataclass
class Line:
    """Where each stage lies, and the JSON that its verb printed."""

    root: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def cohort(self) -> Path:
        return self.root / "phantom eyes"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def embeddings(self) -> Path:
        return self.root / "embeddings.parquet"

    @property
    def labels(self) -> Path:
        return self.cohort / "truth" / "eyes.tsv"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step-00000004"

    @property
    def scan(self) -> Path:
        return sorted(self.cohort.rglob("*.dcm"))[0]

    def say(self, verb: str, *words: object) -> None:
        outcome = call(verb, *words, "--json")
        assert outcome.code == 0, f"{verb}: {outcome.err}"
        self.results[verb] = outcome.json


FAST = ("tokens.select=tissue", "tokens.budget=32", "train.max_updates=4", "checkpoint.every_updates=2", *OVERRIDES)


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """Ten people, their store, a run of the smoke test in small, its embeddings, probes and report."""
    made = Line(tmp_path_factory.mktemp("Große Augen, 眼 µ"))
    made.say("phantom", made.cohort, "--people", 10, "--workers", 1)
    made.say("ingest", made.cohort, "--store", made.store, "--workers", 1)
    made.say("split", made.store, "--by", "stratified", "--shares", "0.6,0.2,0.2")
    made.say("pretrain", "smoke_test", *FAST, "--store", made.store, "--out", made.run)
    made.say("embed", made.run, "--store", made.store, "--out", made.embeddings)
    made.say(
        "probe",
        made.embeddings,
        "--labels",
        made.labels,
        "--target",
        "drusen",
        "--target",
        "intraretinal_fluid",
        "--probe",
        "linear",
        "--out",
        made.root / "probe.json",
    )
    with pytest.MonkeyPatch.context() as patch:
        shorten_pages(patch)
        draw_flat_layers(patch)
        made.say("report", made.root)
    return made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk("size=4m")` is a folder on a disk with these mount options; a second call changes them.

    Skipped where mounting is not allowed.
    """
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(options: str) -> Path:
        how = f"remount,{options}" if folder.is_mount() else options
        command = [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", how, "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a small disk is not allowed here")
        return folder

    yield mounted
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)
