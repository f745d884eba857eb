"""An encoder that learns the truth of phantom volumes: volumes, truth by token, training and export."""

from __future__ import annotations

import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.errors import UsageError
from octjepa.files import read_json_lines
from octjepa.locks import writer_lock
from octjepa.phantom.random_scene import MODERATE, STRONG
from octjepa.tasks.recall import standardised
from octjepa.tasks.truth import train, training
from octjepa.tasks.truth.network import (
    CELL,
    TokenOutputs,
    TokenTruth,
    TruthNetwork,
    known_truth,
    lesion_targets,
    token_distances,
    token_labels,
    truth_losses,
)
from octjepa.tasks.truth.training import TruthSettings, TruthTask, score, validation_volumes
from octjepa.tasks.truth.volumes import LAYERS, UNKNOWN, VOXEL_CLASSES, draw_volume, scene_columns
from octjepa.train.learner import STATES, Learner

PACKAGED = load_encoder("phantom-tiny")
RECIPE = PACKAGED.recipe
GRID, PATCH = RECIPE.grid, RECIPE.tokens.patch_size


def test_a_volume_is_a_function_of_its_number() -> None:
    one, again, other = (draw_volume(3, number, MODERATE, RECIPE.preprocessing) for number in (0, 0, 1))
    assert np.array_equal(one.volume.pixels, again.volume.pixels)
    assert np.array_equal(one.labels, again.labels)
    assert not np.array_equal(one.volume.pixels, other.volume.pixels)


def test_labels_follow_the_boundaries_and_the_encoder_can_read_the_volume() -> None:
    drawn = draw_volume(3, 2, STRONG, RECIPE.preprocessing)
    assert drawn.volume.pixels.shape == RECIPE.preprocessing.stored_size
    rows = np.arange(drawn.labels.shape[1])[None, :, None]
    healthy = (drawn.labels != UNKNOWN) & (drawn.labels < LAYERS)
    assert healthy.mean() > 0.5
    assert set(np.unique(drawn.labels)) <= {*range(VOXEL_CLASSES), UNKNOWN}
    above = sum((rows >= drawn.boundaries[:, number, None]).astype(int) for number in range(8))
    assert np.array_equal(drawn.labels[healthy], above[healthy])
    # The band that selects tokens begins at the inner limiting membrane, within the noise of a surface finder.
    found = drawn.volume.band[0].astype(float)
    difference = np.abs(found - np.clip(drawn.boundaries[:, 0], 0, rows.max()))
    assert np.nanmedian(difference[found >= 0]) < 3
    assert PACKAGED.encode_volumes([drawn.volume])[0].features.shape[1] == PACKAGED.dim


@pytest.mark.parametrize("covered", [1, 2, 3, 4, 5])
def test_image_and_labels_of_a_column_have_one_centre(covered: int) -> None:
    at = np.random.default_rng(0).uniform(20, 300, 10_000)
    first, nearest = scene_columns(at, covered)
    image = first + (covered - 1) / 2
    for offset in (image - nearest, image - at, nearest - at):
        assert abs(offset.mean()) < 0.02
        assert np.abs(offset).max() <= 0.5


def test_vitreous_is_dark_and_retina_is_bright() -> None:
    drawn = draw_volume(3, 4, MODERATE, RECIPE.preprocessing)
    vitreous, nerve_fibres = (drawn.volume.pixels[drawn.labels == number].mean() for number in (0, 1))
    assert nerve_fibres > vitreous + 20


