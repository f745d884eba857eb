"""Checks that stop or flag a failing run: gradient spikes, a collapsing encoder, a broken pretext task, volumes that
cannot be read.

Everything here follows from the lines of metrics.jsonl, so a run that was killed and resumed decides as the
uninterrupted one does.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from octjepa.distributed.runtime import Runtime, local_tensor
from octjepa.errors import OctjepaError
from octjepa.files import Journal
from octjepa.model import VJEPA3D
from octjepa.model.blocks import uncompiled
from octjepa.objectives.base import Prediction, get_objective
from octjepa.recipe import ObjectiveRecipe
from octjepa.views.loader import Batch

SKIPPED_IN_A_ROW = 5  # after so many skipped updates the run goes back
# Norms of healthy runs leap up to 60-fold over the first hundred updates, while the target learns to tell tokens apart;
# after 200 none of eleven rose above 6.3 times the median (lab/2026-11.md).
SPIKES_FROM_UPDATE = 200
_NORM_WINDOW = 100  # healthy updates whose median norm is the usual one
_FEWEST_NORMS = 20  # of them before anything is called a spike
_LAG = 2  # updates whose norms are not known yet: they come off the device one update late
LOSS_WINDOW = 20  # updates whose mean loss is compared with the trivial one
LEAK_CHECK_EVERY = 200
FROZEN_AFTER = 5  # updates
_MOST_UNREADABLE = 0.2  # of the training volumes
_log = logging.getLogger(__name__)


class SpikeGuard:
    """Decides which updates are skipped, and when there were too many of them in a row.

    An update is skipped by all ranks alike (`octjepa.train.engine.take_step`) when its loss or gradient is not finite,
    or its gradient norm is above `limit(update)`: `spike_factor` times the median of the healthy updates before. After
    `SKIPPED_IN_A_ROW` of them the run returns to its last checkpoint and leaves their volumes out from there on.
    `skipped` are the updates skipped since the last healthy one.
    """

    def __init__(self, spike_factor: float | None) -> None:
        self._factor = spike_factor
        self._norms: deque[tuple[int, float]] = deque(maxlen=_NORM_WINDOW + _LAG)
        self.skipped: list[int] = []

    def limit(self, update: int) -> float:
        """The largest norm of a healthy gradient; infinite for the first updates, until enough norms are known."""
        recent_norms = [norm for done, norm in self._norms if done <= update - _LAG][-_NORM_WINDOW:]
        if self._factor is None or update < SPIKES_FROM_UPDATE or len(recent_norms) < _FEWEST_NORMS:
            return math.inf
        return self._factor * median(recent_norms)

    def follow(self, update: int, healthy: bool, norm: float) -> bool:
        """Records an update (from 0); True when too many in a row were skipped."""
        if healthy:
            self._norms.append((update, norm))
            self.skipped = []
        else:
            self.skipped.append(update)
        return len(self.skipped) >= SKIPPED_IN_A_ROW

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Continues from the lines of metrics.jsonl (updates from 1)."""
        self._norms.clear()
        self.skipped = []
        for line in lines:
            if "train/grad_norm" in line:
                self.follow(line["update"] - 1, "skipped" not in line, line["train/grad_norm"])


@dataclass(frozen=True)
class Limit:
    """The alarm goes off if `metric` is above `bound`, or below it if `below`.

    `remedies` names what to change; `remedy` writes the sentence with the keys of the run's objective.
    """

    metric: str
    bound: float
    below: bool
    message: str
    remedies: tuple[str, ...]


LIMITS: dict[str, Limit] = {
    "diverging": Limit(
        "loss_over_constant",
        1.25,
        False,
        "one constant vector predicts the hidden tokens of the monitor better than the model does.",
        ("rate", "warmup"),
    ),
    "constant_solution": Limit(
        "pair_cosine_tissue",
        0.95,
        False,
        "nearly all tissue tokens have the same features.",
        ("rate", "target", "spread"),
    ),
    "vanishing_features": Limit(
        "target_std_tissue",
        0.1,
        True,
        "the features of the exported encoder hardly vary over tissue tokens.",
        ("rate", "target", "spread"),
    ),
    "position_only": Limit(
        "position_share_tissue",
        0.8,
        False,
        "the features encode the position of a token and little else.",
        ("target", "masks", "views"),
    ),
    "low_rank": Limit(
        "rankme_tissue",
        10.0,
        True,
        "the features of tissue span only a few directions.",
        ("rate", "target", "spread"),
    ),
}
DIVERGING = "the mean loss of the last {window} updates ({loss:.3f}) is above that of predicting zero ({trivial:.3f})."


