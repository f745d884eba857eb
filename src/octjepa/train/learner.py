"""A network in supervised training: its optimizer, early stopping, spike guard, and the state that it resumes from."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octjepa.checkpoint import state
from octjepa.checkpoint.folder import load_newest, prune, read_manifest, read_tensors, write_folder
from octjepa.checkpoint.location import Location
from octjepa.checkpoint.tensor_file import check_weights
from octjepa.errors import CheckpointError, WrongCheckpointError
from octjepa.train.guards import SKIPPED_IN_A_ROW, SpikeGuard

STATES = "checkpoints"  # the folder of the states that a training resumes from
_BEST_FILE = "best.safetensors"
_COUNTS = ("skipped", "best_update", "best_loss", "waited", "done")


@dataclass(eq=False)
class Learner:
    """A network, its optimizer, and its validation results so far.

    updates: after so many it is done. patience: validations after update `patience_from` without a better loss, after
    which it is done earlier; None: never. spike_factor: as in pretraining; None: only gradients that are not finite are
    skipped. guard_starts: updates that begin to train more weights, so that gradient norms change. best: weights of
    the least validation loss, on the host; skipped: updates that were not taken.
    """

    name: str
    network: nn.Module
    optimizer: torch.optim.AdamW
    updates: int
    patience: int | None = None
    patience_from: int = 0
    spike_factor: float | None = None
    guard_starts: Sequence[int] = (0,)
    update: int = 0  # updates that are done
    best_loss: float | None = None
    best_update: int = 0
    waited: int = 0
    skipped: int = 0
    done: bool = False
    best: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._skipped_in_a_row = 0
        self._guards = {start: SpikeGuard(self.spike_factor) for start in sorted({0, *self.guard_starts})}

    def norm_limit(self, update: int) -> float:
        """The gradient norm above which update `update` (from 0) is skipped."""
        start, guard = self._guard(update)
        return guard.limit(update - start)

    def follow_update(self, update: int, healthy: bool, norm: float) -> bool:
        """Counts a skipped update; True when too many in a row were."""
        start, guard = self._guard(update)
        guard.follow(update - start, healthy, norm)
        self.skipped += not healthy
        self._skipped_in_a_row = 0 if healthy else self._skipped_in_a_row + 1  # across guards: stages may be short
        return self._skipped_in_a_row >= SKIPPED_IN_A_ROW

    def follow_validation(self, update: int, loss: float) -> None:
        """Keeps the weights where `loss`, after `update` updates, is the least so far; a loss of NaN never is."""
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_update, self.waited = loss, update, 0
            self.best = host_weights(self.network)
        elif update > self.patience_from:
            self.waited += 1
        self.done = self.done or (self.patience is not None and self.waited >= self.patience)

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Fills the spike guard from the journal of the updates before; `skipped` stays as the state has it."""
        skipped = self.skipped
        for line in lines:
            if "grad_norm" in line or "skipped" in line:
                self.follow_update(line["update"] - 1, "skipped" not in line, line.get("grad_norm", 0.0))
        self.skipped = skipped

    def _guard(self, update: int) -> tuple[int, SpikeGuard]:
        starts = list(self._guards)
        start = starts[bisect_right(starts, update) - 1]
        return start, self._guards[start]


def network_blocks(network: nn.Module) -> list[nn.Module]:
    """The layers of the longest list of modules in `network`, the first of several; itself if it holds no list."""
    lists = [list(module) for module in network.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return max(lists, key=len, default=[network])


def parameters_by_level(network: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of `network` from the input to the output, by the order in which its modules were registered.

    First those before the blocks, as the patch embedding; then those of each block, and with the last one those after
    it, as the final norm.
    """
    blocks = network_blocks(network)
    numbers = {parameter: number for number, block in enumerate(blocks, 1) for parameter in block.parameters()}
    levels: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 1)]
    outside = 0
    for parameter in network.parameters():
        number = numbers.get(parameter, outside)
        levels[number].append(parameter)
        outside = len(blocks) if number else 0
    return levels


def layer_decay_groups(network: nn.Module, lr: float, decay: float) -> list[dict[str, Any]]:
    """Parameter groups of an encoder: the last block at lr x decay, each one below at a rate `decay` times lower.

    A group for each of `parameters_by_level`. Layer-wise decay is that of ULMFiT (Howard & Ruder 2018) and BEiT.
    """
    levels = parameters_by_level(network)
    return [{"params": group, "lr": lr * decay ** (len(levels) - level)} for level, group in enumerate(levels)]


def host_weights(network: nn.Module) -> dict[str, Tensor]:
    """Copies of the state dict on the host."""
    return {name: value.detach().to("cpu", copy=True) for name, value in network.state_dict().items()}


def load_weights(network: nn.Module, tensors: dict[str, Tensor], folder: Any) -> None:
    """Fills `network` with what was read from `folder`. Raises CheckpointError: NaN, other names or shapes."""
    trained = {name for name, _ in network.named_parameters()}  # a buffer may hold NaN until it is measured
    check_weights({name: value for name, value in tensors.items() if name in trained}, str(folder))
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {folder} do not fit their recipe: {error}") from None


def save_state(folder: Path, learner: Learner, fingerprint: str) -> None:
    """Writes `folder/step-<update>`, and keeps the state before it, should it be damaged. Raises CheckpointError."""
    tensors = state.snapshot(learner.network, learner.optimizer) | {_BEST_FILE: learner.best}
    about = {"kind": "state of a supervised training", "fingerprint": fingerprint, "updates": learner.updates}
    write_folder(folder, learner.update, tensors, about | {name: getattr(learner, name) for name in _COUNTS})
    prune(folder, 2)


def load_state(folder: Path, learner: Learner, fingerprint: str) -> int:
    """Fills `learner` from the newest state in `folder`; the updates it has done, 0 if there is no state.

    A damaged state is reported, and the previous state is used. Raises CheckpointError (none is whole),
    WrongCheckpointError (a training of another fingerprint, that is with other settings, weights, volumes or labels, or
    of another number of updates).
    """
    return load_newest(folder, lambda location: _load_state(location, learner, fingerprint)) or 0


def _load_state(location: Location, learner: Learner, fingerprint: str) -> int:
    """Fills `learner` from a saved state and returns its update. Raises WrongCheckpointError: of another training."""
    about = read_manifest(location)
    if "fingerprint" not in about:
        raise WrongCheckpointError(f"{location} belongs to another kind of run: give --out a new folder")
    if about["fingerprint"] != fingerprint:
        raise WrongCheckpointError(
            f"{location} was begun with another recipe, encoder, store, precision or labels: give what it was begun "
            "with, or remove the folder"
        )
    begun = about.get("updates", learner.updates)  # earlier versions did not record it
    if begun != learner.updates:  # the learning rates until now were those of another schedule
        raise WrongCheckpointError(
            f"{location} was begun with {begun} updates, not {learner.updates}: give {begun} again, or start a new "
            "training with another --out"
        )
    best = read_tensors(location, _BEST_FILE)
    try:
        state.fill(location, learner.network, learner.optimizer)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {location} do not fit their recipe: {error}") from None
    for name in _COUNTS:
        setattr(learner, name, about[name])
    learner.best, learner.update = best, int(about["update"])
    return learner.update
