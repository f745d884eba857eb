"""Facts about objectives that recipes need: which predictor, which tokens, which encoder is exported.

Validating a recipe reads these facts, and must not import torch, which the classes in `octjepa.objectives` need.
So the facts of the package's own objectives are this table, and `register_objective` copies them into the classes. An
objective of another package states the same facts as class attributes; its class is imported when a recipe names it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from octjepa.errors import UsageError
from octjepa.registry import Registry


@dataclass(frozen=True)
class ObjectiveFacts:
    """The attributes of `octjepa.objectives.base.Objective` that decide whether a key of a recipe is used.

    `module` is the module of `octjepa.objectives` that holds the class; it is empty for objectives of other packages.
    """

    module: str = ""
    predictor: Literal["transformer", "mlp", "projector"] = "transformer"
    predictor_width: int | None = None
    exported_encoder: Literal["target", "student"] = "target"
    supervises_visible: bool = False

    def attributes(self) -> dict[str, str | int | bool | None]:
        """The facts that are attributes of the class."""
        return {key: value for key, value in asdict(self).items() if key != "module"}


FACTS = {
    "vjepa": ObjectiveFacts("jepa"),
    "vjepa_dense": ObjectiveFacts("jepa", supervises_visible=True),
    "normalized_mse": ObjectiveFacts("jepa", predictor="mlp"),
    "levjepa": ObjectiveFacts("levjepa", predictor="projector", exported_encoder="student"),
    "mae": ObjectiveFacts("mae", exported_encoder="student"),
    "mae_patch_norm": ObjectiveFacts("mae", exported_encoder="student"),
    "noise2noise": ObjectiveFacts("mae", exported_encoder="student", supervises_visible=True),
}


# `octjepa.objectives.base` says which modules hold the classes.
OBJECTIVES: Registry[Any] = Registry("objective", "octjepa.objectives", names=FACTS, takes_classes=True)
# `truth` is a task. Users look for it among the objectives, so the message names the command of the task.
TRUTH = "truth"
TRUTH_HINT = (
    "truth learns from the true class of every voxel, which no store holds: python -m octjepa.tasks.truth.train draws "
    "phantoms that have it, and takes a second objective (--with)"
)
BASE = "octjepa.objectives.base.Objective"


def objective_facts(name: str) -> ObjectiveFacts:
    """The facts of the objective `name`, which may be a `module:Class`.

    Raises UsageError: there is none, its package or module fails to import, or its class is not an objective.
    """
    if name in FACTS:
        return FACTS[name]
    kind = OBJECTIVES.get(name)
    # The base class is compared by name, because importing it would import torch.
    bases = {f"{base.__module__}.{base.__qualname__}": base for base in getattr(kind, "__mro__", ())}
    if BASE not in bases:
        raise UsageError(f"objective {name} is not a class derived from {BASE}: see docs/extend.md")
    if kind.loss is bases[BASE].loss:
        raise UsageError(f"objective {name} has no method loss(self, predicted, target): see docs/extend.md")
    if not hasattr(kind, "trivial_loss"):
        raise UsageError(
            f"objective {name} does not state trivial_loss: the loss of always predicting zero, or None if it "
            "depends on the targets"
        )
    return ObjectiveFacts("", kind.predictor, kind.predictor_width, kind.exported_encoder, kind.supervises_visible)
