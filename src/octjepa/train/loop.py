"""Pretraining, from top to bottom: `Trainer.fit` is the loop over optimizer updates.

Next batch, forward and backward, flags of all ranks, optimizer step, EMA target, log, monitor and validation,
checkpoint. Everything random comes from the number of the update, so a run that continues from a checkpoint computes
what the uninterrupted one would have, bit for bit in fp32 on one machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octjepa.checkpoint.state import Record
from octjepa.distributed.signals import Interrupted, StepFlags, StopRequest, stop_request, sync_flags
from octjepa.errors import OctjepaError
from octjepa.objectives.loss import recipe_at_update
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.checkpointing import CheckpointWriter, best_checkpoint, go_back, snapshot, write_checkpoint
from octjepa.train.engine import MicroBatcher, take_step
from octjepa.train.guards import (
    FROZEN_AFTER,
    LEAK_CHECK_EVERY,
    SKIPPED_IN_A_ROW,
    CollapseAlarms,
    FrozenTargetCheck,
    SpikeGuard,
    UnreadableVolumes,
    check_leak,
)
from octjepa.train.metrics import MetricsBuffer, ThroughputMeter, slow_reading_message
from octjepa.train.monitor import MonitorSet, run_monitor
from octjepa.train.optimizer import learning_rate, momentum, set_learning_rate, update_target, warmup_updates
from octjepa.train.run_folder import is_finished
from octjepa.train.setup import Run, started_run
from octjepa.train.step import PretrainingMemory, accumulate
from octjepa.train.tracking import RunLogger, open_logger
from octjepa.train.validate import without_augmentation
from octjepa.views.loader import Batch

if TYPE_CHECKING:
    from octjepa.train.summary import RunSummary

_log = logging.getLogger(__name__)


def pretrain(recipe: Recipe, store: Store, out: Path, resume: bool = False) -> RunSummary:
    """Runs or resumes `recipe` on `store`'s training people into the run folder `out`; returns its summary.

    Under torchrun every process calls it alike: rank 0 writes and tracks, all return the same. Raises UsageError (no
    data, a run in the way or being written), ContractError (store made otherwise), CheckpointError (resume failed, disk
    full), PretextAlarm (the task is broken) and Interrupted (a signal arrived; a checkpoint was written).
    """
    with started_run(recipe, store, out, resume) as run:
        if run.start.update == run.total:
            finished = run.runtime.run_on_rank_zero(partial(_finished_summary, out))
            if finished is not None:
                return finished
        run.print_choices()
        run.shard_and_compile()
        return _train(run)


def _train(run: Run) -> RunSummary:
    """All updates that are left, the final validation, the summary."""
    recipe, start, runtime = run.recipe, run.start, run.runtime
    guard = SpikeGuard(recipe.train.spike_factor)
    guard.restore(start.lines)
    alarms = CollapseAlarms(recipe.objective, warmup_updates(recipe.train, run.total))
    alarms.restore(start.lines)
    volume_ids = run.dataset.volume_ids_of_update
    with (
        open_logger(run.out, recipe, runtime.rank, keep_until=start.update) as logger,
        stop_request() as request,
        CheckpointWriter() as writer,
        bar("pretrain", run.total, "update", start.update) as progress,
        MetricsBuffer(logger, guard, alarms, progress, volume_ids, start.skipped, runtime) as metrics,
    ):
        trainer = Trainer(run, guard, alarms, logger, request, writer, metrics)
        trainer.fit()
        result, centred = trainer.final_validation()
        runtime.run_on_rank_zero(writer.wait)

    def summarise() -> RunSummary:
        from octjepa.train.summary import RunSummary, validation_summary

        relative_dir, validated = recipe.checkpoint.dir, validation_summary(result)
        summary = RunSummary(
            loss=validated.loss,
            cosine=validated.cosine,
            baseline_cosine=validated.baseline_cosine,
            baseline_loss=validated.baseline_loss,
            **trainer.throughput.summary(),
            updates=run.total,
            validated_on=run.validated_on,
            centred=validation_summary(centred),
            rankme=result["rankme"],
            encoder=trainer.encoder,
            volumes=len(run.training_ids),
            unreadable_volumes=trainer.unreadable.count,
            skipped_updates=metrics.skipped,
            alarms=alarms.tripped,
            best=best_checkpoint(run.checkpoint_dir),
            checkpoint=None if relative_dir is None else f"{relative_dir.rstrip('/')}/step-{run.total:08d}",
        )
        summary.write(run.out)
        return summary

    return runtime.run_on_rank_zero(summarise)


def _finished_summary(out: Path) -> RunSummary | None:
    """The summary of a run that has ended before; None while it is not finished."""
    from octjepa.train.summary import read_summary  # as above: only the end of a run needs it

    return read_summary(out) if is_finished(out) else None


class Trainer:
    """The loop, and what it does at some updates. Every rank takes every branch alike."""

    def __init__(
        self,
        run: Run,
        guard: SpikeGuard,
        alarms: CollapseAlarms,
        logger: RunLogger,
        request: StopRequest,
        writer: CheckpointWriter,
        metrics: MetricsBuffer,
    ) -> None:
        self.run, self.guard, self.alarms, self.logger = run, guard, alarms, logger
        self.request, self.writer, self.metrics = request, writer, metrics
        recipe, start = run.recipe, run.start
        self.monitor_set: MonitorSet | None = None
        if recipe.monitor.every_updates is not None:
            self.monitor_set = MonitorSet.choose(
                run.store, recipe, run.validation_ids or run.training_ids, recipe.monitor.volumes
            )
        self.frozen_target = FrozenTargetCheck(run.model)
        self.throughput = ThroughputMeter(recipe.train.global_batch)
        self.unreadable = UnreadableVolumes(run.out, len(run.training_ids), start.lines)
        run.dataset.unreadable = self.unreadable.names  # a line about a skipped update names what was in its batch
        self.micro_batcher = MicroBatcher(run.runtime, run.micro_batch, PretrainingMemory(recipe))
        # the encoder that a checkpoint of now would be loaded as
        self.encoder = "student" if recipe.exported_encoder == "student" else "target"
        for line in start.lines:
            self.choose_encoder({name.removeprefix("monitor/"): value for name, value in line.items()})
        self.saved = start.update  # last update whose checkpoint is written or being written

    def fit(self) -> None:
        """Takes all updates that are left. Raises as `pretrain`."""
        run, recipe, runtime, metrics = self.run, self.run.recipe, self.run.runtime, self.metrics
        model, optimizer = run.model, run.optimizer
        update = first = run.start.update
        batches, batch = run.batches_from(update), None
        while update < run.total:
            # Next batch. A rank without a batch repeats its previous batch and discards the gradients, because the
            # other ranks wait for it.
            batch, failure = self.next_batch(batches, batch, update)
            if update == first or update % LEAK_CHECK_EVERY == 0:
                check_leak(model, batch)

            # Forward and backward, in micro-batches that fit into the memory of every rank; flags of all ranks.
            step = partial(accumulate, model, batch, recipe_at_update(recipe, update, run.total), runtime, update)
            agree = partial(self.sync_flags, batch, failure is not None)
            values, flags = self.micro_batcher.run([model], step, agree, update)
            if values is None or flags.without_batch:
                self.end_without_batch(update, failure)

            # Optimizer step, unless the gradient is not finite or a spike; EMA target.
            rate = learning_rate(update, run.total, recipe.train)
            ema_momentum = momentum(update, run.total, recipe.objective)
            set_learning_rate(optimizer, rate)
            values = take_step(model, optimizer, values, runtime, recipe.train.clip_norm, self.guard.limit(update))
            update_target(model.target_encoder, model.context_encoder, ema_momentum, values["healthy"])

            # Log: the metrics of this update are on their way, those of the update before are written.
            metrics.push(update, [values], self.metrics_line(update, rate, ema_momentum, flags, batch))
            if update % LEAK_CHECK_EVERY <= FROZEN_AFTER or update - first <= FROZEN_AFTER:
                self.frozen_target.check(model, ema_momentum)
            done = update + 1
            save = _due(recipe.checkpoint.every_updates, done) or done == run.total or flags.stop_signal > 0
            monitor = self.monitor_set is not None and (
                _due(recipe.monitor.every_updates, done) or (save and run.checkpoint_dir is not None)
            )
            validate = _due(recipe.validation.every_updates, done) and done < run.total
            if save or monitor or validate:
                metrics.flush()
            if metrics.must_go_back:
                update = self.go_back(done)
                batches = run.batches_from(update)
                continue

            # Monitor and validation.
            score = None
            if monitor:
                score, alarm = self.monitor(done)
                save = save or alarm  # the run as it was at the alarm
            if validate:
                self.logger.write(done, _prefixed(run.validated_on, run.validate()))

            # Checkpoint.
            if flags.write_failed:
                runtime.run_on_rank_zero(self.writer.wait)  # raises the error of the write
            if save:
                self.save(done, score)
            if flags.stop_signal and done < run.total:
                runtime.run_on_rank_zero(self.writer.wait)  # a launcher kills the others soon after one has ended
                raise Interrupted(self.how_to_continue(done), flags.stop_signal)
            update = done

    def next_batch(
        self, batches: Iterator[Batch], before: Batch | None, update: int
    ) -> tuple[Batch, OctjepaError | None]:
        """(this rank's batch, None), or (the batch before, why there is no next one)."""
        try:
            with self.throughput.waiting():
                batch = next(batches)
            self.logger.show(update + 1, batch)
        except OctjepaError as error:
            if before is None:
                raise
            return before, error
        return batch, None

    def sync_flags(self, batch: Batch, without_batch: bool, out_of_memory: bool) -> StepFlags:
        """Facts that all ranks need before the step."""
        return sync_flags(
            self.run.runtime,
            signal_number=self.request.signal_number,
            out_of_memory=out_of_memory,
            unreadable=len(batch.unreadable),
            write_failed=self.writer.failed,
            retried=batch.read_retries,
            without_batch=without_batch,
        )

    def metrics_line(
        self, update: int, rate: float, ema_momentum: float, flags: StepFlags, batch: Batch
    ) -> dict[str, Any]:
        """The line of metrics.jsonl for an update, except for the metrics of its step."""
        epoch = (update + 1) * self.run.recipe.train.global_batch / len(self.run.training_ids)
        line: dict[str, Any] = {
            "train/lr": rate,
            "train/ema_momentum": ema_momentum,
            "epoch": epoch,
            "train/epoch": epoch,
        }
        line |= self.throughput.lap() | self.run.runtime.memory() | self.run.runtime.utilisation()
        if (idle := self.throughput.slow_reading()) is not None and self.run.is_writer:
            _log.warning("%s", slow_reading_message(idle, self.run.store.location, self.run.loader_workers))
        if flags.unreadable:
            line["unread"] = self.unreadable.record(batch.unreadable, self.run.runtime)
        if flags.retried:
            line["retried"] = flags.retried
        return line

    def monitor(self, done: int) -> tuple[float | None, bool]:
        """Logs the monitor's metrics and alarms. Returns the score of the online probe (None in warm-up) and whether
        there is an alarm."""
        assert self.monitor_set is not None
        run = self.run
        values = run.runtime.broadcast_object(run_monitor(run.model, run.runtime, self.monitor_set, done))
        alarms = self.alarms.check(values, done)
        self.logger.write(done, _prefixed("monitor", values) | ({"alarms": alarms} if alarms else {}))
        score = self.choose_encoder(values)
        for name, message in alarms.items():
            _log.warning("alarm %s at update %d: %s", name, done, message)
        return (score if done > self.alarms.warmup else None), bool(alarms)

    def choose_encoder(self, values: Mapping[str, Any]) -> float | None:
        """The online probe's accuracy of the exported encoder, which is the better one where validation chooses."""
        names = {"target": "layer_accuracy", "student": "layer_accuracy_student"}
        scores = {encoder: values[name] for encoder, name in names.items() if name in values}
        if self.run.recipe.exported_encoder == "validation" and len(scores) == len(names):
            self.encoder = max(scores, key=lambda encoder: scores[encoder])  # the target if they are equal
        return scores.get(self.encoder)

    def save(self, done: int, score: float | None = None) -> None:
        """Starts writing a checkpoint of update `done` in the background."""
        run = self.run
        self.saved = done
        if run.checkpoint_dir is None:
            return
        tensors = snapshot(run.model, run.optimizer, run.runtime)
        run.runtime.run_on_rank_zero(self.writer.wait)  # for the checkpoint before; every rank waits for rank 0
        if run.is_writer:
            seen = [*run.training_ids, *run.start.inherited]
            record = Record(run.recipe, self.metrics.skipped, seen, score, self.encoder)
            prune = not self.guard.skipped  # the run may have to go back to before the skipped updates
            destination = run.out, run.checkpoint_dir
            self.writer.start(partial(write_checkpoint, *destination, done, tensors, record, self.logger, prune))

    def go_back(self, done: int) -> int:
        """Too many updates in a row were skipped: loads the checkpoint before them, excludes their volumes, and returns
        the update it is of."""
        run, runtime = self.run, self.run.runtime
        runtime.run_on_rank_zero(self.writer.wait)
        volumes = {update: run.dataset.volume_ids_of_update(update) for update in self.guard.skipped}
        start = go_back(
            run.out, run.checkpoint_dir, run.model, run.optimizer, run.recipe, runtime, volumes, len(run.training_ids)
        )
        self.logger.go_back(start.update, {"left_out": list(start.excluded), "returned_from": done})
        self.metrics.go_back(start.skipped)
        self.saved = start.update
        if runtime.sharded:
            raise OctjepaError(
                f"{SKIPPED_IN_A_ROW} updates in a row were skipped; continue from update {start.update} by --resume"
            )
        run.dataset.exclude(start.excluded)
        self.guard.restore(start.lines)
        self.alarms.restore(start.lines)
        return start.update

    def end_without_batch(self, update: int, failure: OctjepaError | None) -> NoReturn:
        """Some rank has no batch: no rank takes `update`, and the run ends with a checkpoint and the cause."""
        runtime = self.run.runtime
        causes = runtime.all_gather([] if failure is None else [str(failure)])
        self.metrics.flush()
        if update > self.saved and not self.metrics.must_go_back:
            self.save(update)
        try:
            runtime.run_on_rank_zero(self.writer.wait)
        except OctjepaError as error:  # a machine that lets nothing be read may let nothing be written
            raise OctjepaError(f"{causes[0]}; then {error}") from None
        raise OctjepaError(f"{causes[0]}; {self.how_to_continue(update)}")

    def how_to_continue(self, update: int) -> str:
        """The message of a run that stops after `update`."""
        if self.run.checkpoint_dir is None:
            checkpoint = "nothing is kept of it, for checkpoint.dir is null"
        elif self.saved == update:
            checkpoint = "its checkpoint is written. Continue with --resume."
        else:
            checkpoint = "continue with --resume, from the checkpoint before."
        return f"stopped after update {update} of {self.run.total}; {checkpoint}"

    def final_validation(self) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics on fixed samples: with the views as trained on, and with centred views."""
        run = self.run
        result, centred = run.validate(), run.validate(without_augmentation(run.recipe))
        name = run.validated_on
        # a run may have been killed after this line and before its summary
        if not any(f"{name}_centred/loss" in line for line in run.start.lines):
            self.logger.write(run.total, _prefixed(name, result) | _prefixed(f"{name}_centred", centred))
        return result, centred


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{key}": value for key, value in values.items()}
