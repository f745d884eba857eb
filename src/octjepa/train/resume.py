"""Where a run takes up: at its first update, its newest whole checkpoint or, after unfit updates, an earlier one.

Rank 0 reads, the others are sent what it read, so a checkpoint need only lie where rank 0 is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octjepa.checkpoint import folder, state
from octjepa.checkpoint.location import Location, location_name
from octjepa.checkpoint.warm_start import warm_start
from octjepa.distributed.runtime import Runtime
from octjepa.errors import CheckpointError, OctjepaError, UsageError, WrongCheckpointError
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.run_folder import check_data, last_saved, note_other_code, read_summary
from octjepa.train.spike_guard import IN_A_ROW

_RETURNS = 3  # to one checkpoint; then leaving volumes out is no cure
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Updates done, how many of them were skipped, volumes left out from here on, the journal's lines so far."""

    update: int = 0
    skipped: int = 0
    left_out: tuple[str, ...] = ()
    lines: tuple[dict[str, Any], ...] = ()


def start_from(
    out: Path,
    saves: Location | None,
    store: Store,
    ids: list[str],
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
    runtime: Runtime,
    resume: bool,
) -> Start:
    """Fills `model` and `optimizer` on every rank.

    Raises UsageError (nothing to resume from, other data), CheckpointError (no checkpoint is whole).
    """
    found: list[Start] = [Start()]

    def read() -> None:
        if resume:
            found[0] = _newest(out, saves, store, ids, model, optimizer, recipe)
            if read_summary(out) is None:
                note_other_code(out, found[0].update)
        if found[0].update == 0:  # a resumed run may have been stopped before its first checkpoint
            warm_start(model, recipe)

    runtime.run_on_rank_zero(read)
    _spread(model, optimizer, runtime)
    start: Start = runtime.broadcast_object(found[0])
    return start


def _newest(
    out: Path,
    saves: Location | None,
    store: Store,
    ids: list[str],
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
) -> Start:
    """From the newest checkpoint that is whole; a damaged one is told of, and the one before it taken."""
    if saves is None:
        raise UsageError("checkpoint.dir is null, so this run wrote no checkpoint and cannot be resumed")
    check_data(out, store, ids, recipe)
    found = folder.list_checkpoints(saves)
    for one in reversed(found):
        try:
            done, skipped = state.load(one, model, optimizer, recipe)
        except WrongCheckpointError:
            raise
        except CheckpointError as error:
            if one == found[0]:
                raise
            _log.warning("%s NOT USED: %s The run goes on from the checkpoint before it", location_name(one), error)
            continue
        return _with_journal(out, done, skipped)
    last = last_saved(out)
    if last is not None:
        raise UsageError(
            f"{out} wrote {last['checkpoint']}, but {saves} holds no checkpoint: bring it back, name its folder by "
            "checkpoint.dir, or start the run anew with another --out"
        )
    _log.warning("%s was stopped before its first checkpoint was written: it starts at its first update", out)
    return Start()


def _with_journal(out: Path, done: int, skipped: int) -> Start:
    """What the journal knows up to update `done`: volumes left out, and the norms that the guard needs."""
    journal = out / "metrics.jsonl"
    lines = [line for line in read_json_lines(journal) if line["update"] <= done] if journal.is_file() else []
    left_out = [name for line in lines for name in line.get("left_out", ())]
    return Start(done, skipped, tuple(left_out), tuple(lines))


def go_back(
    out: Path,
    saves: Location | None,
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
    runtime: Runtime,
    unfit: dict[int, list[str]],
) -> Start:
    """Back to the last checkpoint before the `unfit` updates (number -> volumes); their volumes are left out.

    Later checkpoints are removed; the journal is not touched here. Raises OctjepaError when there is no checkpoint, or
    going back did not help before.
    """
    first = min(unfit)
    start = [Start()]

    def read() -> None:
        known = (
            []
            if saves is None
            else [one for one in folder.list_checkpoints(saves) if folder.update_number(one) <= first]
        )
        if saves is None or not known:
            raise OctjepaError(hopeless(first, "and there is no checkpoint before them"))
        if runtime.sharded:  # the parts on each rank stay as they are: the run ends, and a resume reads it
            manifest = folder.read_manifest(known[-1])
            done, skipped = int(manifest["update"]), int(manifest.get("skipped_updates", 0))
        else:
            done, skipped = state.load(known[-1], model, optimizer, recipe)
        before = _with_journal(out, done, skipped)
        if sum("left_out" in line for line in before.lines if line["update"] == done) >= _RETURNS:
            raise OctjepaError(hopeless(first, f"for the {_RETURNS + 1}th time after {location_name(known[-1])}"))
        folder.remove_later(saves, done)
        names = dict.fromkeys([*before.left_out, *(name for some in unfit.values() for name in some)])
        start[0] = Start(done, skipped, tuple(names), before.lines)

    runtime.run_on_rank_zero(read)
    if not runtime.sharded:
        _spread(model, optimizer, runtime)
    told: Start = runtime.broadcast_object(start[0])
    return told


def _spread(model: VJEPA3D, optimizer: torch.optim.AdamW, runtime: Runtime) -> None:
    """Weights and moments of rank 0 to all others."""
    if runtime.world_size == 1:
        return
    for tensor in model.state_dict().values():
        runtime.broadcast_tensor(tensor)
    if not runtime.broadcast_object(bool(optimizer.state)):
        optimizer.state.clear()
        return
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        kept = optimizer.state[parameter]
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            empty = torch.zeros((), device=parameter.device) if kind == "step" else torch.zeros_like(parameter)
            runtime.broadcast_tensor(kept.setdefault(kind, empty))


def hopeless(update: int, when: str) -> str:
    return (
        f"{IN_A_ROW} updates in a row from {update + 1} on gave no finite loss or a gradient far above the usual, "
        f"{when}. Start anew with a lower train.base_lr or with train.precision=fp32; metrics.jsonl names the volumes "
        "of each skipped update."
    )
