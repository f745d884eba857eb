"""Alarms for faults that make a run worthless while its loss looks fine: each stops the run and says what is wrong.

A frozen target (EMA never applied), a target with a live gradient, and a context that sees what it must predict. The
last is tested by doing: hidden patches are replaced by others, inverted, and no prediction may change by a single bit.
"""

from __future__ import annotations

import torch

from octjepa.distributed.tensors import local_tensor
from octjepa.errors import OctjepaError
from octjepa.model import VJEPA3D
from octjepa.model.blocks import uncompiled
from octjepa.objective.base import Prediction
from octjepa.views.loader import Batch

LEAK_CHECK_EVERY = 200
FROZEN_AFTER = 5


class PretextAlarm(OctjepaError):
    """The pretext task is broken; `alarm` is frozen_target, live_target or context_leak."""

    def __init__(self, alarm: str, message: str) -> None:
        super().__init__(f"alarm {alarm}: {message}")
        self.alarm = alarm


def check_detached(outcome: Prediction) -> None:
    """Raises PretextAlarm when a gradient could reach the target."""
    if outcome.all_targets.requires_grad or outcome.target.requires_grad:
        raise PretextAlarm(
            "live_target",
            "the target features carry a gradient, so both sides can agree on a constant. The target must be computed "
            "by the EMA encoder under no_grad.",
        )


@uncompiled()
@torch.no_grad()
def check_leak(model: VJEPA3D, batch: Batch) -> None:
    """Raises PretextAlarm when a prediction of the first sample depends on a hidden voxel."""
    one = batch.micro_batch(0, 1)
    device = next(model.parameters()).device
    view, target_view, positions, context, target = one.inputs(device)
    seen = torch.zeros(view.shape[:2], dtype=torch.bool, device=device).scatter(1, context, True)
    changed = torch.where(seen.unsqueeze(-1), view, view.flip(1).neg() + 1.0)
    before = model.predict(view, target_view, positions, context, target).predicted
    after = model.predict(changed, target_view, positions, context, target).predicted
    if not torch.equal(before, after):
        raise PretextAlarm(
            "context_leak",
            "predictions change when hidden patches of the context view change, so the task can be solved by looking. "
            "The context encoder must be given visible tokens only.",
        )


class TargetWatch:
    """Notices a target that does not move although the student does and the momentum is below 1."""

    def __init__(self, model: VJEPA3D) -> None:
        self._last = _fingerprint(model)
        self._still = 0

    def check(self, model: VJEPA3D, momentum: float) -> None:
        """After an update. Raises PretextAlarm after FROZEN_AFTER updates without a move."""
        now = _fingerprint(model)
        moved_student = not torch.equal(now[0], self._last[0])
        moved_target = not torch.equal(now[1], self._last[1])
        # below fp32's resolution a healthy target stands still too, so momentum near 1 does not count
        if moved_student and not moved_target and momentum < 1.0 - 1e-5:
            self._still += 1
        elif moved_target:
            self._still = 0
        self._last = now
        if self._still >= FROZEN_AFTER:
            raise PretextAlarm(
                "frozen_target",
                f"the target encoder has not moved for {self._still} updates while the student did (momentum "
                f"{momentum:.6f}): it is a random projection, not a teacher. The EMA update must follow every step.",
            )


def _fingerprint(model: VJEPA3D) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the patch embedding's weights of student and target: enough to see a move, cheap to keep."""
    student, target = model.context_encoder.embed.weight, model.target_encoder.embed.weight
    return local_tensor(student.detach()).clone(), local_tensor(target.detach()).clone()
