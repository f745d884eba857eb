"""A teacher's tokens at the places of a student's tokens.

Teacher and student may differ in grid, patch, spacing and size. Both read canonical volumes, in which slices and
columns count from the centre of the scan and depth from where flattening puts Bruch's membrane. So a place has the same
millimetres in both, and the teacher's feature map is interpolated there. A student's token that covers several tokens
of the teacher takes their mean.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing

_MOST_POINTS = 4  # along an axis of a student's token
_LEAST_WEIGHT = 0.5  # of the interpolation that must fall on tokens of the teacher


def check_teacher(teacher: FrozenEncoder, student: Preprocessing) -> tuple[int, int, int]:
    """The teacher's grid. Raises UsageError: tokens without positions, or another orientation or flattening."""
    if teacher.grid is None:
        raise UsageError(
            f"teacher {teacher.name} gives tokens without positions (a class token, or one vector of a volume): "
            "expected an encoder with a grid of tokens"
        )
    for key in ("orientation", "flatten"):
        of_teacher, of_student = getattr(teacher.preprocessing, key), getattr(student, key)
        if of_teacher != of_student:
            raise UsageError(
                f"teacher {teacher.name} reads volumes with {key} {of_teacher}, but the student reads {of_student}, so "
                f"their positions do not match: give a teacher with the same {key}"
            )
    return teacher.grid


@dataclass(frozen=True)
class View:
    """A crop of a stored volume: its first voxel, its size, and whether slices, depths and columns are mirrored."""

    preprocessing: Preprocessing
    offset: tuple[int, int, int]
    mirrored: tuple[bool, bool, bool] = (False, False, False)

    @classmethod
    def centred(cls, preprocessing: Preprocessing) -> View:
        """The view that a frozen encoder reads."""
        return cls(preprocessing, preprocessing.margin)

    def millimetres(self, edges: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Places in the eye of places in the view, which are in voxels from its first edge."""
        size, mirrored = np.asarray(self.preprocessing.image_size), np.asarray(self.mirrored)
        stored = np.where(mirrored, size - edges, edges) + np.asarray(self.offset)
        return (stored - self._origin) * np.asarray(self.preprocessing.target_spacing_mm)

    def voxels(self, millimetres: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """The inverse of `millimetres`."""
        stored = millimetres / np.asarray(self.preprocessing.target_spacing_mm) + self._origin
        size, mirrored = np.asarray(self.preprocessing.image_size), np.asarray(self.mirrored)
        inside = stored - np.asarray(self.offset)
        return np.where(mirrored, size - inside, inside)

    @property
    def _origin(self) -> Float[np.ndarray, " 3"]:
        """The middle of slices and columns, and the depth of Bruch's membrane, in voxels of the stored volume."""
        d, h, w = self.preprocessing.stored_size
        return np.array([d / 2, round(self.preprocessing.axial_anchor * (h - 1)) + 0.5, w / 2])


def teach(
    taught: TokenFeatures,
    teacher: Preprocessing,
    view: View,
    patch: tuple[int, int, int],
    index: Int[np.ndarray, " k"],
) -> tuple[Float[np.ndarray, "k dim"], Bool[np.ndarray, " k"]]:
    """(the teacher's features at the student's tokens `index` of `view`, whether the teacher has any there).

    taught: the teacher's tokens of its centred view; `teacher`: its preprocessing. patch: voxels of a student's token.
    """
    grid = tuple(size // part for size, part in zip(view.preprocessing.image_size, patch, strict=True))
    token = np.asarray(teacher.image_size) / np.asarray(taught.grid)  # voxels of the teacher, not always whole
    extent_mm = np.asarray(patch) * np.asarray(view.preprocessing.target_spacing_mm)
    ratio = extent_mm / (token * np.asarray(teacher.target_spacing_mm))
    points = [min(max(math.ceil(r - 1e-6), 1), _MOST_POINTS) for r in ratio]
    first = np.stack(np.unravel_index(index, grid), axis=-1) * np.asarray(patch, dtype=np.float64)  # [k, 3]
    total = np.zeros((len(index), taught.features.shape[1]))
    weight = np.zeros(len(index))
    features, has_features = _map_of(taught)
    for shares in itertools.product(*((np.arange(n) + 0.5) / n for n in points)):
        at = View.centred(teacher).voxels(view.millimetres(first + np.asarray(shares) * np.asarray(patch)))
        values, weights = _interpolate(features, has_features, taught.grid, at / token - 0.5)
        total += values
        weight += weights
    has_weight = weight > _LEAST_WEIGHT * math.prod(points)
    return (total / np.maximum(weight, 1e-6)[:, None]).astype(np.float32), has_weight


def _map_of(taught: TokenFeatures) -> tuple[Float[np.ndarray, "cells dim"], Float[np.ndarray, " cells"]]:
    """(features of every cell of the grid, 1 for cells that have a token)."""
    cells = math.prod(taught.grid)
    features = np.zeros((cells, taught.features.shape[1]), np.float32)
    cell_known = np.zeros(cells)
    features[taught.grid_index], cell_known[taught.grid_index] = taught.features, 1.0
    return features, cell_known


def _interpolate(
    features: Float[np.ndarray, "cells dim"],
    known: Float[np.ndarray, " cells"],
    grid: tuple[int, int, int],
    at: Float[np.ndarray, "k 3"],
) -> tuple[Float[np.ndarray, "k dim"], Float[np.ndarray, " k"]]:
    """(weighted sum of the eight cells around each place, the sum of the weights); 0 outside of the grid.

    `at` counts cells from the centre of the first one. Up to half a cell outside of the outer centres is still inside.
    """
    most = np.asarray(grid) - 1
    inside = ((at >= -0.5 - 1e-6) & (at <= most + 0.5 + 1e-6)).all(axis=1)
    clipped = np.clip(at, 0, most)
    low = np.minimum(np.floor(clipped).astype(np.int64), np.maximum(most - 1, 0))
    part = clipped - low
    values, weights = np.zeros((len(at), features.shape[1])), np.zeros(len(at))
    for corner in itertools.product((0, 1), repeat=3):
        share = np.where(corner, part, 1 - part).prod(axis=1) * inside
        cell = np.ravel_multi_index(tuple(np.minimum(low + np.asarray(corner), most).T), grid)
        share = share * known[cell]
        values += share[:, None] * features[cell]
        weights += share
    return values, weights
