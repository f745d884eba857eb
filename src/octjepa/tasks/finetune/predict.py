"""Predictions of a tuned network: for the volumes of a split in training, and for one case (`load_tuned(folder)`).

`inference` predicts whole folders and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.checkpoint.folder import read_manifest, read_tensors
from octjepa.checkpoint.location import parse_location
from octjepa.checkpoint.weights import TUNED, newest_checkpoint
from octjepa.distributed.runtime import Runtime
from octjepa.errors import CheckpointError, UsageError, WrongCheckpointError
from octjepa.evaluate.calibration import apply_logit_shift, at_class_shares, class_shares, class_weights, select_setting
from octjepa.evaluate.cases import PreparedTarget
from octjepa.progress import bar
from octjepa.store import Store
from octjepa.tasks.finetune.external import load_start, tuned_network
from octjepa.tasks.finetune.folder import HEAD_FILE, HeadSpec
from octjepa.tasks.finetune.network import TunableEncoder, TunedNetwork
from octjepa.tasks.finetune.tuning_data import TrainingLabels, TuningData
from octjepa.train.learner import load_weights
from octjepa.volume import CanonicalVolume, OCTVolume

Scan = str | Path | OCTVolume | CanonicalVolume
VOLUMES_AT_ONCE = 16  # as embedding takes them
_VOLUMES_FOR_SCALE = 256
_ENOUGH_HELD_OUT = 20  # validation volumes; the limit of `TunedNetwork.distance` is computed from them


def standardise(network: TunedNetwork, data: TuningData, store: Store, runtime: Runtime) -> None:
    """Sets the scale of the heads' input by (at most 256 of) the training volumes."""
    network.set_scale(_pooled_volumes(network, store, data.volume_ids("train"), runtime, "scale"))


def set_reference(network: TunedNetwork, data: TuningData, store: Store, runtime: Runtime) -> None:
    """Records which scans the tuned network knows, by training volumes and by those of val, at most 256 of each."""
    training = _pooled_volumes(network, store, data.volume_ids("train"), runtime, "reference")
    held_out = data.volume_ids("val")
    enough = len(held_out) >= _ENOUGH_HELD_OUT
    network.set_reference(
        training, _pooled_volumes(network, store, held_out, runtime, "reference") if enough else training[:0]
    )


def _pooled_volumes(
    network: TunedNetwork, store: Store, ids: Sequence[str], runtime: Runtime, label: str
) -> Float[Tensor, "n features"]:
    sample = [ids[n] for n in np.unique(np.linspace(0, len(ids) - 1, _VOLUMES_FOR_SCALE).astype(int))]
    return torch.from_numpy(_over_volumes(network.pool, store, sample, len(network.mean), runtime, label))


def predict_split(
    network: TunedNetwork, data: TuningData, store: Store, split: str, runtime: Runtime
) -> list[Float[np.ndarray, "_ _"]]:
    """Of each target's labelled volumes of `split`: probabilities of the classes, or quantities in their own unit."""
    volumes, widths = data.labelled(split), [max(1, len(labels.classes)) for labels in data.labels]
    if not len(volumes):
        return [np.zeros((0, width)) for width in widths]
    outputs = _over_volumes(
        lambda batch: torch.cat(network.predict(batch), dim=1),
        store,
        data.volume_ids(split),
        sum(widths),
        runtime,
        split,
    )
    parts = np.split(outputs, np.cumsum(widths)[:-1], axis=1)
    return [
        in_label_units(part[np.searchsorted(volumes, target.fit_target.indices[split])], labels.classes, labels.scale)
        for part, target, labels in zip(parts, data.targets, data.labels, strict=True)
    ]


def _over_volumes(
    compute: Callable[[Sequence[CanonicalVolume]], Tensor],
    store: Store,
    volume_ids: Sequence[str],
    width: int,
    runtime: Runtime,
    label: str,
) -> Float[np.ndarray, "volumes width"]:
    """`compute` of every volume, the same on every rank: each fills its own part, and zeros add nothing.

    Blocks do not depend on the number of ranks, so the order of the sums does not either.
    """
    table = torch.zeros(len(volume_ids), width, dtype=torch.float64)
    starts = range(runtime.rank * VOLUMES_AT_ONCE, len(volume_ids), runtime.world_size * VOLUMES_AT_ONCE)
    with bar(label, len(starts), "block") as progress:
        for start in starts:
            ids = volume_ids[start : start + VOLUMES_AT_ONCE]
            table[start : start + len(ids)] = compute([store.read(name) for name in ids]).double().cpu()
            progress.advance()
    return runtime.sum_over_ranks(table).numpy()


def in_label_units(
    outputs: Float[np.ndarray, "n outputs"], classes: Sequence[str], scale: Sequence[float]
) -> Float[np.ndarray, "n outputs"]:
    """Probabilities from their logarithms; without classes a quantity from its mean and standard deviation."""
    return np.exp(outputs) if classes else outputs * scale[1] + scale[0]