def test_distances_are_in_patch_heights_from_the_centre_of_a_token() -> None:
    d, h, w = GRID
    boundaries = np.full((d * PATCH[0], 8, w * PATCH[2]), 43.5, np.float32)
    boundaries[5, 2, : PATCH[2] // 2] = 51.5  # one slice, the first half of the first patch's columns
    boundaries[6, 3] = np.nan
    index = np.array([np.ravel_multi_index((1, row, 0), GRID) for row in (5, 4, 15)])
    found = token_distances(boundaries, index, GRID, PATCH).reshape(3, 8, PATCH[0], 2)
    assert found[0, 0] == pytest.approx(0.0)  # rows 40 to 47 have their centre at 43.5
    assert found[1, 0] == pytest.approx(1.0)
    assert found[2, 0] == pytest.approx(-3.0)  # out of reach
    assert found[0, 2, 1].tolist() == [1.0, 0.0]
    assert np.isnan(found[0, 3, 2]).all()
    assert h == 16


def test_cells_hold_neighbouring_voxels() -> None:
    network = TruthNetwork(PACKAGED.network, PATCH)
    numbers = np.arange(np.prod(PATCH), dtype=np.uint8).reshape(PATCH)
    cells = network.cell_labels(torch.from_numpy(numbers.reshape(1, 1, -1)))[0, 0].numpy()
    p, q, r = CELL
    expected = [
        numbers[z : z + p, y : y + q, x : x + r].ravel()
        for z in range(0, PATCH[0], p)
        for y in range(0, PATCH[1], q)
        for x in range(0, PATCH[2], r)
    ]
    assert np.array_equal(cells, expected)


def test_lesion_targets_count_shares_of_a_patch() -> None:
    labels = torch.zeros(1, 2, 256, dtype=torch.uint8)
    labels[0, 0, :10] = LAYERS  # 4 % intraretinal
    labels[0, 0, 10:26] = LAYERS + 1  # 6 % subretinal
    found = lesion_targets(labels)[0].reshape(2, 4, 3)
    assert found[0].tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert not found[1].any()
    cut = token_labels(np.full(RECIPE.preprocessing.image_size, 7, np.uint8), np.array([0, 1023]), PATCH)
    assert cut.shape == (2, 256)
    assert (cut == 7).all()


def test_the_losses_of_the_parts_of_a_batch_add_up_to_those_of_the_batch() -> None:
    rng = torch.Generator().manual_seed(0)
    network = TruthNetwork(PACKAGED.network, PATCH)
    labels = torch.randint(VOXEL_CLASSES, (3, 5, int(np.prod(PATCH))), dtype=torch.uint8, generator=rng)
    distances = torch.randn(3, 5, network.widths[2], generator=rng)
    labels[0, 1:], distances[1, :4] = UNKNOWN, torch.nan
    truth = TokenTruth(labels, distances)
    cells, lesions = torch.randn(3, 5, network.widths[0], generator=rng), torch.randn(3, 5, 12, generator=rng)
    given = (cells.unflatten(-1, (-1, VOXEL_CLASSES)), lesions, torch.zeros_like(distances), torch.zeros(3, 5, 1))
    whole, known = truth_losses(network, TokenOutputs(*given), truth), known_truth(network, truth)
    parts = [
        truth_losses(
            network, *(type(of)(*(value[part] for value in of)) for of in (TokenOutputs(*given), truth)), known
        )
        for part in (slice(0, 1), slice(1, 3))
    ]
    for name in ("cells", "lesions", "distances"):
        assert float(sum(getattr(part, name) for part in parts)) == pytest.approx(float(getattr(whole, name)), rel=1e-5)


class _Perfect(TruthNetwork):
    """Knows what it is asked."""

    def forward(self, patches, positions):  # type: ignore[no-untyped-def]
        truth = self.answers.pop(0)
        outputs = super().forward(patches, positions)
        logits = 20 * lesion_targets(truth.labels) - 10
        return outputs._replace(lesions=logits, distances=torch.nan_to_num(truth.distances))


def test_scores_of_a_perfect_network(monkeypatch: pytest.MonkeyPatch) -> None:
    network = _Perfect(PACKAGED.network, PATCH)
    network.answers = []
    collate = training._collate

    def remember(samples):  # type: ignore[no-untyped-def]
        batch = collate(samples)
        network.answers.append(batch.truth)
        return batch

    monkeypatch.setattr(training, "_collate", remember)
    found = score(network, RECIPE, validation_volumes(RECIPE, 2), Runtime("fp32"))
    assert found.fluid_ap == pytest.approx(1.0)
    assert found.boundary_um == pytest.approx(0.0, abs=1e-3)


@pytest.mark.slow
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: Path, updates: int) -> int:
        options = (
            f"--out {folder} --updates {updates} --batch 4 --uses 2 --keep 0.5 --precision fp32 --licence apache-2.0"
        )
        monkeypatch.setattr(sys, "argv", ["train", *options.split()])
        return train.main()

    monkeypatch.setattr(training, "validation_volumes", lambda recipe, count: validation_volumes(recipe, 1))
    monkeypatch.setattr(train, "TruthSettings", partial(TruthSettings, save_every=1))
    assert run(tmp_path / "whole", 3) == 0
    begin = TruthTask.begin_update

    def killed(task: TruthTask, update: int) -> Any:
        if update == 2:
            raise RuntimeError("killed")
        return begin(task, update)

    with monkeypatch.context() as patch:
        patch.setattr(TruthTask, "begin_update", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "parts", 3)
    assert run(tmp_path / "parts", 3) == 0
    assert [line["update"] for line in read_json_lines(tmp_path / "parts" / "metrics.jsonl")] == [1, 2, 3, 3]
    assert [line["update"] for line in read_json_lines(tmp_path / "parts" / "validation.jsonl")] == [3]

    whole, parts = (load_encoder(tmp_path / name / "encoder") for name in ("whole", "parts"))
    assert whole.name == "truth"
    assert whole.recorded_training == PACKAGED.recorded_training
    for name, weights in whole.network.state_dict().items():
        assert torch.equal(weights, parts.network.state_dict()[name]), name
    assert not torch.equal(whole.network.embed.weight, PACKAGED.network.embed.weight)
    settings = (tmp_path / "whole" / "settings.json").read_text()
    assert run(tmp_path / "whole", 2) == 1
    assert "was begun with 3 updates, not 2: give 3 again" in capsys.readouterr().err
    assert (tmp_path / "whole" / "settings.json").read_text() == settings


