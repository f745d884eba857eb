"""Small limits: file size of the shell, plans of very long runs, arrays without spacing, the public names."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import octjepa
from octjepa.config import load_recipe
from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.train.optimizer import learning_rate, lr_curve, random_start_share, scheduled_updates


def test_a_limit_on_the_size_of_files_is_not_a_full_disk(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OctjepaError, match=r"at most 1000 bytes here; raise the limit \(ulimit -f\)"):
            write_json(tmp_path / "large.json", {"text": "x" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("total", [1, 7, 100_000, 100_000_000])
def test_a_schedule_of_any_length_is_evaluated_at_a_bounded_number_of_updates(total: int) -> None:
    updates = scheduled_updates(total)
    assert (updates[0], updates[-1]) == (0, total - 1)
    assert len(updates) <= 100_001
    recipe = load_recipe("tiny_cpu", [f"train.max_updates={total}"])
    curve = lr_curve(recipe.train, total)
    assert max(curve) == pytest.approx(recipe.train.base_lr)
    assert curve[-1] == learning_rate(total - 1, total, recipe.train)


def test_the_share_of_the_random_start_is_nearly_the_same_from_fewer_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("tiny_cpu_vjepa", []).objective
    exact = random_start_share(5000, recipe)
    monkeypatch.setattr("octjepa.train.optimizer.scheduled_updates", lambda total: scheduled_updates(total, 500))
    assert random_start_share(5000, recipe) == pytest.approx(exact, rel=0.1, abs=1e-6)


@pytest.mark.slow
def test_an_array_needs_a_spacing() -> None:
    """In a process without the shape checker, as users have it."""
    code = (
        "import numpy, octjepa\n"
        "from octjepa.errors import UsageError\n"
        "from octjepa.encoders.module import prepare_volume\n"
        "try: prepare_volume(numpy.zeros((4, 8, 8), 'uint8'), None)\n"
        "except UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not ndarray: an array has no spacing" in done.stdout


def test_public_names_are_listed() -> None:
    assert {"read_volume", "load_encoder", "load_segmenter", "VJEPA3D", "__version__"} <= set(dir(octjepa))