def remedy(objective: ObjectiveRecipe, names: Iterable[str]) -> str:
    """A sentence with the changes `names` (see `Limit`) that the objective of a run can use.

    An objective without a moving target encoder has no key for the speed of the target, so that change is left out.
    """
    predicts_features = objective.has_target_encoder and not get_objective(objective.name).predicts_pixels
    tried = " (V-JEPA trained at 2.5e-4 with batch 512, and diverged at 5e-4)" if predicts_features else ""
    changes = {
        "rate": f"lower train.base_lr{tried}",
        "warmup": "lengthen train.warmup_share",
        "masks": "mask more tokens or larger blocks (masks)",
        "views": "change the intensity of the views more (views)",
    }
    if predicts_features and objective.teacher is None:
        key = "ema_base" if objective.averaging_share is None else "ema_horizon"
        changes["target"] = f"raise objective.{key}, so that the target moves more slowly"
    regulariser = "variance_covariance" if objective.has_target_encoder else "sigreg"
    weight = objective.variance_covariance if objective.has_target_encoder else objective.weight_of_sigreg
    changes["spread"] = (
        f"raise objective.{regulariser} ({weight:g} now)"
        if weight
        else (f"give objective.{regulariser} a weight (0.04 to start with)")
    )
    possible = [changes[name] for name in names if name in changes]
    if not possible:
        return ""
    sentence = ", ".join(possible[:-1]) + (", or " if len(possible) > 1 else "") + possible[-1]
    return f"{sentence[:1].upper()}{sentence[1:]}."


class CollapseAlarms:
    """Alarms on the loss and the monitor's metrics of one run, from `warmup` updates on.

    An alarm does not end a run, because a short run may recover: it is logged once, written to metrics.jsonl, and a
    checkpoint is saved. Limits are far from what healthy runs show (docs/training.md). `tripped` maps the name of each
    alarm so far to its update.
    """

    def __init__(self, objective: ObjectiveRecipe, warmup: int) -> None:
        self.warmup, self._objective = warmup, objective
        self._trivial = get_objective(objective.name).trivial_loss
        bounds = get_objective(objective.name).alarm_bounds
        self._limits = {name: replace(limit, bound=bounds.get(name, limit.bound)) for name, limit in LIMITS.items()}
        self._losses: deque[tuple[float, float]] = deque(maxlen=LOSS_WINDOW)  # (loss, that of predicting zero)
        self.tripped: dict[str, int] = {}

    def follow_loss(self, loss: float, trivial: float | None = None) -> None:
        """Records the loss of an update, and `trivial`, that of predicting zero, if it is not a constant."""
        constant = math.inf if self._trivial is None else self._trivial
        self._losses.append((loss, constant if trivial is None else trivial))

    def follow_line(self, line: Mapping[str, Any]) -> None:
        """`follow_loss` of an update's metrics."""
        self.follow_loss(line.get("train/loss_hidden", line["train/loss"]), line.get("train/loss_trivial"))

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Continues from the lines of metrics.jsonl."""
        self._losses.clear()
        self.tripped = {}
        for line in lines:
            if "train/loss" in line:
                self.follow_line(line)
            self.tripped |= dict.fromkeys(line.get("alarms", ()), line["update"])

    def check(self, metrics: Mapping[str, float], update: int) -> dict[str, str]:
        """Alarms (name -> what to change) that go off at `update` for the first time in the run."""
        if update < self.warmup + LOSS_WINDOW:
            return {}
        messages = {
            name: f"{limit.metric} is {metrics[limit.metric]:.3g}: {limit.message} "
            f"{remedy(self._objective, limit.remedies)}"
            for name, limit in self._limits.items()
            if math.isfinite(value := metrics.get(limit.metric, math.nan))  # a metric that is missing says nothing
            and (value < limit.bound) == limit.below
            and value != limit.bound
        }
        finite = [pair for pair in self._losses if math.isfinite(pair[0])]  # other updates were not taken
        loss, trivial = math.inf, self._trivial or 0.0
        if 2 * len(finite) > len(self._losses):
            loss, trivial = (fmean(values) for values in zip(*finite, strict=True))
        if loss > trivial:
            reason = DIVERGING.format(window=len(self._losses), loss=loss, trivial=trivial)
            messages["diverging"] = f"{reason} {remedy(self._objective, LIMITS['diverging'].remedies)}"
        new = {name: message for name, message in messages.items() if name not in self.tripped}
        self.tripped |= dict.fromkeys(new, update)
        return new


class PretextAlarm(OctjepaError):
    """The pretext task is broken while its loss looks fine; `alarm` is frozen_target, live_target or context_leak."""

    def __init__(self, alarm: str, message: str) -> None:
        super().__init__(f"alarm {alarm}: {message}")
        self.alarm = alarm


def check_detached(prediction: Prediction) -> None:
    """Raises PretextAlarm when a gradient could reach the target."""
    if prediction.all_targets.requires_grad or prediction.target.requires_grad:
        raise PretextAlarm(
            "live_target",
            "the target features carry a gradient, so both sides can agree on a constant. The target must be computed "
            "by the EMA encoder under no_grad.",
        )


@uncompiled()
@torch.no_grad()
def check_leak(model: VJEPA3D, batch: Batch) -> None:
    """Raises PretextAlarm when a prediction of the first sample depends on a hidden voxel.

    Hidden patches are replaced by others, inverted: no prediction may change by a single bit.
    """
    device = next(model.parameters()).device
    view, target_view, positions, context, target = batch.micro_batch(0, 1).inputs(device)
    context, target = context[:1], target[:1]  # its first mask
    visible = torch.zeros(view.shape[:2], dtype=torch.bool, device=device).scatter(1, context, True)
    changed = torch.where(visible.unsqueeze(-1), view, view.flip(1).neg() + 1.0)
    before = model.predict(view, target_view, positions, context, target).predicted
    after = model.predict(changed, target_view, positions, context, target).predicted
    if not torch.equal(before, after):
        raise PretextAlarm(
            "context_leak",
            "predictions change when hidden patches of the context view change, so the task can be solved by looking. "
            "The context encoder must be given visible tokens only.",
        )


class FrozenTargetCheck:
    """Notices a target that does not move although the student does and the momentum is below 1."""

    def __init__(self, model: VJEPA3D) -> None:
        self._last = self._weights(model)
        self._still = 0

    def check(self, model: VJEPA3D, momentum: float) -> None:
        """After an update. Raises PretextAlarm after FROZEN_AFTER updates without a move."""
        now = self._weights(model)
        student_moved, target_moved = (not torch.equal(a, b) for a, b in zip(now, self._last, strict=True))
        # below fp32's resolution a healthy target does not move either, so momentum near 1 does not count
        if student_moved and not target_moved and momentum < 1.0 - 1e-5:
            self._still += 1
        elif target_moved:
            self._still = 0
        self._last = now
        if self._still >= FROZEN_AFTER:
            raise PretextAlarm(
                "frozen_target",
                f"the target encoder has not moved for {self._still} updates while the student did (momentum "
                f"{momentum:.6f}): it is a random projection, not a teacher. The EMA update must follow every step.",
            )

    @staticmethod
    def _weights(model: VJEPA3D) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the patch embeddings of student and target: enough to see a move, cheap to keep."""
        encoders = (model.context_encoder, model.target_encoder)
        student, target = (next(encoder.embed.parameters()) for encoder in encoders)
        return local_tensor(student.detach()).clone(), local_tensor(target.detach()).clone()


