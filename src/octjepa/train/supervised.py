"""The supervised training loop, which fine-tuning, the segmentation decoder and the probes share.

`train_supervised` shows an update from top to bottom: next batch, forward and backward, flags of all ranks, optimizer
step, log, validation with early stopping, saved state. Each part is `octjepa.train.engine`'s, as in pretraining. A task
computes its batches only from the number of the update, so a training that resumes from a saved state has the weights
of one that was never interrupted.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.distributed.signals import Interrupted, StepFlags, StopRequest, stop_request, sync_flags
from octjepa.errors import OctjepaError
from octjepa.files import Journal, read_json_lines
from octjepa.progress import Bar, bar
from octjepa.train.engine import LateMetrics, MicroBatcher, MicroLoss, accumulate_gradients, take_step
from octjepa.train.guards import SKIPPED_IN_A_ROW
from octjepa.train.learner import STATES, Learner, load_state, save_state

METRICS = "metrics.jsonl"
_log = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class SupervisedTask(ABC, Generic[Batch]):
    """The parts that differ between supervised trainings. Every part depends only on the number of the update."""

    @abstractmethod
    def batches(self, start: int) -> Iterator[Batch]:
        """The batches of this rank, from that of update `start` (from 0) on."""

    @abstractmethod
    def losses(self, learner: Learner, batch: Batch, update: int, micro_batch: int) -> Iterator[Tensor]:
        """The loss of `batch` in terms of at most `micro_batch` samples, whose sum over all ranks it is.

        The loop takes the gradient of each term before the next one. No term: the learner has no sample in the batch.
        """

    @abstractmethod
    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """The validation loss of each learner, the same on every rank; None if it has no validation samples."""

    def begin_update(self, update: int) -> dict[str, Any]:
        """Sets learning rates and freezes layers; returns what the journal is to hold of that."""
        return {}

    def unreadable_count(self, batch: Batch) -> int:
        """How many volumes of the batch could not be read and were replaced by others."""
        return 0


@dataclass(frozen=True)
class LoopSettings:
    """How a training runs. label: of the progress bar; None: no bar. micro_batch: samples that a rank takes at once.

    validations: updates (from 1) after which to validate. clip_norm: None: gradients are not clipped. save_every:
    updates between two states. rates: what to lower where gradients are not finite; resume: how to continue after a
    stop.
    """

    label: str | None
    updates: int
    micro_batch: int
    validations: Collection[int]
    clip_norm: float | None = None
    save_every: int = 100
    rates: str = "the learning rate"
    resume: str = "--resume"


def train_supervised(
    task: SupervisedTask[Any],
    learners: Sequence[Learner],
    settings: LoopSettings,
    runtime: Runtime,
    folder: Path | None = None,
    fingerprint: str = "",
) -> None:
    """Trains `learners` on the same batches and leaves in each the weights of its least validation loss, or the last.

    folder: for the journal and states of one learner, which a resumed run reads; None: nothing is saved. fingerprint:
    of everything that decides the result, held against a state's. Raises Interrupted (a signal came; a state is
    written), OctjepaError (gradients are not finite, one sample does not fit into memory, a process was lost),
    WrongCheckpointError, CheckpointError (the state in `folder`).
    """
    if folder is not None and len(learners) != 1:
        raise ValueError(f"{len(learners)} learners cannot share one folder of states")
    update = _resume(learners, runtime, folder, fingerprint)
    micro_batcher = MicroBatcher(runtime, settings.micro_batch, _SupervisedMemory())
    journal = Journal(folder / METRICS) if folder is not None and runtime.rank == 0 else None
    if journal is not None:
        journal.truncate(update)
    with (
        stop_request() if folder is not None else nullcontext(StopRequest()) as request,
        _progress(settings, update) as progress,
        _SupervisedMetrics(settings, journal, runtime, progress) as metrics,
    ):
        batches = task.batches(update)
        while active := [learner for learner in learners if not learner.done]:
            # Next batch, with the learning rates and frozen layers of this update.
            values = task.begin_update(update)
            batch = next(batches)

            # Forward and backward, in micro-batches that fit into the memory of every rank; flags of all ranks.
            gradients = partial(_accumulate, task, active, batch, update)
            agree = partial(_sync_flags, runtime, request, task.unreadable_count(batch))
            sums, flags = micro_batcher.run([learner.network for learner in active], gradients, agree, update)
            assert sums is not None  # every rank has a batch

            # Optimizer step of each learner with samples in the batch, unless its gradient is not finite or a spike.
            trained = [(learner, losses) for learner, losses in zip(active, sums, strict=True) if losses]
            steps = [_take_step(learner, losses, update, settings, runtime) for learner, losses in trained]

            # Log: the metrics of this update are on their way, those of the update before are written.
            metrics.push(update, steps, ([learner for learner, _ in trained], values))
            update += 1
            if flags.unreadable:
                _log.warning(
                    "update %d: %d volumes cannot be read and were replaced by others", update, flags.unreadable
                )

            # Validation with early stopping; saved state.
            if update in settings.validations:
                metrics.flush()
                _validate(task, active, update, journal, progress)
            for learner in active:
                learner.update, learner.done = update, learner.done or update >= learner.updates
            ended = all(learner.done for learner in learners)
            if folder is not None and (ended or flags.stop_signal or update % settings.save_every == 0):
                metrics.flush()
                runtime.run_on_rank_zero(partial(save_state, folder / STATES, learners[0], fingerprint))
            if flags.stop_signal and not ended:
                raise Interrupted(
                    f"stopped after update {update} of {settings.updates}; its checkpoint is written. Continue with "
                    f"{settings.resume}.",
                    flags.stop_signal,
                )
    for learner in learners:
        if learner.best:
            learner.network.load_state_dict(learner.best)


def _progress(settings: LoopSettings, done: int) -> AbstractContextManager[Bar]:
    if settings.label is None:
        return nullcontext(Bar(None, None, ""))
    return bar(settings.label, settings.updates, "update", done)


def _resume(learners: Sequence[Learner], runtime: Runtime, folder: Path | None, fingerprint: str) -> int:
    """The updates that are done. Every rank reads the state itself: all see the folder."""
    if folder is None:
        return 0
    update = load_state(folder / STATES, learners[0], fingerprint)
    on_rank_zero = runtime.broadcast_object(update)
    if on_rank_zero != update:
        raise OctjepaError(
            f"rank {runtime.rank} finds update {update} in {folder / STATES}, rank 0 update {on_rank_zero}: all "
            "processes must see the same folder"
        )
    if update:
        learners[0].recall(line for line in read_json_lines(folder / METRICS) if line["update"] <= update)
    return update


def _accumulate(
    task: SupervisedTask[Any], active: Sequence[Learner], batch: Any, update: int, micro_batch: int
) -> list[dict[str, Tensor]]:
    """Leaves the gradient of each learner in its network; its loss, or nothing where the batch has no sample of it."""
    return [
        accumulate_gradients(
            learner.network,
            (MicroLoss(loss, {"loss": loss.detach()}) for loss in task.losses(learner, batch, update, micro_batch)),
        )
        for learner in active
    ]


def _sync_flags(runtime: Runtime, request: StopRequest, unreadable: int, out_of_memory: bool) -> StepFlags:
    """Facts that all ranks need before the step."""
    return sync_flags(runtime, signal_number=request.signal_number, out_of_memory=out_of_memory, unreadable=unreadable)


def _take_step(
    learner: Learner, losses: dict[str, Tensor], update: int, settings: LoopSettings, runtime: Runtime
) -> dict[str, Tensor]:
    limit = learner.norm_limit(update)
    return take_step(learner.network, learner.optimizer, losses, runtime, settings.clip_norm, limit)


def _validate(
    task: SupervisedTask[Any], active: Sequence[Learner], update: int, journal: Journal | None, progress: Bar
) -> None:
    """Validation losses of the active learners, to the learners, the journal and the progress bar."""
    losses = task.validate(active)
    for learner, loss in zip(active, losses, strict=True):
        if loss is not None:
            learner.follow_validation(update, loss)
    if journal is not None:
        best = {} if losses[0] is None else {"best_update": active[0].best_update}
        journal.append({"update": update, "val_loss": losses[0], **best})
    shown = [learner.best_loss for learner in active if learner.best_loss is not None]
    progress.say(f"val {sum(shown) / len(shown):.3f}" if shown else "")


class _SupervisedMetrics(LateMetrics):
    """Tells each learner of its update, and writes the journal's line."""

    def __init__(self, settings: LoopSettings, journal: Journal | None, runtime: Runtime, progress: Bar) -> None:
        super().__init__(runtime)
        self._settings, self._journal, self._bar = settings, journal, progress

    def write(self, update: int, steps: list[dict[str, float]], about: tuple[list[Learner], dict[str, Any]]) -> None:
        """`about`: the learners that had samples, and what the journal holds of the update.

        Raises OctjepaError: too many updates in a row were skipped.
        """
        learners, values = about
        for learner, step in zip(learners, steps, strict=True):
            healthy = bool(step["healthy"])
            lost = learner.follow_update(update, healthy, step["grad_norm"])
            if self._journal is not None:
                taken = {"loss": step["loss"], "grad_norm": step["grad_norm"]} if healthy else {"skipped": True}
                self._journal.append({"update": update + 1, **taken, **values})
            if lost:
                raise OctjepaError(
                    f"{learner.name}: {SKIPPED_IN_A_ROW} updates in a row without a finite gradient that is not a "
                    "spike: "
                    f"lower {self._settings.rates}"
                )
        self._bar.advance()


class _SupervisedMemory:
    """The message of a supervised training when memory runs out (`octjepa.train.engine.MemoryAdvice`)."""

    def out_of_memory(self, micro_batch: int) -> str | None:
        """A single sample cannot be divided."""
        return "a single sample does not fit into memory: use a device with more" if micro_batch == 1 else None

    def halved(self, micro_batch: int) -> str:
        """The batch stays."""
        return f"every rank now takes {micro_batch} samples at once, and more often; the batch stays as it is"
