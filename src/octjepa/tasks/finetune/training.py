"""The tuning loop: read a batch, forward, backward, agree, step, look at validation people, save.

Order, views and drop-path come from the position in the stream, so that a tuning that goes on from a checkpoint, or
runs on several processes, computes what one undisturbed process would have.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch

from octjepa.distributed.flags import sync_flags
from octjepa.distributed.runtime import Runtime
from octjepa.distributed.signals import Interrupted, stop_request
from octjepa.errors import OctjepaError
from octjepa.files import Journal
from octjepa.progress import bar
from octjepa.recipe import TrainRecipe
from octjepa.store import Store
from octjepa.tasks.finetune.folder import Progress, load_progress, save_progress, weights_of
from octjepa.tasks.finetune.network import TunedNetwork, draw_paths, each_loss
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.tasks.finetune.scores import held_out, read_scores, standardise
from octjepa.tasks.finetune.tuning_data import Cohort
from octjepa.train.schedule import learning_rate
from octjepa.views.loader import Batch, TrainingDataset, training_batches

METRICS = "metrics.jsonl"
STATES = "checkpoints"
_UNFIT_IN_A_ROW = 5
_log = logging.getLogger(__name__)


def tune(
    network: TunedNetwork, settings: FinetuneRecipe, cohort: Cohort, store: Store, runtime: Runtime, out: Path
) -> Progress:
    """Tunes `network` in place, from the newest checkpoint in `out` where there is one, and leaves its best weights.

    Best by validation loss over all looks; without anybody of val, the last. Raises Interrupted (a checkpoint is
    written), OctjepaError (no finite gradient, a process lost).
    """
    total, depth = settings.stages.updates, len(network.encoder.blocks)
    stream = TrainingDataset(store, settings.sampling(network.pretrained.recipe), cohort.volume_ids("train"))
    optimizer = torch.optim.AdamW(network.groups(settings), betas=(0.9, 0.999))
    progress = _start(network, optimizer, cohort, store, runtime, out / STATES)
    rows = {name: row for row, name in enumerate(cohort.frame["volume_id"])}
    unfit = 0
    batches = training_batches(
        stream, progress.update, total, settings.loader_workers, runtime.rank, runtime.world_size
    )

    journal = Journal(out / METRICS) if runtime.rank == 0 else None
    if journal is not None:
        journal.truncate(progress.update)

    def note(values: dict[str, Any]) -> None:
        if journal is not None:
            journal.append({"update": progress.update, **values})

    with (
        stop_request() as request,
        bar("tune", total, "update", progress.update) as shown,
    ):
        while not progress.ended:
            learning = settings.learning_blocks(progress.update, depth)
            network.unfreeze(learning)
            set_rates(optimizer, settings, stream.recipe.train, progress.update)
            batch = next(batches)
            word = sync_flags(runtime, False, len(batch.unreadable), request.signal_number, False)
            loss = _accumulate(network, settings, cohort, batch, rows, learning, progress.update, runtime)
            norm = _step(network, optimizer, settings, loss, runtime)
            unfit = 0 if math.isfinite(norm) else unfit + 1
            progress.skipped += unfit > 0
            progress.update += 1
            known = {"loss": float(loss), "grad_norm": norm} if unfit == 0 else {"skipped": True}
            note({**known, "blocks": learning, "lr": optimizer.param_groups[0]["lr"]})
            if word.unread:
                _log.warning("update %d: %d volumes could not be read, others stood in", progress.update, word.unread)
            if unfit == _UNFIT_IN_A_ROW:
                raise OctjepaError(f"{unfit} updates in a row without a finite gradient: lower head_lr and encoder_lr")
            if progress.update % settings.look_every == 0 or progress.update == total:
                note(_look(network, settings, cohort, store, runtime, progress))
                shown.say(f"val {progress.best_loss:.3f}" if progress.best_loss is not None else "")
            progress.ended = progress.update == total or progress.waited >= settings.patience
            shown.advance()
            if progress.ended or word.stop or progress.update % settings.save_every == 0:
                runtime.run_on_rank_zero(lambda: save_progress(out / STATES, network, optimizer, progress))
            if word.stop and not progress.ended:
                raise Interrupted(
                    f"stopped after update {progress.update} of {total}; its checkpoint is written. Go on with "
                    "--resume.",
                    word.stop,
                )
    if progress.best:
        network.load_state_dict(progress.best)
    return progress


def _start(
    network: TunedNetwork,
    optimizer: torch.optim.AdamW,
    cohort: Cohort,
    store: Store,
    runtime: Runtime,
    states: Path,
) -> Progress:
    """Every rank reads the checkpoint itself: all see the folder of the run."""
    progress = load_progress(states, network, optimizer)
    told = runtime.broadcast_object(progress.update)
    if told != progress.update:
        raise OctjepaError(
            f"rank {runtime.rank} finds update {progress.update} in {states}, rank 0 update {told}: all processes must "
            "see the same folder"
        )
    if progress.update == 0:
        standardise(network, cohort, store, runtime)
    return progress


def set_rates(optimizer: torch.optim.Optimizer, settings: FinetuneRecipe, train: TrainRecipe, update: int) -> None:
    """One cosine over all updates, which never rises; each group warms up from the update at which it first learns."""
    cosine = learning_rate(update, settings.stages.updates, train)
    for group in optimizer.param_groups:
        since = update - group["start"] + 1
        warm = min(1.0, since / settings.warmup) if settings.warmup else 1.0
        group["lr"] = 0.0 if since <= 0 else group["peak"] * warm * cosine


def _accumulate(
    network: TunedNetwork,
    settings: FinetuneRecipe,
    cohort: Cohort,
    batch: Batch,
    rows: dict[str, int],
    learning: int,
    update: int,
    runtime: Runtime,
) -> torch.Tensor:
    """This rank's part of the gradient of the loss, a mean over targets and the batch; the loss of all ranks."""
    device, size = network.mean.device, len(batch.volume_ids)
    first = update * settings.batch + runtime.rank * size
    step = min(settings.micro_batch or size, size)
    total = torch.zeros((), device=device)
    for start in range(0, size, step):
        part = batch.micro_batch(start, start + step)
        paths = draw_paths(
            settings, len(network.encoder.blocks), learning, range(first + start, first + start + len(part.volume_ids))
        )
        with runtime.autocast():
            tokens = network(
                part.context_view.to(device), part.positions.to(device), None if paths is None else paths.to(device)
            )
        at = [rows[name] for name in part.volume_ids]
        loss = torch.zeros((), device=device)
        for said, tuning in zip(network.say(tokens), cohort.tunings, strict=True):
            truth = torch.from_numpy(tuning.truth[at]).float().to(device)
            weight = None if tuning.weight is None else tuning.weight.to(device)
            loss = loss + each_loss(said, truth, weight, settings.label_smoothing).sum()
        loss = loss / (settings.batch * len(cohort.tunings))
        loss.backward()
        total += loss.detach()
    return runtime.sum_over_ranks(total)


