"""The supervised training loop, which fine-tuning, the segmentation decoder and the probes share.

An update: next batch, gradients in micro-batches, flags summed over the ranks, a clipped step, figures on their way to
the host; then, where they are due, validation with early stopping, and a saved state. The figures of an update are
read while the next one runs, so that no step waits for the device. A step whose loss or gradient is not finite, or
whose gradient norm is a spike, changes nothing. Where memory runs out, every rank halves its micro-batch and takes the
same batch again. A task computes its batches from the number of the update alone, so a training that resumes from a
saved state has the weights of one that was never interrupted.
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.distributed.signals import Interrupted, StepFlags, StopRequest, stop_request, sync_flags
from octjepa.errors import OctjepaError
from octjepa.files import Journal, read_json_lines
from octjepa.progress import Bar, bar
from octjepa.train.guards import SKIPPED_IN_A_ROW
from octjepa.train.learner import STATES, Learner, load_state, save_state
from octjepa.train.step import is_out_of_memory

METRICS = "metrics.jsonl"
_log = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class SupervisedTask(ABC, Generic[Batch]):
    """What differs between supervised trainings. Every part depends on the number of the update alone."""

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
        """The validation loss of each learner, the same on every rank; None where it has no validation samples."""

    def begin_update(self, update: int) -> dict[str, Any]:
        """Sets learning rates and freezes layers; returns what the journal is to hold of that."""
        return {}

    def unreadable_count(self, batch: Batch) -> int:
        """How many volumes of the batch could not be read, so that others stood in."""
        return 0


@dataclass(frozen=True)
class LoopSettings:
    """How a training runs. label: of the progress bar; None: no bar. micro_batch: samples that a rank takes at once.

    validations: updates (from 1) after which to validate. clip_norm: None: gradients are not clipped. save_every:
    updates between two states. rates: what to lower where gradients are not finite; resume: how to go on after a stop.
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

    folder: where one learner's journal and states are written, and resumed from; None: nothing is saved. fingerprint:
    of everything that decides the result, held against a state's. Raises Interrupted (a signal came; a state is
    written), OctjepaError (gradients are not finite, one sample does not fit into memory, a process was lost),
    WrongCheckpointError, CheckpointError (the state in `folder`).
    """
    if folder is not None and len(learners) != 1:
        raise ValueError(f"{len(learners)} learners cannot share one folder of states")
    update = _resume(learners, runtime, folder, fingerprint)
    micro_batch = settings.micro_batch
    journal = Journal(folder / METRICS) if folder is not None and runtime.rank == 0 else None
    if journal is not None:
        journal.truncate(update)
    with (
        stop_request() if folder is not None else nullcontext(StopRequest()) as request,
        _progress(settings, update) as progress,
        _LateFigures(settings, journal, runtime, progress) as figures,
    ):
        batches = task.batches(update)
        while active := [learner for learner in learners if not learner.done]:
            values = task.begin_update(update)
            batch = next(batches)
            losses, flags, micro_batch = _gradients(
                task, active, batch, update, micro_batch, request.signal_number, runtime
            )
            steps = [
                (learner, take_step(learner, loss, learner.norm_limit(update), settings.clip_norm, runtime))
                for learner, loss in zip(active, losses, strict=True)
                if loss is not None
            ]
            figures.push(update, steps, values)
            update += 1
            if flags.unreadable:
                _log.warning("update %d: %d volumes could not be read, others stood in", update, flags.unreadable)
            if update in settings.validations:
                figures.settle()
                _validate(task, active, update, journal, progress)
            for learner in active:
                learner.update, learner.done = update, learner.done or update >= learner.updates
            ended = all(learner.done for learner in learners)
            if folder is not None and (ended or flags.stop_signal or update % settings.save_every == 0):
                figures.settle()
                runtime.run_on_rank_zero(partial(save_state, folder / STATES, learners[0], fingerprint))
            if flags.stop_signal and not ended:
                raise Interrupted(
                    f"stopped after update {update} of {settings.updates}; its checkpoint is written. Go on with "
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


def _gradients(
    task: SupervisedTask[Any],
    active: Sequence[Learner],
    batch: Any,
    update: int,
    micro_batch: int,
    signal_number: int,
    runtime: Runtime,
) -> tuple[list[Tensor | None], StepFlags, int]:
    """(this rank's share of each learner's loss, what the ranks agreed on, the micro-batch that fits into memory)."""
    while True:
        losses: list[Tensor | None] | None = None
        try:
            losses = [_accumulate(task.losses(learner, batch, update, micro_batch)) for learner in active]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        flags = sync_flags(
            runtime, signal_number=signal_number, out_of_memory=losses is None, unreadable=task.unreadable_count(batch)
        )
        if losses is not None and not flags.out_of_memory:
            return losses, flags, micro_batch
        for learner in active:
            learner.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        if micro_batch == 1:
            raise OctjepaError(f"update {update + 1}: a single sample does not fit into memory: use a device with more")
        micro_batch //= 2
        _log.warning(
            "out of memory at update %d: every rank now takes %d samples at once, and more often; the batch stays as "
            "it is",
            update + 1, micro_batch,
        )  # fmt: skip


def _accumulate(terms: Iterator[Tensor]) -> Tensor | None:
    """The sum of the terms, detached, after the gradient of each; None where there is no term."""
    total: Tensor | None = None
    for term in terms:
        term.backward()
        total = term.detach() if total is None else total + term.detach()
    return total


def take_step(learner: Learner, loss: Tensor, norm_limit: float, clip_norm: float | None, runtime: Runtime) -> Tensor:
    """Sums loss and gradients over the ranks, clips, and steps where both are finite and the norm is within its limit.

    Returns [loss, gradient norm before clipping, 1 where the step was taken], on the device.
    """
    loss = runtime.sum_over_ranks(loss.clone())
    parameters = [parameter for parameter in learner.parameters if parameter.grad is not None]
    runtime.sum_gradients(parameters)
    if clip_norm is None:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    healthy = torch.isfinite(norm) & torch.isfinite(loss) & (norm <= norm_limit)
    if learner.optimizer.defaults["fused"]:
        learner.optimizer.found_inf = (~healthy).float()  # type: ignore[attr-defined] # read by step()
        learner.optimizer.step()
    elif bool(healthy):
        learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return torch.stack([loss.float(), norm.float(), healthy.float()])


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


class _LateFigures:
    """The figures of an update, read from the device while the next one runs, for the guard and the journal."""

    def __init__(self, settings: LoopSettings, journal: Journal | None, runtime: Runtime, progress: Bar) -> None:
        self._settings, self._journal, self._runtime, self._bar = settings, journal, runtime, progress
        self._sent: tuple[int, list[Learner], Tensor | None, torch.Event | None, dict[str, Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OctjepaError) if error is not None else nullcontext():
            self.settle()  # whatever ended the training, the line of its last whole update is kept

    def push(self, update: int, steps: Sequence[tuple[Learner, Tensor]], values: dict[str, Any]) -> None:
        """Starts the figures of `steps` on their way to the host, and settles the update before."""
        host, event = self._runtime.start_copy(torch.stack([step for _, step in steps])) if steps else (None, None)
        before, self._sent = self._sent, (update, [learner for learner, _ in steps], host, event, values)
        self._settle(before)

    def settle(self) -> None:
        """Reads what is on its way. Raises OctjepaError: too many updates in a row were skipped."""
        before, self._sent = self._sent, None
        self._settle(before)

    def _settle(
        self, sent: tuple[int, list[Learner], Tensor | None, torch.Event | None, dict[str, Any]] | None
    ) -> None:
        """Waits for the figures of an update, passes them to the learners and writes them into the journal."""
        if sent is None:
            return
        update, learners, host, event, values = sent
        if event is not None:
            event.synchronize()
        for learner, (loss, norm, healthy) in zip(learners, [] if host is None else host.tolist(), strict=True):
            lost = learner.follow_update(update, bool(healthy), norm)
            if self._journal is not None:
                known = {"loss": loss, "grad_norm": norm} if healthy else {"skipped": True}
                self._journal.append({"update": update + 1, **known, **values})
            if lost:
                raise OctjepaError(
                    f"{learner.name}: {SKIPPED_IN_A_ROW} updates in a row without a finite gradient that is no spike: "
                    f"lower {self._settings.rates}"
                )
        self._bar.advance()
