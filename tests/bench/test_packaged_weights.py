"""Packaged weights: 16 bit, the same answers, no folder of this machine, checksums that hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from benchmarks.packaged_weights import RECORD, without_paths, write_package

from octjepa.encoders import load_encoder
from octjepa.encoders.export import CARD, SUMS, WEIGHTS, export_encoder


@pytest.mark.slow
def test_a_written_package_loads_and_its_checksums_hold(tmp_path: Path) -> None:
    encoder = load_encoder("phantom-tiny")
    target = tmp_path / "weights"
    target.mkdir()
    (target / "old.txt").write_text("of an earlier package")

    def export(folder: Path) -> None:
        export_encoder(encoder, "safetensors", folder, licence="apache-2.0")

    write_package("phantom-tiny", export, lambda card: f"{card}more\n", {"updates": 3}, target)
    assert {file.name for file in target.iterdir()} == {WEIGHTS, CARD, RECORD, SUMS}
    assert load_encoder(target).weights_hash() == encoder.weights_hash()
    assert json.loads((target / RECORD).read_text()) == {"updates": 3}
    assert 'octjepa.load_encoder("phantom-tiny")' in (target / CARD).read_text()
    for line in (target / SUMS).read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((target / name).read_bytes()).hexdigest() == digest


def test_folders_of_other_weights_are_left_out() -> None:
    about = {"recipe": {"model": {"warm_start": "a/run"}, "objective": {"teacher": "b"}, "name": "x"}}
    written = json.loads(without_paths({"octjepa": json.dumps(about)})["octjepa"])
    assert written == {"recipe": {"model": {"warm_start": None}, "objective": {"teacher": None}, "name": "x"}}