@pytest.mark.slow
def test_a_few_updates_lower_the_loss() -> None:
    torch.manual_seed(0)
    encoder = load_encoder("phantom-tiny")
    encoder.network.requires_grad_(True)
    network = TruthNetwork(encoder.network, PATCH)
    task = TruthTask(network, RECIPE, TruthSettings(updates=12, batch=4, token_counts=(64,)), Runtime("fp32"))
    learner = Learner("truth", network, task.optimizer, 12)
    batch, losses = task.batch(0), []
    for update in range(8):
        task.begin_update(update)
        loss = next(task.losses(learner, batch, update, 4))
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("uses", [4, 8])
def test_each_volume_is_drawn_once_for_all_its_uses(uses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, drawn = draw_volume(1, 0, MODERATE, RECIPE.preprocessing), []
    monkeypatch.setattr(TruthTask, "_draw", lambda _, number: drawn.append(number) or volume)
    network = TruthNetwork(load_encoder("phantom-tiny").network, RECIPE.tokens.patch_size)
    task = TruthTask(network, RECIPE, TruthSettings(100, uses=uses, token_counts=(16,)), Runtime("fp32"))
    for update in range(80):
        task.batch(update)
    assert drawn == list(range(80 * 16 // uses))


def test_the_teacher_keeps_what_labels_do_not_name() -> None:
    def distance(keep: float) -> float:
        """Mean squared distance of the recalled tokens from the teacher's after some updates."""
        torch.manual_seed(0)
        encoder = load_encoder("phantom-tiny")
        encoder.network.requires_grad_(True)
        network = TruthNetwork(encoder.network, PATCH)
        settings = TruthSettings(updates=30, batch=4, uses=2, keep=keep, learning_rate=2e-3, token_counts=(64,))
        task = TruthTask(network, RECIPE, settings, Runtime("fp32"))
        learner = Learner("truth", network, task.optimizer, 30)
        batch = task.batch(0)
        with torch.no_grad():
            taught = standardised(PACKAGED.network(batch.patches, batch.positions))
            assert torch.allclose(network(batch.patches, batch.positions).recall, taught, atol=1e-4)
        for update in range(10):
            task.begin_update(update)
            for loss in task.losses(learner, batch, update, 4):
                loss.backward()
            task.optimizer.step()
            task.optimizer.zero_grad()
        if task.teacher is not None:
            assert torch.equal(task.teacher.embed.weight, PACKAGED.network.embed.weight)
        assert not torch.equal(network.encoder.embed.weight, PACKAGED.network.embed.weight)
        with torch.no_grad():
            return float(((network(batch.patches, batch.positions).recall - taught) ** 2).mean())

    assert distance(keep=10.0) < 0.5 * distance(keep=0.0)


def test_another_precision_and_other_first_weights_are_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints = []

    def begin(*given: Any) -> None:
        fingerprints.append(given[5])
        raise UsageError("enough")

    def run(precision: str, first: PretrainedEncoder) -> None:
        monkeypatch.setattr(train, "starting_encoder", lambda arguments: first)
        monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path / "run"), "--precision", precision])
        assert train.main() == 1

    monkeypatch.setattr(train, "train_on_truth", begin)
    other = load_encoder("phantom-tiny")
    other.network.norm.weight.data.mul_(2)
    for precision, first in (("fp32", PACKAGED), ("bf16", PACKAGED), ("fp32", other), ("fp32", PACKAGED)):
        run(precision, deepcopy(first))
    assert fingerprints[0] == fingerprints[3]
    assert len(set(fingerprints)) == 3


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch of 6 volumes: expected a multiple of 4"):
        TruthSettings(updates=3, batch=6)


@pytest.mark.parametrize("wrong", [{"uses": 0}, {"keep": -1.0}, {"keep": float("nan")}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        TruthSettings(updates=3, **wrong)


def test_patches_that_are_no_multiples_of_a_cell_are_refused() -> None:
    with pytest.raises(UsageError, match=r"patches of \(4, 7, 8\) voxels .* cells of \(1, 2, 4\)"):
        TruthNetwork(PACKAGED.network, (4, 7, 8))


def test_a_wrong_option_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    rates = ("--learning-rate -1", "--learning-rate nan", "--learning-rate 2")
    for options in ("--batch 6", "--updates 0", f"--init {tmp_path / 'absent'}", *rates):
        monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path / "run"), *options.split()])
        assert train.main() == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")


def test_a_folder_that_cannot_hold_the_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, the folder of another process, and a link that leads the states elsewhere."""
    monkeypatch.setattr(train, "train_on_truth", lambda *_: pytest.fail("the training began"))
    (tmp_path / "file").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked" / STATES).symlink_to(tmp_path / "elsewhere")
    with writer_lock(tmp_path / "busy"):
        for out, words in (("file", "is a file"), ("file/run", "a file"), ("busy", "another"), ("linked", "is a link")):
            monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path / out), "--updates", "1"])
            assert train.main() == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("error: ")
            assert words in line