class UnreadableVolumes:
    """Quarantines each volume that cannot be read while training, once, for all ranks.

    The run continues without it; another volume of the order takes its position
    (`octjepa.views.loader.TrainingDataset`). `lines` are those of metrics.jsonl so far.
    """

    def __init__(self, out: Path, volumes: int, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._quarantine, self._volumes = Journal(out / "quarantine.jsonl"), volumes
        self.names = {name for line in lines for name in line.get("unread", ())}

    @property
    def count(self) -> int:
        """Volumes that could not be read, or changed after ingest, so far."""
        return len(self.names)

    def record(self, unreadable: Iterable[tuple[str, str]], runtime: Runtime) -> list[str]:
        """Gathers (volume id, reason) of one update from all ranks; returns the volume ids.

        Raises OctjepaError when more than a fifth of the training volumes is lost.
        """
        reasons = dict(json.loads(pair) for pair in runtime.all_gather(json.dumps(pair) for pair in unreadable))
        new = {name: reason for name, reason in sorted(reasons.items()) if name not in self.names}
        self.names |= set(new)
        if runtime.rank == 0 and new:
            written = {entry.get("file") for entry in self._quarantine.read() if entry.get("stage") == "train"}
            from octjepa.reasons import quarantine_record  # only a run with unreadable volumes needs it

            for name, reason in new.items():
                _log.warning("volume %s cannot be read; another volume takes its position: %s", name, reason)
                if name not in written:  # the run may have been killed between the quarantine and metrics.jsonl
                    self._quarantine.append(quarantine_record(name, "", "train", "unreadable_file", reason))
        if len(self.names) > _MOST_UNREADABLE * self._volumes:
            raise OctjepaError(
                f"{len(self.names)} of {self._volumes} training volumes cannot be read, the last: "
                f"{next(reversed(reasons.values()))}. Is the store's disk or bucket there? `octjepa inspect STORE "
                "--verify` lists the volumes that changed after ingest. Repair the store and continue with --resume"
            )
        return sorted(reasons)
