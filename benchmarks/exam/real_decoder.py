"""A decoder for real eyes: fluid by convolutions over tokens and voxels, learned from one eye.

The decoder is that of `octjepa segment` with the settings of `segment_decoder`, but for fewer updates, the encoder
frozen. It is trained on the moved copies of one eye that the linear head learns from, without validation, and calls
fluid what it gives half or more of the probability. The row `intensity` is the same decoder without tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from octjepa.encoders import PretrainedEncoder
from octjepa.recipe import Preprocessing
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.tasks.segment import decoder
from octjepa.tasks.segment.recipe import DecoderRecipe
from octjepa.tasks.segment.windows import LabelledVolume, PositionPrior
from octjepa.views import geometry

from .real_eyes import RealEye, shifted
from .real_tasks import SHIFTS, Segment, Segmentation, fluid, on_real_eyes
from .results import Finding, LeftOut
from .truth import COLUMNS

# 400 updates until 2026-11-26; fewer for the ten minutes that an exam may take (lab/2026-11.md)
SETTINGS = DecoderRecipe(width=8, updates=150, batch=2, lr=3e-3, encoder_decay=None)
_CLASSES = 2  # background, fluid


def read_decoded(work: Path, encoder: PretrainedEncoder, blind: bool, seed: int) -> Iterator[Finding | LeftOut]:
    """Fluid by a decoder above one encoder, or by the same without its tokens."""
    segment = fluid_from_decoder(encoder, blind, seed)
    measure = partial(fluid, segment=segment, task="real_fluid_decoder")
    return on_real_eyes(work, encoder.recipe.preprocessing, "real_fluid_decoder", "dice", measure)


def fluid_from_decoder(
    encoder: PretrainedEncoder, blind: bool, seed: int, settings: DecoderRecipe = SETTINGS
) -> Segment:
    """By a decoder above the encoder's tokens; `blind` gives it none."""
    preprocessing = encoder.recipe.preprocessing

    def segment(train_eye: RealEye, test_eye: RealEye) -> Segmentation:
        learned = [(eye.volume, labels_of(eye, preprocessing)) for eye in (shifted(train_eye, *one) for one in SHIFTS)]

        def readers(split: str) -> Sequence[decoder.ReadVolume]:
            return [lambda one=one: one for one in learned] if split == "train" else []

        head, *_ = decoder.train(encoder, settings, seed, prior_by_depth(learned), readers, blind)
        return Segmentation(head.scores(test_eye.volume)[1][_view(preprocessing)], 0.5)

    return segment


def prior_by_depth(learned: Sequence[LabelledVolume]) -> PositionPrior:
    """The shares at each depth, everywhere the same: where fluid is in one eye says nothing of another."""
    found = PositionPrior.from_labels((labels for _, labels in learned), _CLASSES, COLUMNS)
    return PositionPrior(
        np.broadcast_to(found.shares.mean(axis=(1, 3), keepdims=True), found.shares.shape), found.columns
    )


def labels_of(eye: RealEye, preprocessing: Preprocessing) -> UInt8[np.ndarray, "D H W"]:
    """1 where the grader saw fluid, on the stored volume; 255 where nobody looked."""
    found = np.full(eye.volume.pixels.shape, UNLABELLED, np.uint8)
    found[_view(preprocessing)] = np.where(eye.graded, eye.fluid, UNLABELLED)
    return found


def _view(preprocessing: Preprocessing) -> tuple[slice, ...]:
    """The centred view as slices of a stored volume."""
    corner = geometry.center_crop(preprocessing).corner
    return tuple(slice(start, start + size) for start, size in zip(corner, preprocessing.image_size, strict=True))
