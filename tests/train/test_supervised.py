"""The shared supervised loop: resume to the bit, early stopping, skipped updates, and micro-batches that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from octjepa import keys
from octjepa.checkpoint.folder import write_folder
from octjepa.distributed.adamw import adamw
from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError, WrongCheckpointError
from octjepa.files import read_json_lines
from octjepa.train.learner import STATES, Learner
from octjepa.train.supervised import METRICS, LoopSettings, SupervisedTask, train_supervised

UPDATES = 12
SETTINGS = LoopSettings("toy", UPDATES, 8, range(3, UPDATES + 1, 3), clip_norm=1.0, save_every=4)


class ToyTask(SupervisedTask[int]):
    """Least squares on eight samples an update, drawn by its number; `fits` samples fit into memory at once."""

    def __init__(self, fits: int = 8, spoilt: tuple[int, ...] = (), stop_at: int | None = None) -> None:
        self.fits, self.spoilt, self.stop_at = fits, spoilt, stop_at
        self.micro_batches: list[int] = []
        self.val_losses = iter(())

    def batches(self, start: int) -> Iterator[int]:
        yield from count(start)

    def losses(self, learner: Learner, batch: int, update: int, micro_batch: int) -> Iterator[Tensor]:
        if update == self.stop_at:
            raise KeyboardInterrupt
        self.micro_batches.append(micro_batch)
        if micro_batch > self.fits:
            raise RuntimeError("CUDA out of memory")
        x = torch.from_numpy(keys.generator(0, "toy", batch).normal(size=(8, 3))).float()
        for part in x.split(micro_batch):
            loss = (learner.network(part)[:, 0] - part.sum(dim=1)).square().sum() / len(x)
            yield loss * float("nan") if update in self.spoilt else loss

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        return [next(self.val_losses, None) for _ in learners]


def learner(patience: int | None = None) -> Learner:
    torch.manual_seed(0)
    network = nn.Linear(3, 1)
    optimizer = adamw(network.parameters(), torch.device("cpu"), lr=0.1)
    return Learner("toy", network, optimizer, UPDATES, patience=patience)


def weights(one: Learner) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.network.parameters()])


def trained(task: ToyTask, one: Learner, folder: Path | None = None, fingerprint: str = "") -> Learner:
    if folder is not None:
        folder.mkdir(exist_ok=True)
    train_supervised(task, [one], SETTINGS, Runtime("fp32"), folder, fingerprint)
    return one


def test_a_training_that_was_interrupted_resumes_to_the_same_weights_and_journal(tmp_path: Path) -> None:
    whole = trained(ToyTask(), learner(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(ToyTask(stop_at=7), learner(), tmp_path / "stopped")
    lines = [line["update"] for line in read_json_lines(tmp_path / "stopped" / METRICS) if "loss" in line]
    assert lines == list(range(1, 8))  # that of the last whole update is kept
    again = trained(ToyTask(), learner(), tmp_path / "stopped")
    assert torch.equal(weights(again), weights(whole))
    assert (tmp_path / "stopped" / METRICS).read_text() == (tmp_path / "whole" / METRICS).read_text()
    assert [path.name for path in sorted((tmp_path / "whole" / STATES).iterdir())] == ["step-00000008", "step-00000012"]
    with pytest.raises(WrongCheckpointError, match="another recipe, encoder, store, precision or labels"):
        trained(ToyTask(), learner(), tmp_path / "whole", fingerprint="another")


def test_the_folder_of_another_kind_of_run_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "run" / STATES, 3, {"model.safetensors": {"a": torch.zeros(1)}}, {"recipe": {}})
    with pytest.raises(WrongCheckpointError, match="belongs to another kind of run: give --out a new folder"):
        trained(ToyTask(), learner(), tmp_path / "run")


@pytest.mark.parametrize("updates", [6, 20])
@pytest.mark.parametrize("stop_at", [7, None])
def test_a_training_is_not_resumed_with_another_number_of_updates(
    updates: int, stop_at: int | None, tmp_path: Path
) -> None:
    with nullcontext() if stop_at is None else pytest.raises(KeyboardInterrupt):
        trained(ToyTask(stop_at=stop_at), learner(), tmp_path / "run")
    other = learner()
    other.updates = updates
    message = rf"was begun with 12 updates, not {updates}: give 12 again, or start a new training with another --out"
    with pytest.raises(WrongCheckpointError, match=message):
        trained(ToyTask(), other, tmp_path / "run")
    assert trained(ToyTask(), learner(), tmp_path / "run").done


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_taken_in_halves_with_the_same_gradient(caplog: pytest.LogCaptureFixture) -> None:
    whole, halved = trained(ToyTask(), learner()), ToyTask(fits=2)
    assert torch.allclose(weights(trained(halved, learner())), weights(whole), atol=1e-6)
    assert halved.micro_batches == [8, 4, *[2] * UPDATES]
    assert "takes 2 samples at once" in caplog.text
    with pytest.raises(OctjepaError, match="update 1: a single sample does not fit into memory"):
        trained(ToyTask(fits=0), learner())


def test_the_weights_of_the_least_validation_loss_are_left_and_patience_ends_early() -> None:
    task, one = ToyTask(), learner(patience=2)
    task.val_losses = iter([0.5, 0.4, 0.6, 0.7])
    trained(task, one)
    assert (one.best_update, one.update, one.done) == (6, 12, True)
    assert torch.equal(one.best["weight"], one.network.state_dict()["weight"])
    early, short = ToyTask(), learner(patience=1)
    early.val_losses = iter([0.5, 0.6])
    trained(early, short)
    assert (short.best_update, short.update) == (3, 6)


def test_an_update_that_is_not_finite_changes_nothing_and_many_in_a_row_end_the_training() -> None:
    skipped = trained(ToyTask(spoilt=(3, 5)), learner())
    assert skipped.skipped == 2
    assert torch.isfinite(weights(skipped)).all()
    with pytest.raises(OctjepaError, match="5 updates in a row without a finite gradient"):
        trained(ToyTask(spoilt=tuple(range(2, 9))), learner())


def test_learners_that_share_their_batches_do_not_touch_each_other() -> None:
    pair = [learner(), learner()]
    pair[1].updates = 5
    train_supervised(ToyTask(), pair, SETTINGS, Runtime("fp32"))
    assert torch.equal(weights(pair[0]), weights(trained(ToyTask(), learner())))
    assert [one.update for one in pair] == [12, 5]
    with pytest.raises(ValueError, match="cannot share one folder"):
        train_supervised(ToyTask(), pair, SETTINGS, Runtime("fp32"), Path("anywhere"))


def test_a_validation_loss_of_nan_is_never_the_best() -> None:
    followed = learner()
    for update, loss in ((1, float("nan")), (2, 1.0), (3, 0.5), (4, float("nan"))):
        followed.follow_validation(update, loss)
    assert (followed.best_update, followed.best_loss) == (3, 0.5)
