"""`make real`: metrics from pooled counts, tables without an eye's secrets, and a clean end without the data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.real_eyes import PAGES, RECORDS, ZONES, page, pooled_precision, records_of, score_counts

from octjepa.tasks.segmenter.validation import average_precision, dice_at
from octjepa.tasks.thickness import SECTORS

ROOT = Path(__file__).resolve().parents[2]


def test_pooled_counts_give_the_metrics_of_the_voxels() -> None:
    generator = np.random.default_rng(5)
    truth = generator.random(4000) < 0.2
    scores = np.clip(0.35 * truth + 0.6 * generator.random(4000), 0, 0.999)
    parts = [score_counts(scores[half], truth[half]) for half in (slice(None, 2000), slice(2000, None))]
    precision, dice = pooled_precision(parts)
    assert abs(precision - average_precision(scores.astype(np.float32), truth)) < 0.01
    best = max(dice_at(scores.astype(np.float32), truth, threshold) for threshold in np.linspace(0, 1, 201))
    assert abs(dice - best) < 0.01


def test_every_zone_of_the_device_is_a_sector() -> None:
    assert sorted(ZONES.values()) == sorted(SECTORS)


def test_the_published_page_follows_from_its_record() -> None:
    results = json.loads((RECORDS / "results.json").read_text(encoding="utf-8"))
    assert (PAGES / "README.md").read_text(encoding="utf-8") == page(results)


@pytest.mark.slow
def test_without_the_real_eyes_nothing_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.real_eyes", "--shared", tmp_path / "none", "--out", tmp_path / "out"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert "no real eyes" in ended.stdout
    assert not (tmp_path / "out").exists()


def test_the_written_results_have_every_task_and_picture() -> None:
    folder = PAGES
    results = json.loads((records_of(folder) / "results.json").read_text())
    assert {"task_1_um", "task_2", "task_4_um"} <= results["tasks"].keys()
    assert {name for name in results["duke"] if not (folder / f"duke_{name}.jpg").is_file()} == set()
    assert (folder / "scan.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "README.md").read_text()
    assert f"{np.mean(results['tasks']['task_1_um']['octjepa']):.1f}" in page
    assert "Chiu et al." in page
