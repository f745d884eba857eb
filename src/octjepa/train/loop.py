"""The training loop, from top to bottom: read a batch, forward, backward, agree, step, EMA, log, look, save.

Everything random comes from the update number, so a run that goes on from a checkpoint computes what the
uninterrupted one would have, bit for bit in fp32 on one machine.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from octjepa.checkpoint import folder, state
from octjepa.checkpoint.location import location_name
from octjepa.distributed.flags import StepFlags, sync_flags
from octjepa.distributed.runtime import distributed_context
from octjepa.distributed.signals import Interrupted, StopRequest, stop_request
from octjepa.errors import OctjepaError
from octjepa.files import write_json, writer_lock
from octjepa.objective.ema import momentum
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.alarms import FROZEN_AFTER, LEAK_CHECK_EVERY, TargetWatch, check_leak
from octjepa.train.health import Health
from octjepa.train.metrics_buffer import Trail
from octjepa.train.micro_batch import Fitting
from octjepa.train.monitor import Audit, measure
from octjepa.train.optimizer import set_learning_rate
from octjepa.train.resume import go_back
from octjepa.train.run_folder import SUMMARY, read_summary
from octjepa.train.saver import Saver, write_checkpoint
from octjepa.train.schedule import learning_rate, warmup_updates
from octjepa.train.setup import Run, prepare
from octjepa.train.spike_guard import IN_A_ROW, Guard
from octjepa.train.step import Figures, take_step
from octjepa.train.throughput import Pace
from octjepa.train.tracking import Record, open_record
from octjepa.train.unreadable import Unread
from octjepa.train.validate import figures_of, without_chance
from octjepa.views.loader import Batch
from octjepa.views.workers import translate_worker_errors

_log = logging.getLogger(__name__)


def pretrain(recipe: Recipe, store: Store, out: Path, resume: bool = False) -> dict[str, Any]:
    """Runs or resumes `recipe` on `store`'s training people into the run folder `out`; returns its summary.

    Under torchrun every process calls it alike: rank 0 writes and tracks, all return the same. Raises UsageError (no
    data, a run in the way), ContractError (store made otherwise), CheckpointError (resume failed, disk full),
    PretextAlarm (the task is broken) and Interrupted (a signal came; a checkpoint was written).
    """
    with translate_worker_errors(), distributed_context(recipe.train.precision) as runtime:
        run = prepare(recipe, store, out, resume, runtime)
        if run.start.update == run.total:
            finished = runtime.broadcast_object(read_summary(out) if run.writes else None)
            if finished is not None:
                return dict(finished)
        run.shard_and_compile()
        return _train(run)


def _train(run: Run) -> dict[str, Any]:
    """All updates that are left, the last judgement, the summary."""
    recipe, start = run.recipe, run.start
    guard = Guard(recipe.train.spike_factor)
    guard.recall(start.lines)
    health = Health(recipe.objective.name, warmup_updates(recipe.train, run.total))
    health.recall(start.lines)
    with (
        writer_lock(run.out) if run.writes else nullcontext(),
        open_record(run.out, recipe, run.runtime.rank, keep_until=start.update) as journal,
        stop_request() as request,
        Saver() as saver,
        bar("pretrain", run.total, "update", start.update) as progress,
        Trail(journal, guard, health, progress, run.stream.volume_ids_of_update, start.skipped, run.runtime) as trail,
    ):
        training = _Training(run, guard, health, journal, request, saver, trail)
        training.loop()
        result, centred = training.last_judgement()
        run.runtime.run_on_rank_zero(saver.wait)

    if not run.writes:
        return dict(run.runtime.broadcast_object(None))
    summary = {
        "updates": run.total,
        "judged_on": run.judged_on,
        **figures_of(result),
        "centred": figures_of(centred),
        "rankme": result["rankme"],
        "volumes": len(run.ids),
        **training.pace.summary(),
        "skipped_updates": trail.skipped,
        "alarms": health.tripped,
        "best": None
        if run.saves is None or (found := folder.best_checkpoint(run.saves)) is None
        else location_name(found),
        "checkpoint": None
        if recipe.checkpoint.dir is None
        else f"{recipe.checkpoint.dir.rstrip('/')}/step-{run.total:08d}",
    }
    write_json(run.out / SUMMARY, summary)
    return dict(run.runtime.broadcast_object(summary))


class _Training:
    """The loop and what it does at some updates. Every rank takes every branch alike."""

    def __init__(
        self, run: Run, guard: Guard, health: Health, journal: Record, request: StopRequest, saver: Saver, trail: Trail
    ) -> None:
        self.run, self.guard, self.health, self.journal = run, guard, health, journal
        self.request, self.saver, self.trail = request, saver, trail
        recipe, start = run.recipe, run.start
        looks = recipe.monitor.every_updates is not None
        self.audit = Audit.choose(run.store, recipe, run.held_out or run.ids, recipe.monitor.volumes) if looks else None
        self.watch = TargetWatch(run.model)
        self.pace = Pace(recipe.train.global_batch)
        self.unread = Unread(run.out, len(run.ids), start.lines)
        self.fitting = Fitting(recipe, run.runtime, run.micro)
        self.saved = start.update  # the newest update of which there is a checkpoint, or will be

    def loop(self) -> None:
        run, recipe, trail, journal = self.run, self.run.recipe, self.trail, self.journal
        batch: Batch | None = None
        update = first = run.start.update
        batches = run.batches_from(update)
        while update < run.total:
            missing: OctjepaError | None = None
            try:
                with self.pace.waiting():
                    batch = next(batches)
                journal.show(update + 1, batch)
            except OctjepaError as error:
                if batch is None:
                    raise
                missing = error  # ranks may wait for this one's part: the batch before takes its place, in vain
            if update == first or update % LEAK_CHECK_EVERY == 0:
                check_leak(run.model, batch)
            figures, word = self.gradients(batch, update, missing is not None)
            if figures is None or word.without:
                self.end_without(update, missing)

            rate = learning_rate(update, run.total, recipe.train)
            m = momentum(update, run.total, recipe.objective.ema_base, recipe.objective.ema_final)
            set_learning_rate(run.optimizer, rate)
            clip, limit = recipe.train.clip_norm, self.guard.limit(update)
            figures = take_step(run.model, run.optimizer, figures, run.runtime, m, clip, limit)
            trail.push(update, figures, self.line(update, rate, m, word, batch))
            if update % LEAK_CHECK_EVERY <= FROZEN_AFTER or update - first <= FROZEN_AFTER:
                self.watch.check(run.model, m)

            done = update + 1
            saving = _due(recipe.checkpoint.every_updates, done) or done == run.total or word.stop > 0
            looking = self.audit is not None and (
                _due(recipe.monitor.every_updates, done) or (saving and run.saves is not None)
            )
            judging = _due(recipe.validation.every_updates, done) and done < run.total
            if saving or looking or judging:
                trail.settle()
            if trail.lost:
                update = self.go_back(done)
                batches = run.batches_from(update)
                continue
            score = None
            if looking:
                score, alarms = self.look(done)
                saving = saving or alarms  # a snapshot of the run as it was
            if judging:
                journal.write(done, _prefixed(run.judged_on, run.judged(recipe)))
            if word.unsaved:
                run.runtime.run_on_rank_zero(self.saver.wait)  # raises what the write ran into
            if saving:
                self.save(done, score)
            if word.stop and done < run.total:
                run.runtime.run_on_rank_zero(self.saver.wait)  # a launcher kills the others soon after one has ended
                raise Interrupted(self.ended(done), word.stop)
            update = done

    def gradients(self, batch: Batch, update: int, missing: bool) -> tuple[Figures | None, StepFlags]:
        """The gradients of the batch, in parts that fit into the memory of every rank, and what the ranks agreed on."""
        while True:
            figures = self.fitting.try_batch(self.run.model, batch, update)
            word = sync_flags(
                self.run.runtime, figures is None, len(batch.unreadable), self.request.signal_number, self.saver.failed,
                batch.read_retries, missing,
            )  # fmt: skip
            if word.without or (figures is not None and not word.memory):
                return figures, word
            self.fitting.halve(self.run.model, update)

    def line(self, update: int, rate: float, m: float, word: StepFlags, batch: Batch) -> dict[str, Any]:
        """What the journal says of an update beside the figures of its step."""
        epoch = (update + 1) * self.run.recipe.train.global_batch / len(self.run.ids)
        line: dict[str, Any] = {"train/lr": rate, "train/ema_momentum": m, "epoch": epoch, "train/epoch": epoch}
        line |= self.pace.lap() | self.run.runtime.memory() | self.run.runtime.utilisation()
        if word.unread:
            line["unread"] = self.unread.note(batch.unreadable, self.run.runtime)
        if word.retried:
            line["retried"] = word.retried
        return line

    def look(self, done: int) -> tuple[float | None, bool]:
        """The monitor's figures and alarms: (the online probe's score, None in warm-up; whether an alarm went off)."""
        assert self.audit is not None
        run = self.run
        seen = run.runtime.broadcast_object(measure(run.model, run.runtime, self.audit, done))  # one judgement for all
        alarms = self.health.judge(seen, done)
        self.journal.write(done, _prefixed("monitor", seen) | ({"alarms": alarms} if alarms else {}))
        for name, message in alarms.items():
            _log.warning("alarm %s at update %d: %s", name, done, message)
        return (seen["layer_accuracy"] if done > self.health.warm else None), bool(alarms)

    def save(self, done: int, score: float | None = None) -> None:
        """Starts a checkpoint of update `done`, to be written meanwhile."""
        run = self.run
        self.saved = done
        if run.saves is None:
            return
        tensors = state.snapshot(run.model, run.optimizer) if run.writes or run.runtime.sharded else {}
        run.runtime.run_on_rank_zero(self.saver.wait)  # for the one before: all ranks know what they wait for
        if run.writes:
            prune = not self.guard.row  # the run may have to return to before a row of unfit updates
            about = (run.recipe, self.trail.skipped, run.ids, score, self.journal, prune)
            self.saver.start(partial(write_checkpoint, run.out, run.saves, done, tensors, *about))

    def go_back(self, done: int) -> int:
        """Too many unfit updates in a row: the checkpoint before them, their volumes left out; the update it is of."""
        run, runtime = self.run, self.run.runtime
        runtime.run_on_rank_zero(self.saver.wait)
        unfit = self.trail.unfit()
        start = go_back(run.out, run.saves, run.model, run.optimizer, run.recipe, runtime, unfit)
        self.journal.return_to(start.update, {"left_out": list(start.left_out), "returned_from": done})
        self.trail.return_to(start.skipped)
        self.saved = start.update
        if runtime.sharded:
            raise OctjepaError(f"{IN_A_ROW} unfit updates in a row; go on from update {start.update} by --resume")
        run.stream.exclude(start.left_out)
        self.guard.recall(start.lines)
        self.health.recall(start.lines)
        return start.update

    def end_without(self, update: int, missing: OctjepaError | None) -> NoReturn:
        """Some rank has no batch: `update` is taken by none, and the run ends with a checkpoint and the cause."""
        runtime = self.run.runtime
        causes = runtime.all_gather([] if missing is None else [str(missing)])
        self.trail.settle()
        if update > self.saved and not self.trail.lost:
            self.save(update)
        try:
            runtime.run_on_rank_zero(self.saver.wait)
        except OctjepaError as error:  # a machine that lets nothing be read may let nothing be written
            raise OctjepaError(f"{causes[0]}; then {error}") from None
        raise OctjepaError(f"{causes[0]}; {self.ended(update)}")

    def ended(self, update: int) -> str:
        """How a run that stops after `update` goes on."""
        if self.run.saves is None:
            kept = "nothing is kept of it, for checkpoint.dir is null"
        elif self.saved == update:
            kept = "its checkpoint is written. Go on with --resume."
        else:
            kept = "go on with --resume, from the checkpoint before."
        return f"stopped after update {update} of {self.run.total}; {kept}"

    def last_judgement(self) -> tuple[dict[str, float], dict[str, float]]:
        """Figures on fixed samples as trained on, and with centred views."""
        run = self.run
        result, centred = run.judged(run.recipe), run.judged(without_chance(run.recipe))
        name = run.judged_on
        if not any(f"{name}_centred/loss" in line for line in run.start.lines):  # a kill after it, before the summary
            self.journal.write(run.total, _prefixed(name, result) | _prefixed(f"{name}_centred", centred))
        return result, centred


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{key}": value for key, value in values.items()}
