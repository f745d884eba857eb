"""The training loop, from top to bottom: read a batch, forward, backward, agree, step, EMA, log, save.

Everything random comes from the update number, so a run that goes on from a checkpoint computes what the
uninterrupted one would have, bit for bit in fp32 on one machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octjepa.checkpoint import folder, state
from octjepa.checkpoint.place import Place, name_of, place_of
from octjepa.errors import OctjepaError
from octjepa.model import VJEPA3D
from octjepa.objective.ema import momentum
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.disk import only_writer, write_json
from octjepa.train.agreement import agree
from octjepa.train.alarms import FROZEN_AFTER, LEAK_CHECK_EVERY, TargetWatch, check_leak
from octjepa.train.cohort import choose_cohort
from octjepa.train.guard import IN_A_ROW, Guard
from octjepa.train.health import Health
from octjepa.train.memory import Fitting
from octjepa.train.monitor import Audit, measure
from octjepa.train.optimiser import build_optimiser, set_learning_rate
from octjepa.train.pace import Pace
from octjepa.train.preflight import batch_shares, check_compiler, check_same_run
from octjepa.train.run_folder import SUMMARY, chunks_hash, data_hash, open_run, read_summary
from octjepa.train.runtime import Runtime, joined
from octjepa.train.saver import Saver, write_checkpoint
from octjepa.train.schedule import learning_rate, lr_curve, total_updates, warmup_updates
from octjepa.train.signals import Interrupted, stop_request
from octjepa.train.start import go_back, start_from
from octjepa.train.tracking import open_record
from octjepa.train.trail import Trail
from octjepa.train.unread import Unread
from octjepa.train.update import take_step
from octjepa.train.validate import figures_of, judge, without_chance
from octjepa.views.loader import Batch, training_batches
from octjepa.views.workers import deaths_told

_log = logging.getLogger(__name__)


def pretrain(recipe: Recipe, store: Store, out: Path, resume: bool = False) -> dict[str, Any]:
    """Runs or resumes `recipe` on `store`'s training people into the run folder `out`; returns its summary.

    Under torchrun every process calls it alike: rank 0 writes and tracks, all return the same. Raises UsageError (no
    data, a run in the way), ContractError (store made otherwise), CheckpointError (resume failed, disk full),
    PretextAlarm (the task is broken) and Interrupted (a signal came; a checkpoint was written).
    """
    with deaths_told(), joined(recipe.train.precision) as runtime:
        return _pretrain(recipe, store, out, resume, runtime)


def _pretrain(recipe: Recipe, store: Store, out: Path, resume: bool, runtime: Runtime) -> dict[str, Any]:
    writes = runtime.rank == 0
    shares = batch_shares(recipe, runtime.world)
    cohort, stream = choose_cohort(store, recipe)
    ids, held_out = cohort.train.volume_ids, cohort.val.volume_ids
    seen = data_hash(store, ids), data_hash(store, held_out), chunks_hash(store, ids, recipe)
    check_same_run(runtime, recipe, "-".join(one[:8] for one in seen))
    judged_on = "val" if held_out else "train_fixed"
    total = total_updates(recipe.train, len(ids))
    lr_curve(recipe.train, total)
    saves = None if recipe.checkpoint.dir is None else place_of(recipe.checkpoint.dir, within=out)
    runtime.first(lambda: open_run(out, saves, recipe, store, ids, runtime, resume, cohort.about()))
    if writes:
        cohort.tell()
    if writes and not held_out:
        _log.warning(
            "%s holds nobody of split val: the figures of this run are of the training volumes", store.location
        )
    torch.manual_seed(recipe.train.seed)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimiser = build_optimiser(model, recipe.train)
    start = start_from(out, saves, store, ids, model, optimiser, recipe, runtime, resume)
    first = start.update
    if first == total and (finished := runtime.told(read_summary(out) if writes else None)) is not None:
        return dict(finished)
    if recipe.machine.parallel == "sharded" and runtime.world > 1:
        from octjepa.train.sharding import shard  # half a second that few runs need

        model, optimiser = shard(model, optimiser, recipe, runtime)
        runtime.sharded = True
    if recipe.machine.compile:
        check_compiler(runtime.device)
        model.compile_blocks()

    judged = partial(judge, model, runtime, store, ids, held_out or ids)
    guard = Guard(recipe.train.spike_factor)
    guard.recall(start.lines)
    stream.leave_out(start.left_out)
    health = Health(recipe.objective.name, warmup_updates(recipe.train, total))
    health.recall(start.lines)
    every = recipe.monitor.every_updates
    audit = Audit.choose(store, recipe, held_out or ids, recipe.monitor.volumes) if every else None
    watch, pace, unread = TargetWatch(model), Pace(recipe.train.global_batch), Unread(out, len(ids), start.lines)
    fitting = Fitting(recipe, runtime, shares.micro)
    saved = first

    def batches_from(update: int) -> Iterator[Batch]:
        return training_batches(stream, update, total, recipe.machine.loader_workers, runtime.rank, runtime.world)

    with (
        only_writer(out) if writes else nullcontext(),
        open_record(out, recipe, runtime.rank, keep_until=first) as journal,
        stop_request() as request,
        Saver() as saver,
        bar("pretrain", total, "update", first) as progress,
        Trail(journal, guard, health, progress, stream.names_of_update, start.skipped, runtime) as trail,
    ):

        def save(done: int, score: float | None = None) -> None:
            nonlocal saved
            saved = done
            if saves is None or not (writes or runtime.sharded):
                return
            tensors = state.snapshot(model, optimiser)
            if writes:
                prune = not guard.row  # the run may have to return to before a row of unfit updates
                about = (recipe, trail.skipped, ids, score, journal, prune)
                saver.start(partial(write_checkpoint, out, saves, done, tensors, *about))

        batch: Batch | None = None
        update, batches = first, batches_from(first)
        while update < total:
            missing: OctjepaError | None = None
            try:
                with pace.waiting():
                    batch = next(batches)
                journal.show(update + 1, batch)
            except OctjepaError as error:
                if batch is None:
                    raise
                missing = error  # ranks may wait for this one's part: the batch before takes its place, in vain
            if update == first or update % LEAK_CHECK_EVERY == 0:
                check_leak(model, batch)

            while True:  # until the share of every rank fits into its memory
                figures = fitting.try_batch(model, batch, update)
                word = agree(
                    runtime, figures is None, len(batch.unread), request.signal_number, saver.failed, batch.retried,
                    missing is not None,
                )  # fmt: skip
                if word.without or (figures is not None and not word.memory):
                    break
                fitting.halve(model, update)

            if word.without:  # on some rank: this update is taken by none
                causes = runtime.gather([] if missing is None else [str(missing)])
                trail.settle()
                if update > saved and not trail.lost:
                    save(update)
                try:
                    runtime.first(saver.wait)
                except OctjepaError as error:  # a machine that lets nothing be read may let nothing be written
                    raise OctjepaError(f"{causes[0]}; then {error}") from None
                raise OctjepaError(f"{causes[0]}; {_ended(update, total, saves, saved)}")

            assert figures is not None
            rate = learning_rate(update, total, recipe.train)
            m = momentum(update, total, recipe.objective.ema_base, recipe.objective.ema_final)
            set_learning_rate(optimiser, rate)
            figures = take_step(model, optimiser, figures, runtime, m, recipe.train.clip_norm, guard.limit(update))
            done = update + 1
            epoch = done * recipe.train.global_batch / len(ids)
            line: dict[str, Any] = {"train/lr": rate, "train/ema_momentum": m, "epoch": epoch, "train/epoch": epoch}
            line |= pace.lap() | runtime.memory() | runtime.utilisation()
            if word.unread:
                line["unread"] = unread.note(batch.unread, runtime)
            if word.retried:
                line["retried"] = word.retried
            trail.push(update, figures, line)
            if update % LEAK_CHECK_EVERY <= FROZEN_AFTER or update - first <= FROZEN_AFTER:
                watch.check(model, m)

            saving = _due(recipe.checkpoint.every_updates, done) or done == total or word.stop > 0
            looking = audit is not None and (_due(every, done) or (saving and saves is not None))
            judging = _due(recipe.validation.every_updates, done) and done < total
            if saving or looking or judging:
                trail.settle()
            if trail.lost:
                runtime.first(saver.wait)
                start = go_back(out, saves, model, optimiser, recipe, runtime, trail.unfit())
                journal.return_to(start.update, {"left_out": list(start.left_out), "returned_from": done})
                trail.return_to(start.skipped)
                saved = start.update
                if runtime.sharded:
                    raise OctjepaError(
                        f"{IN_A_ROW} unfit updates in a row; go on from update {start.update} by --resume"
                    )
                stream.leave_out(start.left_out)
                guard.recall(start.lines)
                health.recall(start.lines)
                update, batches = start.update, batches_from(start.update)
                continue

            score = None
            if audit is not None and looking:
                seen = runtime.told(measure(model, runtime, audit, done))  # one judgement for all
                alarms = health.judge(seen, done)
                journal.write(done, _prefixed("monitor", seen) | ({"alarms": alarms} if alarms else {}))
                for name, message in alarms.items():
                    _log.warning("alarm %s at update %d: %s", name, done, message)
                score = seen["layer_accuracy"] if done > health.warm else None
                saving = saving or bool(alarms)  # a snapshot of the run as it was
            if judging:
                journal.write(done, _prefixed(judged_on, judged(recipe)))
            if word.unsaved:
                runtime.first(saver.wait)  # raises what the write ran into
            if saving:
                save(done, score)
            if word.stop and done < total:
                runtime.first(saver.wait)  # a launcher kills the others soon after one has ended
                raise Interrupted(_ended(done, total, saves, saved), word.stop)
            update = done
        result, centred = judged(recipe), judged(without_chance(recipe))
        if not any(f"{judged_on}_centred/loss" in line for line in start.lines):  # a kill after it, before the summary
            journal.write(total, _prefixed(judged_on, result) | _prefixed(f"{judged_on}_centred", centred))

    if not writes:
        return dict(runtime.told(None))
    summary = {
        "updates": total,
        "judged_on": judged_on,
        **figures_of(result),
        "centred": figures_of(centred),
        "rankme": result["rankme"],
        "volumes": len(ids),
        **pace.summary(),
        "skipped_updates": trail.skipped,
        "alarms": health.tripped,
        "best": None if saves is None or (found := folder.best(saves)) is None else name_of(found),
        "checkpoint": None
        if recipe.checkpoint.dir is None
        else f"{recipe.checkpoint.dir.rstrip('/')}/step-{total:08d}",
    }
    write_json(out / SUMMARY, summary)
    return dict(runtime.told(summary))


def _ended(update: int, total: int, saves: Place | None, saved: int) -> str:
    if saves is None:
        kept = "nothing is kept of it, for checkpoint.dir is null"
    elif saved == update:
        kept = "its checkpoint is written. Go on with --resume."
    else:
        kept = "go on with --resume, from the checkpoint before."
    return f"stopped after update {update} of {total}; {kept}"


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{key}": value for key, value in values.items()}
