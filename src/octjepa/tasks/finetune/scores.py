"""What the network says of whole volumes, and how well that is on held-out people. Processes share the volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.probe.aggregation import PreparedTarget
from octjepa.probe.calibration import apply_logit_shift, class_shares, class_weights, select_setting
from octjepa.progress import bar
from octjepa.store import CanonicalVolume, Store
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.tasks.finetune.tuning_data import Cohort, Tuning

_AT_ONCE = 16  # volumes, as embedding takes them
_FOR_SCALE = 256


def read_volumes(
    compute: Callable[[Sequence[CanonicalVolume]], Tensor],
    store: Store,
    volume_ids: Sequence[str],
    width: int,
    runtime: Runtime,
    what: str,
) -> Float[np.ndarray, "volumes width"]:
    """Rows of `compute` for every volume, the same on every rank: each fills its own, and zeros add nothing.

    Ranks take blocks that do not depend on their number, so that nobody sums in another order.
    """
    table = torch.zeros(len(volume_ids), width, dtype=torch.float64)
    starts = range(runtime.rank * _AT_ONCE, len(volume_ids), runtime.world_size * _AT_ONCE)
    with bar(what, len(starts), "block") as shown:
        for start in starts:
            some = volume_ids[start : start + _AT_ONCE]
            table[start : start + len(some)] = compute([store.read(name) for name in some]).double().cpu()
            shown.advance()
    return runtime.sum_over_ranks(table).numpy()


def standardise(network: TunedNetwork, cohort: Cohort, store: Store, runtime: Runtime) -> None:
    """Sets the scale of the heads' input by (at most 256 of) the training volumes."""
    ids = cohort.volume_ids("train")
    some = [ids[n] for n in np.unique(np.linspace(0, len(ids) - 1, _FOR_SCALE).astype(int))]
    found = read_volumes(network.pool, store, some, len(network.mean), runtime, "scale")
    network.mean.copy_(torch.from_numpy(found.mean(axis=0)))
    network.std.copy_(torch.from_numpy(np.maximum(found.std(axis=0), 1e-6)))


def read_scores(
    network: TunedNetwork, cohort: Cohort, store: Store, split: str, runtime: Runtime
) -> list[Float[np.ndarray, "n classes"]]:
    """Of each target's labelled volumes of `split`: probabilities of the classes, or quantities in their own unit."""
    rows = cohort.rows(split)
    if not len(rows):
        return [np.zeros((0, max(1, len(one.classes)))) for one in cohort.tunings]
    widths = [max(1, len(one.classes)) for one in cohort.tunings]
    said = read_volumes(
        lambda volumes: torch.cat(network.say_of(volumes), dim=1),
        store, cohort.volume_ids(split), sum(widths), runtime, split,
    )  # fmt: skip
    parts = np.split(said, np.cumsum(widths)[:-1], axis=1)
    return [
        in_own_unit(part[np.searchsorted(rows, one.fit_target.indices[split])], tuning.classes, tuning.scale)
        for part, one, tuning in zip(parts, cohort.asked, cohort.tunings, strict=True)
    ]


def in_own_unit(
    said: Float[np.ndarray, "n outputs"], classes: Sequence[str], scale: Sequence[float]
) -> Float[np.ndarray, "n outputs"]:
    """Probabilities from their logarithms; without classes a quantity from its mean and standard deviation."""
    return np.exp(said) if classes else said * scale[1] + scale[0]


def held_out(
    one: PreparedTarget, tuning: Tuning, scores: Float[np.ndarray, "n classes"]
) -> tuple[float | None, Float[np.ndarray, " classes"]]:
    """(loss on the validation volumes, shift of the class logits that balances the decision), as the probes have them.

    Log loss in which every class weighs the same, squared error in training standard deviations; None where nobody of
    val has a label. Where val lacks a class the shift is that of training.
    """
    truth, classes = one.fit_target.values["val"], len(tuning.classes)
    if not classes:
        loss = float(np.mean(((truth - scores[:, 0]) / tuning.scale[1]) ** 2)) if len(truth) else None
        return loss, np.zeros(1)
    if not len(truth):
        return None, _of_training(one, tuning)
    whole = len(np.unique(truth)) == classes
    shift = select_setting(one.fit_target, truth, [scores])[1] if whole else _of_training(one, tuning)
    weight = class_weights(truth, classes)[truth]
    right = np.clip(apply_logit_shift(scores, shift)[np.arange(len(truth)), truth], 1e-12, 1)
    return float(-weight @ np.log(right) / weight.sum()), shift


def _of_training(one: PreparedTarget, tuning: Tuning) -> Float[np.ndarray, " classes"]:
    """The shift that takes out how much each class weighed in training: none where inverse frequency balanced them.

    Without it the shares of training would be counted twice, once by the loss and once by calibration.
    """
    assert tuning.weight is not None  # classes have one
    logs: np.ndarray = np.log(class_shares(one.fit_target) * tuning.weight.double().numpy())
    return logs.mean() - logs
