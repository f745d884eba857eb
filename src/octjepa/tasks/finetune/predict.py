"""A tuned network for new scans: `load_tuned(folder).predict(scan)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from octjepa.checkpoint import PretrainedEncoder, load_encoder
from octjepa.checkpoint.encoder import TUNED, newest
from octjepa.checkpoint.folder import read_manifest, read_tensors
from octjepa.checkpoint.location import place_of
from octjepa.errors import CheckpointError, UsageError, WrongCheckpointError
from octjepa.ingest import read_volume
from octjepa.probe.calibration import apply_logit_shift, at_class_shares
from octjepa.store import CanonicalVolume
from octjepa.tasks.finetune.folder import HEAD_FILE, Head, fill
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.tasks.finetune.scores import in_own_unit
from octjepa.volume import OCTVolume

Scan = str | Path | OCTVolume | CanonicalVolume


class Tuned:
    """A tuned encoder with its heads, frozen. `heads` says what each head knows."""

    def __init__(self, encoder: PretrainedEncoder, network: TunedNetwork, heads: list[Head]) -> None:
        self.encoder, self.network, self.heads = encoder, network.requires_grad_(False), heads

    def predict(self, *scans: Scan) -> dict[str, dict[str, Any]]:
        """What is said of one case, the mean over its scans, by target.

        Of classes {"said", "balanced", "calibrated"}: the decision, and probabilities of each class as if all were
        equally common and at the training people's shares. Of a quantity {"value"}, in its unit.
        Raises UsageError (no scan, a pattern the encoder does not know), VolumeRejected (a file that cannot be read).
        """
        if not scans:
            raise UsageError("no scan was given: name at least one of the case")
        # One at a time: a case has few scans, and a volume in hand is large.
        said = [self.network.say_of([self._prepared(scan)]) for scan in scans]
        return {
            head.target: _answer(head, np.stack([one[number][0].double().cpu().numpy() for one in said]))
            for number, head in enumerate(self.heads)
        }

    def _prepared(self, scan: Scan) -> CanonicalVolume:
        if isinstance(scan, CanonicalVolume):
            return scan
        volume = scan if isinstance(scan, OCTVolume) else read_volume(scan)
        patterns = self.encoder.recipe.data.patterns
        if volume.pattern not in patterns:
            raise UsageError(f"the scan's pattern is {volume.pattern}: the encoder knows {', '.join(patterns)}")
        return self.encoder.canonical(volume)


def _answer(head: Head, said: np.ndarray) -> dict[str, Any]:
    scores = in_own_unit(said, head.classes, head.scale)
    if not head.classes:
        return {"value": float(scores.mean())}
    of_scans = apply_logit_shift(scores, np.array(head.shift))
    # Averaged last, as the test's figures were measured (`protocol.averaged`).
    balanced, calibrated = (part.mean(axis=0) for part in (of_scans, at_class_shares(of_scans, np.array(head.shares))))
    found = {
        name: dict(zip(head.classes, values.tolist(), strict=True))
        for name, values in (("balanced", balanced), ("calibrated", calibrated))
    }
    return {"said": head.classes[int(balanced.argmax())], **found}


def load_tuned(path: str | Path, device: torch.device | None = None) -> Tuned:
    """What `octjepa finetune` wrote into the folder `path`, or the checkpoint that it named.

    Raises WrongCheckpointError (nothing tuned there), CheckpointError (damaged).
    """
    folder = newest(place_of(path))
    about = read_manifest(folder).get(TUNED)
    if not isinstance(about, dict):
        raise WrongCheckpointError(f"{folder} holds no tuned heads: give the folder that octjepa finetune wrote")
    try:
        heads = [_head(one) for one in about["heads"]]
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder} is damaged: its manifest does not say what the heads are") from None
    encoder = load_encoder(folder)
    network = TunedNetwork(encoder, [(one.task, len(one.classes)) for one in heads])
    of_encoder = {f"encoder.{name}": value for name, value in encoder.encoder.state_dict().items()}
    fill(network, {**of_encoder, **read_tensors(folder, HEAD_FILE)}, folder)
    return Tuned(encoder, network.to(device or torch.device("cpu")).eval(), heads)


def _head(stored: dict[str, Any]) -> Head:
    """JSON knows no tuples."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
    return Head(**fields)