def validation_loss(
    target: PreparedTarget, labels: TrainingLabels, scores: Float[np.ndarray, "n classes"]
) -> tuple[float | None, Float[np.ndarray, " classes"]]:
    """(loss on the validation volumes, shift of the class logits that balances the decision), as the probes have them.

    Log loss in which every class weighs the same, squared error in training standard deviations; None if no person
    of val has a label. Where val lacks a class the shift is that of training.
    """
    truth, classes = target.fit_target.values["val"], len(labels.classes)
    if not classes:
        loss = float(np.mean(((truth - scores[:, 0]) / labels.scale[1]) ** 2)) if len(truth) else None
        return loss, np.zeros(1)
    if not len(truth):
        return None, _training_shift(target, labels)
    whole = len(np.unique(truth)) == classes
    shift = select_setting(target.fit_target, truth, [scores])[1] if whole else _training_shift(target, labels)
    weight = class_weights(truth, classes)[truth]
    right = np.clip(apply_logit_shift(scores, shift)[np.arange(len(truth)), truth], 1e-12, 1)
    return float(-weight @ np.log(right) / weight.sum()), shift


def _training_shift(target: PreparedTarget, labels: TrainingLabels) -> Float[np.ndarray, " classes"]:
    """The shift that takes out how much each class weighed in training: none where inverse frequency balanced them.

    Without it the shares of training would be counted twice, once by the loss and once by calibration.
    """
    assert labels.weight is not None  # classes have one
    logs: np.ndarray = np.log(class_shares(target.fit_target) * labels.weight.double().numpy())
    return logs.mean() - logs


class TunedModel:
    """A tuned encoder with its heads, frozen. `heads` describes each head's classes and scale.

    level: what a case was in tuning: a volume, eye or person. devices: those of the training volumes. by_visit: the
    labels were by visit, so each visit of an eye is a case.
    """

    def __init__(
        self,
        encoder: TunableEncoder,
        network: TunedNetwork,
        heads: list[HeadSpec],
        level: str = "volume",
        devices: Sequence[str] = (),
        by_visit: bool = False,
    ) -> None:
        self.encoder, self.network, self.heads = encoder, network.requires_grad_(False), heads
        self.level, self.devices, self.by_visit = level, tuple(devices), by_visit

    def predict(self, *scans: Scan) -> dict[str, dict[str, Any]]:
        """The prediction for one case, the mean over its scans, by target.

        For classes {"predicted", "balanced", "calibrated"}: the decision, and probabilities of each class as if all
        were equally common and at the training people's shares. For a quantity {"value"}, in its unit.
        Raises UsageError (no scan, a pattern the encoder does not know), VolumeRejected (a file that cannot be read).
        """
        if not scans:
            raise UsageError("no scan was given: name at least one of the case")
        # One at a time: a case has few scans, and a volume in memory is large.
        outputs = [self.network.predict([self.encoder.prepare(scan)]) for scan in scans]
        return {
            head.target: case_prediction(
                head, np.stack([output[number][0].double().cpu().numpy() for output in outputs])
            )
            for number, head in enumerate(self.heads)
        }


def case_prediction(head: HeadSpec, outputs: Float[np.ndarray, "scans outputs"]) -> dict[str, Any]:
    """The prediction of a head for one case from its outputs for each scan of it; keys as of `TunedModel.predict`."""
    scores = in_label_units(outputs, head.classes, head.scale)
    if not head.classes:
        return {"value": float(scores.mean())}
    each = apply_logit_shift(scores, np.array(head.shift))
    # Averaged last, as the test metrics were measured (`cases.average_scores`).
    balanced, calibrated = (part.mean(axis=0) for part in (each, at_class_shares(each, np.array(head.shares))))
    return {
        "predicted": head.classes[int(balanced.argmax())],
        "balanced": dict(zip(head.classes, balanced.tolist(), strict=True)),
        "calibrated": dict(zip(head.classes, calibrated.tolist(), strict=True)),
    }


def load_tuned(path: str | Path, device: torch.device | None = None) -> TunedModel:
    """The files that `octjepa finetune` wrote into the folder `path`, or the checkpoint that it named.

    Raises WrongCheckpointError (nothing tuned there), CheckpointError (damaged).
    """
    try:
        folder = newest_checkpoint(parse_location(path))
    except WrongCheckpointError:
        raise WrongCheckpointError(
            f"{path} holds no tuned model: give the folder that octjepa finetune wrote"
        ) from None
    about = read_manifest(folder).get(TUNED)
    if not isinstance(about, dict):
        raise WrongCheckpointError(f"{folder} holds no tuned heads: give the folder that octjepa finetune wrote")
    try:
        heads = [HeadSpec.from_json(head) for head in about["heads"]]
        level, devices = str(about["settings"]["level"]), list(about["devices"])
        by_visit = bool(about.get("by_visit", False))  # earlier versions did not record it
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder} is damaged: its manifest does not describe the heads") from None
    encoder = load_start(folder, None)
    network = tuned_network(encoder, [(head.task, len(head.classes)) for head in heads])
    weights = {f"encoder.{name}": value for name, value in encoder.encoder.state_dict().items()}
    load_weights(network, {**weights, **read_tensors(folder, HEAD_FILE)}, folder)
    return TunedModel(encoder, network.to(device or torch.device("cpu")).eval(), heads, level, devices, by_visit)
