"""Saves checkpoints while training continues, and finds the checkpoint to resume.

The state is copied at once; a thread writes and uploads it meanwhile, one checkpoint at a time. Rank 0 reads a
checkpoint and sends it to the other ranks, so only rank 0 needs access to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from octjepa.checkpoint import folder, state
from octjepa.checkpoint.location import Location, child, location_name
from octjepa.cohort.recorded_scans import uid_key
from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.index import text_column
from octjepa.train.guards import SKIPPED_IN_A_ROW
from octjepa.train.run_folder import check_data, is_finished, last_saved, record_code_change, record_saved
from octjepa.train.tracking import RunLogger

_RETURNS = 3  # to one checkpoint; then excluding volumes is not a cure
_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Runs one write at a time in the background; leaving the context waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Runs `write` in the background after the previous one has ended. Raises the error of the previous one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a write met an error that was not raised yet."""
        return self._error is not None

    def wait(self) -> None:
        """Returns when nothing is being written. Raises OctjepaError (disk full, bucket gone) as the write did."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, it must end the run, and not die with a thread
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None and not issubclass(kind, KeyboardInterrupt):
            # The run ends for another reason, and what was being written is finished all the same. Ctrl-C ends it at
            # once: a daemon's thread does not keep the process, and half a checkpoint is none.
            self._thread.join()


def snapshot(model: VJEPA3D, optimizer: torch.optim.AdamW, runtime: Runtime) -> dict[str, dict[str, Tensor]]:
    """`state.snapshot` on rank 0, which writes it; empty on the others. All ranks gather the shards of a model."""
    return state.snapshot(model, optimizer) if runtime.rank == 0 or runtime.sharded else {}


def write_checkpoint(
    out: Path,
    checkpoint_dir: Location,
    update: int,
    tensors: dict[str, dict[str, Tensor]],
    record: state.Record,
    logger: RunLogger,
    prune: bool,
) -> None:
    """The function that `CheckpointWriter` runs: saves `tensors` and, if `prune`, removes checkpoints that are too
    old.
    """
    logger.sync()  # a checkpoint is never ahead of the lines that a resume needs
    state.save(checkpoint_dir, update, tensors, record)
    location = child(checkpoint_dir, f"step-{update:08d}")
    record_saved(out, update, location)
    logger.checkpoint(update, location)
    if prune:
        settings = record.recipe.checkpoint
        try:
            folder.prune(checkpoint_dir, settings.keep_last, settings.keep_every_updates, newest=update)
        except OSError as error:  # the new checkpoint is there
            _log.warning("an old checkpoint in %s cannot be removed, training continues: %s", checkpoint_dir, error)


def best_checkpoint(checkpoint_dir: Location | None) -> str | None:
    """The name of the checkpoint that the online probe scored best; None if there is none."""
    best = None if checkpoint_dir is None else folder.best_checkpoint(checkpoint_dir)
    return None if best is None else location_name(best)


@dataclass(frozen=True)
class Start:
    """Where a run continues: updates done, how many of them were skipped, volumes excluded from here on, and the lines
    of metrics.jsonl so far. `inherited` is what its first weights and its teacher record of the volumes that they were
    trained on, and the `uid_key` of the run's own volumes."""

    update: int = 0
    skipped: int = 0
    excluded: tuple[str, ...] = ()
    lines: tuple[dict[str, Any], ...] = ()
    inherited: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunLocation:
    """The folder of a run, where its checkpoints are (None: it writes none), and whether the run is resumed."""

    out: Path
    checkpoint_dir: Location | None
    resume: bool


def start_from(
    location: RunLocation,
    store: Store,
    ids: list[str],
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
    runtime: Runtime,
) -> Start:
    """Fills `model` and `optimizer` on every rank, at the run's first update or from its newest checkpoint.

    Raises UsageError (nothing to resume from, other data), CheckpointError (no checkpoint is whole).
    """
    start = runtime.run_on_rank_zero(lambda: _read_start(location, store, ids, model, optimizer, recipe))
    _broadcast_state(model, optimizer, runtime)
    return start


def _read_start(
    location: RunLocation,
    store: Store,
    ids: list[str],
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
) -> Start:
    """`start_from` on rank 0."""
    start, out, checkpoint_dir = Start(), location.out, location.checkpoint_dir
    if location.resume:
        if checkpoint_dir is None:
            raise UsageError("checkpoint.dir is null, so this run wrote no checkpoint and cannot be resumed")
        check_data(out, store, ids, recipe)
        start = _newest(out, checkpoint_dir, partial(_load, model, optimizer, recipe))
        if not is_finished(out):
            record_code_change(out, start.update)
    inherited = set(start.inherited)
    if start.update == 0 and (recipe.model.warm_start or recipe.objective.teacher):
        # few runs start from other weights; a resumed run may have been stopped before its first checkpoint
        from octjepa.checkpoint.warm_start import start_weights

        inherited = set(start_weights(model, recipe))
    seen_uids = store.table.loc[store.table["volume_id"].isin(ids), "sop_instance_uid"]
    uids = {uid_key(uid) for uid in text_column(seen_uids) if uid}
    return replace(start, inherited=tuple(sorted({*(inherited - set(ids)), *uids})))


