"""The training loop, from top to bottom: read a batch, forward, backward, agree, step, EMA, log, save.

Everything random comes from the update number, so a run that goes on from a checkpoint computes what the
uninterrupted one would have, bit for bit in fp32 on one machine.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octjepa.checkpoint import folder, state
from octjepa.checkpoint.place import Place, name_of, place_of
from octjepa.checkpoint.warm_start import warm_start
from octjepa.errors import OctjepaError, UsageError
from octjepa.model import VJEPA3D
from octjepa.objective.ema import momentum, update_target
from octjepa.objective.losses import cosine
from octjepa.objective.total import token_steps, training_loss
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.disk import only_writer, write_json
from octjepa.train.alarms import LEAK_CHECK_EVERY, TargetWatch, check_detached, check_leak
from octjepa.train.cohort import choose_cohort
from octjepa.train.health import Health
from octjepa.train.monitor import Audit, measure
from octjepa.train.optimiser import build_optimiser, set_learning_rate
from octjepa.train.pace import Pace
from octjepa.train.preflight import batch_shares, check_compiler
from octjepa.train.run_folder import SUMMARY, check_data, open_run, reached_update, read_summary
from octjepa.train.runtime import Runtime
from octjepa.train.schedule import learning_rate, lr_curve, total_updates, warmup_updates
from octjepa.train.signals import Interrupted, StopRequest, stop_request
from octjepa.train.tracking import open_record
from octjepa.train.validate import learn_means, validate
from octjepa.views.loader import Batch, FixedSamples, fixed_batches, training_batches

_SKIPS_IN_A_ROW = 10
_TEACHERS = 4  # times as many training volumes teach the trivial predictors as judge them
_log = logging.getLogger(__name__)


def pretrain(recipe: Recipe, store: Store, out: Path, resume: bool = False) -> dict[str, Any]:
    """Runs or resumes `recipe` on `store`'s training people into the run folder `out`; returns its summary.

    Raises UsageError (no data, a run in the way), ContractError (store made otherwise), CheckpointError (resume failed,
    disk full), PretextAlarm (the task is broken) and Interrupted (a signal came; a checkpoint was written).
    """
    runtime = Runtime(recipe.train.precision)
    runtime.check_alone()
    batch_shares(recipe, runtime.world)
    cohort, stream = choose_cohort(store, recipe)
    ids, held_out = cohort.train.volume_ids, cohort.val.volume_ids
    judged_on = "val" if held_out else "train_fixed"
    if not held_out:
        _log.warning(
            "%s holds nobody of split val: the figures of this run are of the training volumes", store.location
        )
    total = total_updates(recipe.train, len(ids))
    lr_curve(recipe.train, total)
    saves = None if recipe.checkpoint.dir is None else place_of(recipe.checkpoint.dir, within=out)
    open_run(out, saves, recipe, store, ids, runtime, resume, cohort.about())
    cohort.tell()
    torch.manual_seed(recipe.train.seed)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimiser = build_optimiser(model, recipe.train)
    first, skipped = _resume(saves, out, store, ids, model, optimiser, recipe) if resume else (0, 0)
    if first == 0:  # a resumed run may have been stopped before its first checkpoint
        warm_start(model, recipe)
    if recipe.machine.compile:
        check_compiler(runtime.device)
        model.compile_blocks()
    if first == total and (finished := read_summary(out)) is not None:
        return finished

    judge = partial(_validation, model, runtime, store, ids, held_out or ids)
    batches = training_batches(stream, first, total, recipe.machine.loader_workers)
    watch, pace, skips_in_a_row = TargetWatch(model), Pace(recipe.train.global_batch), 0
    health = Health(recipe.objective.name, warmup_updates(recipe.train, total))
    monitor = recipe.monitor
    audit = Audit.choose(store, recipe, held_out or ids, monitor.volumes) if monitor.every_updates else None
    with (
        only_writer(out),
        open_record(out, recipe, runtime.rank, keep_until=first) as journal,
        stop_request() as request,
        bar("pretrain", total, "update", first) as progress,
    ):
        for update in range(first, total):
            with pace.waiting():
                batch = next(batches)
            journal.show(update + 1, batch)
            if update == first or update % LEAK_CHECK_EVERY == 0:
                check_leak(model, batch)

            rate = learning_rate(update, total, recipe.train)
            m = momentum(update, total, recipe.objective.ema_base, recipe.objective.ema_final)
            set_learning_rate(optimiser, rate)
            measured = accumulate(model, batch, recipe, runtime, update)
            clip = recipe.train.clip_norm or math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))  # read before zeroing
            healthy = math.isfinite(norm) and math.isfinite(measured["train/loss"])
            if healthy:
                optimiser.step()
                update_target(model.target_encoder, model.context_encoder, m)
                watch.check(model, m)
            optimiser.zero_grad(set_to_none=True)

            done = update + 1
            skipped, skips_in_a_row = (skipped, 0) if healthy else (skipped + 1, skips_in_a_row + 1)
            line = {**measured, "train/lr": rate, "train/grad_norm": norm, "train/ema_momentum": m}
            line |= pace.lap() | runtime.memory()
            line["epoch"] = line["train/epoch"] = done * recipe.train.global_batch / len(ids)
            journal.write(done, line if healthy else {**line, "skipped": list(batch.volume_ids)})
            progress.advance()
            progress.say(f"loss {measured['train/loss']:.3f} cosine {measured['train/cosine']:.3f}")

            health.follow(measured.get("train/loss_hidden", measured["train/loss"]))
            _stop_if_hopeless(skips_in_a_row, done)
            saving = _due(recipe.checkpoint.every_updates, done) or done == total or bool(request.signal_number)
            score = None
            if audit and (_due(monitor.every_updates, done) or (saving and saves)):
                figures = measure(model, runtime, audit, done)
                alarms = health.judge(figures, done)
                journal.write(done, _prefixed("monitor", figures) | ({"alarms": alarms} if alarms else {}))
                for name, message in alarms.items():
                    _log.warning("alarm %s at update %d: %s", name, done, message)
                score = figures["layer_accuracy"] if done > health.warm else None
                saving = saving or bool(alarms)  # a snapshot of the run as it was
            if _due(recipe.validation.every_updates, done) and done < total:
                journal.write(done, _prefixed(judged_on, judge(recipe)))
            if saves and saving:
                state.save(saves, done, model, optimiser, recipe, skipped, ids, score)
                folder.prune(saves, recipe.checkpoint.keep_last)
            _stop_if_asked(request, saves, done, total)
        result, centred = judge(recipe), judge(without_chance(recipe))
        journal.write(total, _prefixed(judged_on, result) | _prefixed(f"{judged_on}_centred", centred))

    summary = {
        "updates": total,
        "judged_on": judged_on,
        **_figures(result),
        "centred": _figures(centred),
        "rankme": result["rankme"],
        "volumes": len(ids),
        **pace.summary(),
        "skipped_updates": skipped,
        "alarms": health.tripped,
        "best": None if saves is None or (found := folder.best(saves)) is None else name_of(found),
        "checkpoint": None
        if recipe.checkpoint.dir is None
        else f"{recipe.checkpoint.dir.rstrip('/')}/step-{total:08d}",
    }
    write_json(out / SUMMARY, summary)
    return summary


def accumulate(model: VJEPA3D, batch: Batch, recipe: Recipe, runtime: Runtime, update: int = 0) -> dict[str, float]:
    """Gradients of the whole batch's mean loss, in micro-batches; returns that loss, its parts and the cosine.

    Each part counts by its share of the batch, so 1x32, 2x16 and 4x8 give the same update.
    """
    size = len(batch.volume_ids)
    step = min(recipe.machine.micro_batch or size, size)
    sums: dict[str, float] = {}
    for start in range(0, size, step):
        part = batch.part(start, start + step)
        share = len(part.volume_ids) / size
        inputs = part.inputs(runtime.device)
        with runtime.compute():
            outcome = model.predict(*inputs)
        check_detached(outcome)
        steps = token_steps(part.grid_index.to(runtime.device), recipe.grid)
        loss, parts = training_loss(recipe.objective, outcome, steps, *inputs[3:], update)
        (loss * share).backward()
        shown = {"train/loss": loss.detach(), "train/cosine": cosine(outcome.predicted.detach(), outcome.target)}
        if len(parts) > 1:
            shown |= {f"train/loss_{name}": value for name, value in parts.items()}
        for name, value in shown.items():
            sums[name] = sums.get(name, 0.0) + float(value) * share
    return sums


def _validation(
    model: VJEPA3D, runtime: Runtime, store: Store, train_ids: list[str], judges: list[str], recipe: Recipe
) -> dict[str, float]:
    """Fixed samples of training people teach the trivial predictors; those of `judges`, held-out people, judge all."""
    limit = recipe.validation.max_samples
    batch = recipe.machine.micro_batch or recipe.train.global_batch
    known = FixedSamples(store, recipe, train_ids[: limit and _TEACHERS * limit])
    means = learn_means(model, runtime, fixed_batches(known, batch), recipe.grid_tokens)
    samples = FixedSamples(store, recipe, judges[:limit])
    return validate(model, runtime, fixed_batches(samples, batch), means, recipe.grid)


def without_chance(recipe: Recipe) -> Recipe:
    """The recipe with every view centred: there the mean of a place knows most, and is hardest to beat."""
    still = {"crop": False, "flip_slow": 0.0, "flip_fast": 0.0, "rotation_degrees": 0.0, "zoom": 0.0}
    return recipe.model_copy(update={"views": recipe.views.model_copy(update=still)})


def _resume(
    saves: Place | None,
    out: Path,
    store: Store,
    ids: list[str],
    model: VJEPA3D,
    optimiser: torch.optim.AdamW,
    recipe: Recipe,
) -> tuple[int, int]:
    if saves is None:
        raise UsageError("checkpoint.dir is null, so this run wrote no checkpoint and cannot be resumed")
    check_data(out, store, ids)
    found = folder.list_folders(saves)
    if found:
        return state.load(found[-1], model, optimiser, recipe)
    reached, every = reached_update(out), recipe.checkpoint.every_updates
    if every is not None and reached >= every:
        raise UsageError(
            f"{out} reached update {reached}, but {saves} holds no checkpoint: they were removed. Bring them back, or "
            "start the run anew with another --out"
        )
    _log.warning("%s was stopped before its first checkpoint was due: it starts at its first update", out)
    return 0, 0


def _stop_if_hopeless(skips_in_a_row: int, done: int) -> None:
    if skips_in_a_row >= _SKIPS_IN_A_ROW:
        raise OctjepaError(
            f"{skips_in_a_row} updates in a row gave no finite loss or gradient (the last: {done}). Start anew with a "
            "lower train.base_lr or with train.precision=fp32; metrics.jsonl names the volumes of each skipped update."
        )


def _stop_if_asked(request: StopRequest, saves: Place | None, done: int, total: int) -> None:
    if request.signal_number and done < total:
        kept = "no checkpoint (checkpoint.dir is null)" if saves is None else "its checkpoint is written"
        raise Interrupted(
            f"stopped after update {done} of {total}; {kept}. Go on with --resume.", request.signal_number
        )


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{key}": value for key, value in values.items()}


def _figures(result: dict[str, float]) -> dict[str, Any]:
    return {
        "loss": result["loss"],
        "cosine": result["cosine"],
        "baseline_cosine": _named(result, "baseline/"),
        "baseline_loss": _named(result, "baseline_loss/"),
    }


def _named(values: dict[str, float], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
