"""Training of the segmentation network: a schedule that ends, a checkpoint that continues, workers that deliver."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from octjepa.errors import OctjepaError
from octjepa.model.boundary_unet import segmentation_loss
from octjepa.phantom.scene_stream import SceneStream, training_scene
from octjepa.tasks.segmenter import train
from octjepa.tasks.segmenter.image_formation import Draws
from octjepa.tasks.segmenter.scene_pool import ScenePool
from octjepa.tasks.segmenter.train import Trainer, TrainingSettings, learning_rate

CPU = torch.device("cpu")


def test_learning_rate_rises_and_falls_with_the_time_used() -> None:
    settings = TrainingSettings()
    rates = [learning_rate(settings, share) for share in np.linspace(0, 1, 101)]
    assert np.argmax(rates) in range(3, 6)
    assert rates[-1] < 0.01 * max(rates)
    assert learning_rate(settings, 1.5) == rates[-1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_stream_delivers_the_scenes_of_its_numbers() -> None:
    with SceneStream(seed=5, workers=2, slices=2, start=3) as stream:
        scenes = []
        deadline = time.monotonic() + 60
        while len(scenes) < 6 and time.monotonic() < deadline:
            scenes += stream.take(2)
    wanted = [training_scene(5, k, 2).power for k in range(3, 15)]
    assert len(scenes) >= 6
    for scene in scenes:
        assert any(np.array_equal(scene.power, power) for power in wanted)


@pytest.mark.slow
def test_a_checkpoint_continues_where_it_was_written(tmp_path: Path) -> None:
    settings = TrainingSettings(batch=2)
    pool = ScenePool(2, 2, CPU)
    pool.add([training_scene(5, k, 2) for k in range(2)])
    trainer = Trainer(settings, tmp_path, tmp_path, CPU)
    rng = np.random.default_rng(0)
    for _ in range(2):
        trainer.step(pool, rng, Draws(1, CPU))
    trainer.save()
    continued = Trainer(settings, tmp_path, tmp_path, CPU)
    assert continued.progress == trainer.progress
    for name, value in trainer.network.state_dict().items():
        assert torch.equal(value, continued.network.state_dict()[name]), name
    trainer.losses.take_mean()
    for one in (trainer, continued):
        one.step(pool, np.random.default_rng(1), Draws(2, CPU))
    assert trainer.losses.take_mean() == pytest.approx(continued.losses.take_mean(), rel=1e-3)
    for a, b in zip(trainer.network.parameters(), continued.network.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_step_without_a_finite_gradient_is_skipped_and_five_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ScenePool(2, 2, CPU)
    pool.add([training_scene(5, k, 2) for k in range(2)])
    trainer = Trainer(TrainingSettings(batch=1), tmp_path, tmp_path, CPU)
    before = [parameter.detach().clone() for parameter in trainer.network.parameters()]

    def broken(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layers, fluid = segmentation_loss(*arguments)
        return layers * float("nan"), fluid

    monkeypatch.setattr(train, "segmentation_loss", broken)
    for _ in range(4):
        trainer.step(pool, np.random.default_rng(1), Draws(2, CPU))
    trainer.save()
    for parameter, old in zip(trainer.network.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    continued = Trainer(TrainingSettings(batch=1), tmp_path, tmp_path, CPU)
    assert continued.learner.skipped == continued.progress.skipped == 4
    trainer.step(pool, np.random.default_rng(1), Draws(2, CPU))
    with pytest.raises(OctjepaError, match="5 steps in a row until step 5"):
        trainer.losses.flush()


def test_exported_weights_start_another_run(tmp_path: Path) -> None:
    trainer = Trainer(TrainingSettings(batch=1), tmp_path, tmp_path, CPU)
    trainer._export({"layers": 1.0})
    other = tmp_path / "other"
    other.mkdir()
    started = Trainer(TrainingSettings(batch=1, seed=9), other, other, CPU, init=tmp_path / "segmenter.safetensors")
    for a, b in zip(trainer.network.parameters(), started.network.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-2)
    assert started.earlier["validation"] == {"layers": 1.0}
    assert started.earlier["precision"] in ("bf16", "fp32")
