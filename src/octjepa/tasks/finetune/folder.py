"""Fine-tuning on disk, whole or not at all: the state to go on from, and the tuned encoder with its heads.

A tuned checkpoint is an encoder's checkpoint with a second file for the heads: `octjepa embed` and all others read it
as any encoder. `trained_on` holds what pretraining and tuning saw, so that nobody is tested on them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octjepa.checkpoint.encoder import TUNED
from octjepa.checkpoint.folder import list_folders, prune, read_manifest, read_tensors, write_folder
from octjepa.checkpoint.location import Place, name_of
from octjepa.checkpoint.state import MODEL_FILE
from octjepa.config import science_hash
from octjepa.errors import CheckpointError
from octjepa.metrics.scores import Task
from octjepa.probe.calibration import class_shares
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.tasks.finetune.tuning_data import Cohort

_log = logging.getLogger(__name__)
STATE_KIND = "state of a fine-tuning"
HEAD_FILE = "head.safetensors"
_NETWORK, _MOMENTS, _BEST = "network.safetensors", "optimiser.safetensors", "best.safetensors"
_COUNTS = ("update", "skipped", "best_update", "best_loss", "waited", "ended")


@dataclass
class Progress:
    """How far a tuning is. best: the weights of the look with the least validation loss, on the host.

    waited: looks since then in the last stage; ended: nothing is left to learn.
    """

    update: int = 0
    skipped: int = 0
    best_update: int = 0
    best_loss: float | None = None
    waited: int = 0
    ended: bool = False
    best: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    """What a head says. classes: none for a quantity, which it says in units of `scale` (mean, standard deviation).

    shift: of the class logits, chosen on validation people; shares: of the classes among the training volumes.
    """

    target: str
    task: Task
    classes: tuple[str, ...]
    scale: tuple[float, float]
    shift: tuple[float, ...]
    class_shares: tuple[float, ...]


def weights_of(network: TunedNetwork) -> dict[str, Tensor]:
    """Copies on the host."""
    return {name: value.detach().to("cpu", copy=True) for name, value in network.state_dict().items()}


def save_progress(folder: Path, network: TunedNetwork, optimizer: torch.optim.AdamW, progress: Progress) -> None:
    """Writes `folder/step-<update>` and keeps one before it, should it be damaged. Raises CheckpointError."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    moments = {
        f"{kind}/{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
    }
    tensors = {_NETWORK: weights_of(network), _MOMENTS: moments, _BEST: progress.best}
    about = {"kind": STATE_KIND, **{name: getattr(progress, name) for name in _COUNTS if name != "update"}}
    write_folder(folder, progress.update, tensors, about)
    prune(folder, 2)


def load_progress(folder: Path, network: TunedNetwork, optimizer: torch.optim.AdamW) -> Progress:
    """Fills network and optimizer from the newest checkpoint in `folder`; a first Progress where there is none.

    A damaged one is told of, and the one before it taken. Raises CheckpointError where none is whole.
    """
    found = list_folders(folder)
    for one in reversed(found):
        try:
            return _load(one, network, optimizer)
        except CheckpointError as error:
            if one == found[0]:
                raise
            _log.warning("%s NOT USED: %s The tuning goes on from the checkpoint before it", name_of(one), error)
    return Progress()


def _load(step: Place, network: TunedNetwork, optimizer: torch.optim.AdamW) -> Progress:
    about = read_manifest(step)
    weights, moments, best = (read_tensors(step, name) for name in (_NETWORK, _MOMENTS, _BEST))
    fill(network, weights, step)
    parameters = dict(network.named_parameters())
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        one = parameters[name]
        optimizer.state[one][kind] = value if kind == "step" else value.to(one.device)
    return Progress(**{name: about[name] for name in _COUNTS}, best=best)


def save_tuned(
    folder: Path,
    network: TunedNetwork,
    settings: FinetuneRecipe,
    cohort: Cohort,
    shifts: Sequence[np.ndarray],
    update: int,
) -> Path:
    """Writes `folder/step-<update>`, `update` being that of the weights. Raises CheckpointError."""
    pretrained, state = network.pretrained, weights_of(network)
    encoder = {f"target_encoder.{name.removeprefix('encoder.')}": v for name, v in state.items() if _of_encoder(name)}
    heads = {name: value for name, value in state.items() if not _of_encoder(name)}
    knows = [
        Head(
            one.fit_target.name, tuning.task, tuning.classes, tuning.scale, tuple(shift.tolist()),
            tuple(class_shares(one.fit_target).tolist()) if tuning.classes else (),
        )
        for one, tuning, shift in zip(cohort.asked, cohort.tunings, shifts, strict=True)
    ]  # fmt: skip
    about = {
        "recipe": pretrained.recipe.model_dump(mode="json"),
        "contract_hash": science_hash(pretrained.recipe.preprocessing),
        "trained_on": sorted(pretrained.trained_on | set(cohort.volume_ids("train"))),
        TUNED: {"settings": settings.model_dump(mode="json"), "heads": [asdict(one) for one in knows]},
    }
    return Path(write_folder(folder, update, {MODEL_FILE: encoder, HEAD_FILE: heads}, about))


def _of_encoder(name: str) -> bool:
    return name.startswith("encoder.")


def fill(module: torch.nn.Module, tensors: dict[str, Tensor], folder: Any) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {folder} do not fit their recipe: {error}") from None
