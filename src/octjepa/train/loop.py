"""The training loop, from top to bottom: read a batch, forward, backward, agree, step, EMA, log, save.

Everything random comes from the update number, so a run that goes on from a checkpoint computes what the
uninterrupted one would have, bit for bit in fp32 on one machine.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from octjepa.checkpoint import folder, state
from octjepa.errors import OctjepaError, UsageError
from octjepa.model import VJEPA3D
from octjepa.objective.ema import momentum, update_target
from octjepa.objective.losses import cosine, loss_of
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.alarms import LEAK_CHECK_EVERY, TargetWatch, check_detached, check_leak
from octjepa.train.journal import Journal
from octjepa.train.optimiser import build_optimiser, set_learning_rate
from octjepa.train.run_folder import check_data, open_run, write_json
from octjepa.train.runtime import Runtime
from octjepa.train.schedule import learning_rate, lr_curve, total_updates
from octjepa.train.signals import Interrupted, StopRequest, stop_request
from octjepa.train.validate import learn_means, validate
from octjepa.views.loader import Batch, FixedSamples, Stream, choose_volumes, fixed_batches, training_batches

_SKIPS_IN_A_ROW = 10


def pretrain(recipe: Recipe, store: Store, out: Path, resume: bool = False) -> dict[str, Any]:
    """Runs or resumes `recipe` on `store`'s training people into the run folder `out`; returns its summary.

    Raises UsageError (no data, a run in the way), ContractError (store made otherwise), CheckpointError (resume failed,
    disk full) and Interrupted (signal; a checkpoint was written).
    """
    runtime = Runtime(recipe.train.precision)
    ids = choose_volumes(store, recipe, "train")
    total = total_updates(recipe.train, len(ids))
    lr_curve(recipe.train, total)
    open_run(out, recipe, store, ids, runtime, resume)
    torch.manual_seed(recipe.train.seed)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimiser = build_optimiser(model, recipe.train)
    saves = None if recipe.checkpoint.dir is None else out / recipe.checkpoint.dir
    done, skipped = 0, 0
    if resume:
        done, skipped = _resume(saves, out, store, ids, model, optimiser, recipe)

    batches = training_batches(Stream(store, recipe, ids), done, total, recipe.machine.loader_workers)
    started, waited, skips_in_a_row, saved = time.perf_counter(), 0.0, 0, done if resume else -1
    first, watch = done, TargetWatch(model)
    with Journal(out / "metrics.jsonl", done) as journal, stop_request() as request, bar("pretrain", total, "update", done) as progress:
        for update in range(done, total):
            asked = time.perf_counter()
            batch = next(batches)
            arrived = time.perf_counter()

            if update == first or _due(LEAK_CHECK_EVERY, update):
                check_leak(model, batch)
            set_learning_rate(optimiser, learning_rate(update, total, recipe.train))
            measured = accumulate(model, batch, recipe, runtime)
            limit = recipe.train.clip_norm or math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))  # read before zeroing
            m = momentum(update, total, recipe.objective.ema_base, recipe.objective.ema_final)
            healthy = math.isfinite(norm) and math.isfinite(measured["train/loss"])
            if healthy:
                optimiser.step()
                update_target(model.target_encoder, model.context_encoder, m)
                watch.check(model, m)
            optimiser.zero_grad(set_to_none=True)
            skipped, skips_in_a_row = (skipped, 0) if healthy else (skipped + 1, skips_in_a_row + 1)

            done = update + 1
            seconds = time.perf_counter() - asked
            waited += arrived - asked
            journal.write(
                done,
                {
                    **measured,
                    "epoch": done * recipe.train.global_batch / len(ids),
                    "train/lr": learning_rate(update, total, recipe.train),
                    "train/grad_norm": norm,
                    "train/ema_momentum": m,
                    "volumes_per_second": recipe.train.global_batch / seconds,
                    "data_wait_share": (arrived - asked) / seconds,
                    "seconds": seconds,
                    **({} if healthy else {"skipped": list(batch.volume_ids)}),
                },
            )
            progress.advance()
            progress.say(f"loss {measured['train/loss']:.3f} cosine {measured['train/cosine']:.3f}")
            if skips_in_a_row >= _SKIPS_IN_A_ROW:
                raise OctjepaError(
                    f"{skips_in_a_row} updates in a row gave no finite loss or gradient (last: {done}). The weights are "
                    f"those of the last healthy update. Lower train.base_lr, or use train.precision=fp32."
                )
            if _due(recipe.validation.every_updates, done) and done < total:
                journal.write(done, _validation(model, runtime, recipe, store, ids))
            if saves and (_due(recipe.checkpoint.every_updates, done) or request.signal_number) or done == total:
                saved = _save(saves, done, model, optimiser, recipe, skipped)
            _stop_if_asked(request, saves, done, total)
        spent = time.perf_counter() - started
        result = _validation(model, runtime, recipe, store, ids)
        journal.write(done, result)

    summary = {
        "updates": done,
        "loss": result["val/loss"],
        "cosine": result["val/cosine"],
        "baseline_cosine": _named(result, "val/baseline/"),
        "baseline_loss": _named(result, "val/baseline_loss/"),
        "rankme": result["val/rankme"],
        "volumes": len(ids),
        "volumes_per_second": (done - first) * recipe.train.global_batch / spent if done > first else 0.0,
        "data_wait_share": waited / spent if done > first else 0.0,
        "skipped_updates": skipped,
        "checkpoint": None if saves is None else f"{recipe.checkpoint.dir}/step-{saved:08d}",
        "seconds": spent,
    }
    write_json(out / "summary.json", summary)
    return summary


def accumulate(model: VJEPA3D, batch: Batch, recipe: Recipe, runtime: Runtime) -> dict[str, float]:
    """Gradients of the whole batch's mean loss, in micro-batches; returns that loss and the cosine.

    Each part counts by its share of the batch, so 1x32, 2x16 and 4x8 give the same update.
    """
    size = len(batch.volume_ids)
    step = min(recipe.machine.micro_batch or size, size)
    loss_sum, cosine_sum = 0.0, 0.0
    for start in range(0, size, step):
        part = batch.part(start, start + step)
        share = len(part.volume_ids) / size
        with runtime.compute():
            outcome = model.predict(
                *(field.to(runtime.device) for field in (part.context_view, part.target_view, part.places)),
                part.context.to(runtime.device),
                part.target.to(runtime.device),
            )
        check_detached(outcome)
        loss = loss_of(recipe.objective.name, outcome.predicted, outcome.target)
        (loss * share).backward()
        loss_sum += float(loss.detach()) * share
        cosine_sum += float(cosine(outcome.predicted.detach(), outcome.target)) * share
    return {"train/loss": loss_sum, "train/cosine": cosine_sum}


def _validation(
    model: VJEPA3D, runtime: Runtime, recipe: Recipe, store: Store, train_ids: list[str]
) -> dict[str, float]:
    limit = recipe.validation.max_samples
    held_out = choose_volumes(store, recipe, "val")[:limit]
    known = FixedSamples(store, recipe, train_ids[:limit])
    means = learn_means(model, runtime, fixed_batches(known, recipe.train.global_batch), recipe.grid_tokens)
    samples = FixedSamples(store, recipe, held_out)
    return validate(model, runtime, fixed_batches(samples, recipe.train.global_batch), means)


def _resume(
    saves: Path | None,
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
    if not found:
        raise UsageError(f"{saves} holds no checkpoint to resume from: start the run anew with another --out")
    return state.load(found[-1], model, optimiser, recipe)


def _save(
    saves: Path | None, done: int, model: VJEPA3D, optimiser: torch.optim.AdamW, recipe: Recipe, skipped: int
) -> int:
    if saves is None:
        return -1
    state.save(saves, done, model, optimiser, recipe, skipped)
    folder.prune(saves, recipe.checkpoint.keep_last)
    return done


def _stop_if_asked(request: StopRequest, saves: Path | None, done: int, total: int) -> None:
    if request.signal_number and done < total:
        kept = "no checkpoint (checkpoint.dir is null)" if saves is None else "its checkpoint is written"
        raise Interrupted(
            f"stopped after update {done} of {total}; {kept}. Go on with --resume.", request.signal_number
        )


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _named(values: dict[str, float], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