def _step(
    network: TunedNetwork,
    optimizer: torch.optim.AdamW,
    settings: FinetuneRecipe,
    loss: torch.Tensor,
    runtime: Runtime,
) -> float:
    """Sums gradients over ranks, clips and steps; the norm before clipping, NaN where no step was taken."""
    learning = [parameter for parameter in network.parameters() if parameter.grad is not None]
    runtime.sum_gradients(learning)
    norm = float(torch.nn.utils.clip_grad_norm_(learning, settings.clip_norm))
    healthy = math.isfinite(norm) and math.isfinite(float(loss))
    if healthy:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm if healthy else math.nan


def _look(
    network: TunedNetwork, settings: FinetuneRecipe, cohort: Cohort, store: Store, runtime: Runtime, progress: Progress
) -> dict[str, Any]:
    """Judges the weights by validation people and keeps the best; what the journal says of it."""
    scores = read_scores(network, cohort, store, "val", runtime)
    found = [held_out(*three)[0] for three in zip(cohort.asked, cohort.tunings, scores, strict=True)]
    losses = [loss for loss in found if loss is not None]
    if not losses:
        return {"val_loss": None}
    mean = sum(losses) / len(losses)
    if progress.best_loss is None or mean < progress.best_loss:
        progress.best_loss, progress.best_update, progress.waited = mean, progress.update, 0
        progress.best = weights_of(network)
    elif progress.update > settings.last_stage:
        progress.waited += 1
    return {"val_loss": mean, "best_update": progress.best_update}
