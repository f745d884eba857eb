"""An encoder with linear heads that predict the truth of each token's voxels, and the loss of these heads.

The heads are linear on purpose: what they learn to read, a linear probe of the frozen tokens can read too.

Three heads share one linear layer. `cells`: the class of every cell of 1 x 2 x 4 voxels of a patch. `lesions`: whether
fluid or sub-RPE material fills at least 2, 8 or 30 % of the patch. `boundaries`: how far each of the eight boundaries
is from the centre of the patch, for every slice and half of the columns, in patch heights, up to three.

Labels do not name everything that an encoder knows. A teacher, which is the encoder before this training, keeps the
rest: a further linear head predicts the teacher's tokens (learning without forgetting, Li and Hoiem 2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from octjepa.errors import UsageError
from octjepa.layers import BOUNDARIES
from octjepa.model import Encoder
from octjepa.tasks.recall import Recall
from octjepa.tasks.truth.volumes import LAYERS, UNKNOWN, VOXEL_CLASSES
from octjepa.views.tokens import extract_patches

CELL: Final = (1, 2, 4)  # voxels
HALVES: Final = 2  # of the columns of a patch, for boundaries
SHARES: Final = (0.02, 0.08, 0.3)  # of a patch
# Intraretinal fluid, subretinal fluid, material below the RPE, fluid of either kind.
LESION_GROUPS: Final = ((LAYERS,), (LAYERS + 1,), (LAYERS + 2,), (LAYERS, LAYERS + 1))
REACH: Final = 3.0  # patch heights
_LESION_WEIGHT: Final = 4.0  # of voxels with disease in the loss of the cells


class TokenTruth(NamedTuple):
    """Truth of selected tokens: class of each voxel of a patch, and distance of each boundary in patch heights."""

    labels: UInt8[Tensor, "b k voxels"]
    distances: Float[Tensor, "b k n"]


class TokenOutputs(NamedTuple):
    """Outputs of the heads. `cells` and `lesions` are logits, lesions by group and share; `recall` is standardised."""

    cells: Float[Tensor, "b k cells classes"]
    lesions: Float[Tensor, "b k n"]
    distances: Float[Tensor, "b k m"]
    recall: Float[Tensor, "b k width"]


class TruthNetwork(nn.Module):
    """`encoder` and the heads. The heads start at zero, so the first updates do not disturb the encoder.

    patch: voxels of a token (slice, depth, column). Raises UsageError: they are not multiples of `CELL`.
    """

    def __init__(self, encoder: Encoder, patch: tuple[int, int, int]) -> None:
        super().__init__()
        if any(size % part for size, part in zip(patch, CELL, strict=True)):
            raise UsageError(
                f"the encoder has patches of {patch} voxels (slice, depth, column): the truth is learned in cells of "
                f"{CELL}, so expected multiples of them"
            )
        self.encoder, self.patch = encoder, patch
        self.grid = tuple(size // part for size, part in zip(patch, CELL, strict=True))
        self.widths = (
            math.prod(self.grid) * VOXEL_CLASSES,
            len(LESION_GROUPS) * len(SHARES),
            len(BOUNDARIES) * patch[0] * HALVES,
        )
        self.heads = nn.Linear(encoder.width, sum(self.widths))
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)
        self.recall = Recall(encoder.width, encoder.width)

    def forward(self, patches: Float[Tensor, "b k voxels"], positions: Float[Tensor, "b k 3"]) -> TokenOutputs:
        tokens = self.encoder(patches, positions)
        cells, lesions, distances = self.heads(tokens).float().split(self.widths, -1)
        return TokenOutputs(cells.unflatten(-1, (-1, VOXEL_CLASSES)), lesions, distances, self.recall(tokens))

    def cell_labels(self, labels: UInt8[Tensor, "b k voxels"]) -> UInt8[Tensor, "b k cells v"]:
        """Voxel labels grouped by cell."""
        (a, b, c), (p, q, r) = self.grid, CELL
        tiles = labels.unflatten(-1, (a, p, b, q, c, r)).permute(0, 1, 2, 4, 6, 3, 5, 7)
        return tiles.flatten(5).flatten(2, 4)


class Known(NamedTuple):
    """How much of the truth is known to each head: the sums of the weights in its loss."""

    cells: Float[Tensor, ""]
    lesions: Float[Tensor, ""]
    distances: Float[Tensor, ""]


@dataclass(frozen=True)
class TruthLosses:
    """Mean losses of the three heads, each over what is known."""

    cells: Float[Tensor, ""]
    lesions: Float[Tensor, ""]
    distances: Float[Tensor, ""]

    @property
    def total(self) -> Float[Tensor, ""]:
        """The training loss without the teacher's share."""
        return self.cells + self.lesions + 0.5 * self.distances


