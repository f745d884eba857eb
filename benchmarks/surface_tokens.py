"""The tokens that surfaces are read from, in phantoms (`benchmarks.phantom_tasks`) and in real eyes
(`benchmarks.real_tokens`).

A surface varies within a token of 1.44 x 0.38 mm, so a readout of one value for each token is wrong by some 26 um even
with the graders' own depths as features (lab/2026-11.md). The segmentation network and hand-made features can have
tokens of any size: here one B-scan thick and 0.19 mm wide. The rows of transformers have the tokens of their weights.
The row `COARSE` shows what the segmentation network's usual tokens give.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

from benchmarks.exam.tokens import Featurise, of_context, of_encoder, of_intensity, of_raw, of_tissue

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.base import GridEncoder
from octjepa.encoders.dense import DenseEncoder
from octjepa.recipe import Recipe

FINE_PATCH = (1, 8, 4)  # voxels of 0.36 x 0.0078 x 0.047 mm
COARSE = "phantom-unet_coarse"


class Tokens(NamedTuple):
    """Features of the tokens of a volume, and the recipe that says which tokens these are."""

    featurise: Featurise
    recipe: Recipe


def surface_tokens(packaged: PretrainedEncoder) -> dict[str, Callable[[], Tokens]]:
    """The makers of every row, by name; cheap rows come first. Random weights have the seed of their recipe."""
    fine = _with_patch(packaged, FINE_PATCH)
    return {
        "outline": lambda: Tokens(of_tissue(fine), fine.recipe),
        "intensity": lambda: Tokens(of_intensity(fine), fine.recipe),
        "context": lambda: Tokens(of_context(fine), fine.recipe),
        "raw_patches": lambda: Tokens(of_raw(fine), fine.recipe),
        "phantom-truth": lambda: tokens_of(load_encoder("phantom-truth")),
        "phantom-tiny": lambda: tokens_of(packaged),
        "random_init": lambda: tokens_of(packaged.untrained()),
        "phantom-unet": lambda: tokens_of(fine_unet(packaged)),
        "random_unet": lambda: tokens_of(fine_unet(packaged).untrained()),
        COARSE: lambda: tokens_of(DenseEncoder.packaged(packaged.preprocessing)),
    }


def tokens_of(encoder: GridEncoder[object]) -> Tokens:
    """The tokens of an encoder."""
    return Tokens(of_encoder(encoder), encoder.recipe)


def fine_unet(packaged: PretrainedEncoder) -> DenseEncoder:
    """The segmentation network with tokens of `FINE_PATCH` voxels."""
    spacing_mm = packaged.preprocessing.target_spacing_mm
    size_mm = tuple(count * step_mm for count, step_mm in zip(FINE_PATCH, spacing_mm, strict=True))
    return DenseEncoder.packaged(packaged.preprocessing, token_mm=(size_mm[0], size_mm[1], size_mm[2]))


def _with_patch(encoder: PretrainedEncoder, patch: tuple[int, int, int]) -> PretrainedEncoder:
    """Cuts volumes into other tokens, for features that need no network."""
    tokens = encoder.recipe.tokens.model_copy(update={"patch_size": patch})
    other = copy(encoder)
    other.recipe = encoder.recipe.model_copy(update={"tokens": tokens})
    return other
