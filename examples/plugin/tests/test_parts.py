"""Every part, reached as octjepa's users reach it: by its name."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from octjepa_example.encoder import create_encoder
from octjepa_example.tracker import CSVTracker

import octjepa
from octjepa.cli import app
from octjepa.config import load_recipe
from octjepa.errors import VolumeRejected
from octjepa.evaluate.probe import ProbeSettings, run_probes
from octjepa.inspection import describe
from octjepa.model import VJEPA3D
from octjepa.train.tracking.base import TrackedRun


def write_plain(path, cut=0):
    """A scan whose retina is a bright band, with a dark line, below a dark vitreous."""
    voxels = np.random.default_rng(0).integers(5, 25, (24, 96, 64), dtype=np.uint8)
    voxels[:, 30:70] += np.linspace(200, 60, 40).astype(np.uint8)[None, :, None]
    about = {"shape": voxels.shape, "spacing_mm": [0.2, 0.005, 0.05], "laterality": "OD", "person_id": "P1"}
    path.write_bytes(b"PLAIN " + json.dumps(about).encode() + b"\n" + voxels.tobytes()[cut:])
    return path


def test_reader(tmp_path):
    volume = octjepa.read_volume(write_plain(tmp_path / "eye.plain"))
    assert (volume.format, volume.pixels.shape, volume.laterality) == ("plain", (24, 96, 64), "OD")
    assert volume.spacing_mm == pytest.approx((0.2, 0.005, 0.05))
    with pytest.raises(VolumeRejected, match="truncated: 147455 voxels, the header says 147456"):
        octjepa.read_volume(write_plain(tmp_path / "cut.plain", cut=1))


def test_objective():
    objective = VJEPA3D.from_recipe(load_recipe("tiny_cpu", ["objective.name=smooth_l1"])).objective
    zero, one = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    assert objective.loss(zero, one) == 0.5
    assert objective.loss(zero, 3 * one) == 2.5  # 4.5 of half the square
    drawn = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    assert objective.loss(torch.zeros_like(drawn), drawn).item() == pytest.approx(objective.trivial_loss, abs=0.01)


def test_encoder(tmp_path):
    view = np.random.default_rng(0).integers(0, 255, (8, 16, 16), dtype=np.uint8)
    network = create_encoder(None)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    encoder = octjepa.load_external(f"small_cnn:{tmp_path / 'weights.pth'}")
    assert encoder.tokens(view).shape == (2 * 4 * 4, 16)
    with torch.inference_mode():
        expected = network(torch.from_numpy(view / 255).float()[None, None])[0].flatten(1).T
    assert np.allclose(encoder.tokens(view), expected.numpy(), atol=1e-6)
    assert not np.allclose(encoder.untrained().tokens(view), encoder.tokens(view))


def test_probe(table):
    settings = ProbeSettings(["centroid"], bootstrap=50)
    rows = run_probes([octjepa_table(table)], table.with_name("labels.tsv"), ["lesion"], settings, ()).payload()["rows"]
    (row,) = [
        row for row in rows if (row["name"], row["metric"]) == ("made-up", "auroc") and row["pool"] == "mean_std_max"
    ]
    assert row["probe"] == "centroid"
    assert row["value"] > 0.8


def octjepa_table(path):
    from octjepa.embed.table import read_embeddings

    return read_embeddings(path)


def test_task(table, tmp_path, capsys):
    app(["age", str(table), "--out", str(tmp_path / "age")], standalone_mode=False)
    assert "mean absolute error" in capsys.readouterr().out
    found = describe(tmp_path / "age")
    assert (found["kind"], found["n"]) == ("age", 42)
    assert found["mae_years"] < 5


def test_tracker(tmp_path):
    assert load_recipe("tiny_cpu", ["tracking.backends=[csv]"]).tracking.backends == ("csv",)
    tracker = CSVTracker(TrackedRun(Path(tmp_path), "project", "name", {}, first=0, pictures=False))
    tracker.metrics(1, {"train/loss": 0.5, "train/lr": 0.1})
    tracker.close(finished=True)
    rows = list(csv.reader((tmp_path / "metrics.csv").open()))
    assert rows == [["1", "train/loss", "0.5"], ["1", "train/lr", "0.1"]]
