"""Features of the segmentation network for every patch of an encoder, a reference for the encoder's frozen tokens.

The network reads native B-scans. Its last 32 features, its probability of fluid and its classes are carried to the
encoder's grid; each patch has the mean and the maximum of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from benchmarks.exam.tokens import patches_of
from benchmarks.exam.truth import view_voxels
from jaxtyping import Float, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.recipe import Recipe
from octjepa.tasks.segmenter.inference import Segmenter
from octjepa.volume import CanonicalVolume

_FEATURE_MM = (2 * 0.0078, 2 * 0.0234)  # a feature covers two rows and two columns of the network's grid


@contextmanager
def recorded_features(segmenter: Segmenter) -> Iterator[list[torch.Tensor]]:
    """Outputs of the last block of the network while it segments, `[N, 32, H / 2, W / 2]`."""
    found: list[torch.Tensor] = []
    block = segmenter.network.up[-1]  # type: ignore[union-attr,index]
    hook = block.register_forward_hook(lambda _module, _inputs, output: found.append(output.float()))
    try:
        yield found
    finally:
        hook.remove()


def patch_features(
    segmenter: Segmenter,
    frames: UInt8[np.ndarray, "D H W"],
    spacing_mm: tuple[float, float, float],
    native: NativeMap,
    recipe: Recipe,
    sparse: bool = False,
) -> Float[np.ndarray, "patches f"]:
    """Features of every patch of the centred view of a scan; `native` maps its stored volume to `frames`."""
    with recorded_features(segmenter) as outputs:
        result = segmenter.predict(frames, spacing_mm, sparse=sparse)
    features = torch.cat(outputs).numpy()  # [D, 32, h, w]
    at, inside = view_voxels(native, recipe.preprocessing, 1)
    rows, columns = (
        np.clip(((at[..., axis] + 0.5) * spacing_mm[axis] / _FEATURE_MM[axis - 1]).astype(int), 0, count - 1)
        for axis, count in ((1, features.shape[2]), (2, features.shape[3]))
    )
    maps = [features[at[..., 0], channel, rows, columns] for channel in range(features.shape[1])]
    maps += [result.fluid[at[..., 0], at[..., 1], at[..., 2]].astype(np.float32)]
    maps += [
        (result.classes[at[..., 0], at[..., 1], at[..., 2]] == kind).astype(np.float32)
        for kind in range(1, len(result.class_names))
    ]
    tiles = [patches_of(np.where(inside, one, 0), recipe.grid, recipe.tokens.patch_size) for one in maps]
    return np.stack([value for one in tiles for value in (one.mean(axis=1), one.max(axis=1))], axis=1)


def selected_features(
    encoder: PretrainedEncoder, volume: CanonicalVolume, features: Float[np.ndarray, "patches f"]
) -> TokenFeatures:
    """Those of the tokens that the encoder selects in `volume`."""
    one = encoder.select_tokens(volume)
    return TokenFeatures(features[one.grid_index], one.grid_index, one.grid, one.tissue)
