"""A pretraining objective: its targets, its loss, the predictor it needs, and the trivial loss that it should beat.

An objective is one class, in a module of this package (`octjepa.recipe.objectives` lists which) or in a package that
declares it as an entry point of the group `octjepa.objectives`. No other file names it. A new objective may be as short
as

    @register_objective("smooth_l1")
    class SmoothL1(VJEPA):
        def loss(self, predicted, target):
            return F.smooth_l1_loss(predicted.float(), target.float())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.errors import UsageError
from octjepa.recipe.objectives import FACTS, OBJECTIVES, TRUTH, TRUTH_HINT

OBJECTIVES.locate({name: f"{__package__}.{facts.module}" for name, facts in FACTS.items()})

Tokens = Float[Tensor, "b m f"]
Scalar = Float[Tensor, ""]
Registered = TypeVar("Registered", bound="Objective")


class Prediction(NamedTuple):
    """The values that the objective compares: at each hidden token, or of each view, prediction and target, fp32.

    `context` are the student's features of visible tokens (of all tokens where the predictor is an MLP). `visible`
    holds predictions and targets at visible tokens, where the objective supervises them. With a projector m is the two
    views of a mask, and `all_targets` equals `target`. There are r rows, one for each mask of the b samples
    (`octjepa.views.loader.Batch`).
    """

    predicted: Float[Tensor, "r m f"]
    target: Float[Tensor, "r m f"]
    all_targets: Float[Tensor, "b t f"]
    context: Float[Tensor, "r n w"]
    visible: tuple[Float[Tensor, "r n f"], Float[Tensor, "r n f"]] | None = None


class Objective:
    """Base of all objectives; the attributes are the defaults of V-JEPA 2.

    `predictor` "transformer": the encoder sees only visible tokens, and a transformer predicts at hidden positions.
    "mlp": the encoder sees every position, hidden patches replaced by a learned mask token, and an MLP predicts each
    token by itself. "projector": nothing is predicted. The visible and the hidden tokens of each mask are two views of
    the volume. An MLP projects the mean token of each view. `loss` compares the projections `[r, 2, p]` with their mean
    over the views of the volume. No target encoder exists. `predictor_width` and `predictor_depth` replace those of the
    model's size, unless a recipe does.
    """

    predictor: ClassVar[Literal["transformer", "mlp", "projector"]] = "transformer"
    predictor_width: ClassVar[int | None] = None
    predictor_depth: ClassVar[int | None] = None
    target_depths: ClassVar[int] = 1  # depths of the encoder that are predicted, spread evenly, the last included
    predicts_pixels: ClassVar[bool] = False  # targets are voxels; otherwise features of the EMA target encoder
    exported_encoder: ClassVar[Literal["target", "student"]] = "target"  # the encoder that a checkpoint is loaded as
    supervises_visible: ClassVar[bool] = False  # a loss at visible tokens as well, by `visible_loss`
    needs_halves: ClassVar[bool] = False  # views of two halves of the B-scans: one view would be its own target
    # the loss of always predicting zero, which training must come below; None: it depends on the targets
    trivial_loss: ClassVar[float | None]
    alarm_bounds: ClassVar[dict[str, float]] = {}  # bounds of `octjepa.train.guards.LIMITS` that differ here, by name

    def targets(
        self, patches: Float[Tensor, "b t voxels"], features: Callable[[], Float[Tensor, "b t f"]]
    ) -> Float[Tensor, "b t g"]:
        """The targets at every token; `features()` are those of the target encoder, layer-normed, fp32."""
        return features()

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        """A mean over hidden tokens, so that equal shares of a batch average to the whole."""
        raise NotImplementedError

    def visible_loss(
        self, predicted: Float[Tensor, "b n f"], target: Float[Tensor, "b n f"], weight: Float[Tensor, "b n"]
    ) -> Scalar:
        """The loss at visible tokens, each weighted by its distance to the nearest hidden one."""
        raise NotImplementedError


def register_objective(name: str) -> Callable[[type[Registered]], type[Registered]]:
    """Decorator that adds a class as the objective `name`, with the facts that `octjepa.recipe.objectives` states.

    Raises ValueError: the name is taken.
    """

    def add(kind: type[Registered]) -> type[Registered]:
        for key, value in FACTS[name].attributes().items() if name in FACTS else ():
            setattr(kind, key, value)
        return OBJECTIVES.register(name)(kind)

    return add


def get_objective(name: str) -> Objective:
    """The objective called `name`. Raises UsageError listing all names when there is none."""
    if name == TRUTH and name not in OBJECTIVES:
        raise UsageError(TRUTH_HINT)
    objective: Objective = OBJECTIVES.get(name)()
    return objective


def gather_tokens(x: Float[Tensor, "b t f"], index: Int[Tensor, "r n"]) -> Float[Tensor, "r n f"]:
    """Tokens `index` of each sample; with several masks a sample, row `i * b + j` of `index` is of sample `j`."""
    parts = [torch.gather(x, 1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1])) for rows in index.split(len(x))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cosine(predicted: Tokens, target: Tokens) -> Scalar:
    """Mean cosine over hidden tokens, logged next to every loss."""
    return F.cosine_similarity(predicted.float(), target.float(), dim=-1).mean()