class _Loaded(NamedTuple):
    """A checkpoint that was loaded: updates done, how many of them were skipped, and what it was trained on."""

    update: int
    skipped: int
    trained_on: tuple[str, ...]


def _load(model: VJEPA3D, optimizer: torch.optim.AdamW, recipe: Recipe, checkpoint: Location) -> _Loaded:
    update, skipped = state.load(checkpoint, model, optimizer, recipe)
    return _Loaded(update, skipped, tuple(folder.read_manifest(checkpoint)["trained_on"]))


def _newest(out: Path, checkpoint_dir: Location, load: Callable[[Location], _Loaded]) -> Start:
    """The start from the newest whole checkpoint, whose `trained_on` is inherited; `load` fills the model."""
    loaded = folder.load_newest(checkpoint_dir, load)
    if loaded is not None:
        return replace(_start_with_lines(out, loaded.update, loaded.skipped), inherited=loaded.trained_on)
    last = last_saved(out)
    if last is not None:
        raise UsageError(
            f"run {out} wrote checkpoint {last['checkpoint']}, but {checkpoint_dir} holds no checkpoint: restore it, "
            "set checkpoint.dir to its folder, or start a new run with another --out"
        )
    _log.warning("%s was stopped before its first checkpoint was written: it starts at its first update", out)
    return Start()


def _start_with_lines(out: Path, update: int, skipped: int) -> Start:
    """The content of metrics.jsonl up to `update`: excluded volumes, and the norms that the spike guard needs."""
    path = out / "metrics.jsonl"
    lines = [line for line in read_json_lines(path) if line["update"] <= update] if path.is_file() else []
    excluded = [name for line in lines for name in line.get("left_out", ())]
    return Start(update, skipped, tuple(excluded), tuple(lines))


def go_back(
    out: Path,
    checkpoint_dir: Location | None,
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
    runtime: Runtime,
    volumes: Mapping[int, list[str]],
    training_volumes: int,
) -> Start:
    """Loads the last checkpoint before the skipped updates (from 0) in `volumes`; excludes the volumes of these.

    Later checkpoints are removed; metrics.jsonl is not touched here. Raises OctjepaError when there is no checkpoint,
    going back did not help before, or more than half of the `training_volumes` would be excluded: then the run itself
    diverges, and no volume is the cause.
    """
    first = min(volumes)

    def read() -> Start:
        checkpoints = [] if checkpoint_dir is None else folder.list_checkpoints(checkpoint_dir)
        earlier = [checkpoint for checkpoint in checkpoints if folder.update_number(checkpoint) <= first]
        if checkpoint_dir is None or not earlier:
            raise OctjepaError(_cannot_go_back(first, "and there is no checkpoint before them"))
        if runtime.sharded:  # the shards on each rank stay as they are: the run ends, and a resume reads it
            manifest = folder.read_manifest(earlier[-1])
            update, skipped = int(manifest["update"]), int(manifest["skipped_updates"])
        else:
            update, skipped = state.load(earlier[-1], model, optimizer, recipe)
        before = _start_with_lines(out, update, skipped)
        if sum("left_out" in line for line in before.lines if line["update"] == update) >= _RETURNS:
            raise OctjepaError(
                _cannot_go_back(first, f"for the {_RETURNS + 1}th time after {location_name(earlier[-1])}")
            )
        excluded = dict.fromkeys([*before.excluded, *(name for names in volumes.values() for name in names)])
        if len(excluded) > training_volumes / 2:
            raise OctjepaError(
                _cannot_go_back(
                    first,
                    f"and without their volumes {training_volumes - len(excluded)} of {training_volumes} were left",
                )
            )
        folder.remove_later(checkpoint_dir, update)
        _log.warning(
            "%d updates in a row from %d on were skipped: the run returns to update %d and leaves %d of %d volumes out",
            *(SKIPPED_IN_A_ROW, first + 1, update, len(excluded), training_volumes),
        )
        return Start(update, skipped, tuple(excluded), before.lines)

    start = runtime.run_on_rank_zero(read)
    if not runtime.sharded:
        _broadcast_state(model, optimizer, runtime)
    return start


def _broadcast_state(model: VJEPA3D, optimizer: torch.optim.AdamW, runtime: Runtime) -> None:
    """Copies weights and moments of rank 0 to all other ranks."""
    if runtime.world_size == 1:
        return
    for tensor in model.state_dict().values():
        runtime.broadcast_tensor(tensor)
    if not runtime.broadcast_object(bool(optimizer.state)):
        optimizer.state.clear()
        return
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        moments = optimizer.state[parameter]
        for kind in state.MOMENTS:
            empty = torch.zeros((), device=parameter.device) if kind == "step" else torch.zeros_like(parameter)
            runtime.broadcast_tensor(moments.setdefault(kind, empty))


def _cannot_go_back(update: int, when: str) -> str:
    return (
        f"{SKIPPED_IN_A_ROW} updates in a row from {update + 1} on had a non-finite loss or a gradient far above the "
        f"usual, {when}. Start a new run with a lower train.base_lr or train.precision=fp32; metrics.jsonl has the "
        "volumes of each skipped update."
    )