def _weights(network: TruthNetwork, truth: TokenTruth) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of voxels [b, k, cells, v], of tokens [b, k] and of distances [b, k, n], 0: unknown."""
    cells = network.cell_labels(truth.labels)
    of_cells = (cells != UNKNOWN).float() * torch.where(cells >= LAYERS, _LESION_WEIGHT, 1.0)
    return of_cells, (truth.labels != UNKNOWN).float().mean(-1), torch.isfinite(truth.distances).float()


def known_truth(network: TruthNetwork, truth: TokenTruth) -> Known:
    """How much of `truth` is known."""
    return Known(*(weights.sum() for weights in _weights(network, truth)))


def truth_losses(
    network: TruthNetwork, outputs: TokenOutputs, truth: TokenTruth, known_weights: Known | None = None
) -> TruthLosses:
    """Losses of `outputs`. Unknown voxels and boundaries out of reach of the scan do not count.

    known_weights: those of a batch, if `truth` is a part of it: the losses of the parts add up to those of the batch.
    None: those of `truth`.
    """
    known_weights = known_weights or known_truth(network, truth)
    of_voxels, of_tokens, of_distances = _weights(network, truth)
    cells = network.cell_labels(truth.labels).long()  # [b, k, cells, v]
    log_p = functional.log_softmax(outputs.cells, -1)
    picked = log_p.gather(-1, cells.clamp(max=VOXEL_CLASSES - 1))
    lesion = functional.binary_cross_entropy_with_logits(
        outputs.lesions, lesion_targets(truth.labels), reduction="none"
    )
    distance = functional.smooth_l1_loss(
        outputs.distances, torch.nan_to_num(truth.distances), reduction="none", beta=0.1
    )
    return TruthLosses(
        -(picked * of_voxels).sum() / known_weights.cells.clamp(min=1),
        (lesion.mean(-1) * of_tokens).sum() / known_weights.lesions.clamp(min=1),
        (distance * of_distances).sum() / known_weights.distances.clamp(min=1),
    )


def lesion_targets(labels: UInt8[Tensor, "b k voxels"]) -> Float[Tensor, "b k n"]:
    """1.0 where a group fills at least a share of the patch; groups outside, shares inside."""
    targets = []
    for group in LESION_GROUPS:
        share = torch.stack([labels == member for member in group]).any(0).float().mean(-1)
        targets += [(share >= least).float() for least in SHARES]
    return torch.stack(targets, -1)


def token_distances(
    boundaries: Float[np.ndarray, "D 8 W"],
    index: Int[np.ndarray, " k"],
    grid: tuple[int, int, int],
    patch: tuple[int, int, int],
) -> Float[np.ndarray, "k n"]:
    """Distance of each boundary from the centre of the tokens `index` in patch heights, clipped to `REACH`.

    The order is boundary, slice, half of the columns. NaN where the boundary is unknown.
    """
    (d, _, w), (p, q, r) = grid, patch
    count = boundaries.shape[1]
    tiles = boundaries.reshape(d, p, count, w, HALVES, r // HALVES).mean(-1)  # [d, p, 8, w, 2]
    of_column = tiles.transpose(0, 3, 2, 1, 4).reshape(d, w, -1)
    z, y, x = np.unravel_index(index, grid)
    centre = (y + 0.5) * q - 0.5
    return np.clip((of_column[z, x] - centre[:, None]) / q, -REACH, REACH).astype(np.float32)


def token_labels(
    labels: UInt8[np.ndarray, "D H W"], index: Int[np.ndarray, " k"], patch: tuple[int, int, int]
) -> UInt8[np.ndarray, "k voxels"]:
    """The voxel classes of the tokens `index`."""
    return extract_patches(labels, patch, index)
