"""The features of one part of a store's volumes: the unit of work of a rank, a Ray worker or a single process.

A part is written whole and never computed again. What it holds depends on the store and the options, not on the worker,
so every division of the work gives the same table. On one thread the values are the same bits for any batch; with
several threads, on an accelerator or on another machine, sums are taken in another order and features of size 4 differ
by less than 1e-5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int

from octjepa.embed import token_folder
from octjepa.encoders import pooling
from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.encoders.pretrained import SelectedTokens
from octjepa.errors import OctjepaError
from octjepa.files import write_atomic
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.views import geometry
from octjepa.volume import CanonicalVolume

HISTOGRAM_BINS = 32
VERSION = 6  # of the contents of a part


@dataclass(frozen=True)
class EmbeddingOptions:
    """The outputs for each volume. tokens: folder for token features, "" for none; batch: volumes a forward."""

    pools: tuple[str, ...] = pooling.DEFAULT_POOLS
    tokens: str = ""
    per_bscan: bool = False
    batch: int = 16


@dataclass(frozen=True)
class Job:
    """Everything that a worker on any machine needs. `folder` is where parts go; all machines see it.

    weights: hash of the weights that `checkpoint` holds.
    """

    checkpoint: str
    store: str
    folder: Path
    key: str
    options: EmbeddingOptions
    weights: str

    def file(self, number: int) -> Path:
        """Where part `number` is written."""
        return self.folder / f"{self.name(number)}.npz"

    def name(self, number: int) -> str:
        """The name of part `number`, unique to the job."""
        return f"{self.key[:12]}-{number:06d}"


def job_key(weights: str, contract: str, contents: Sequence[str], options: EmbeddingOptions, size: int) -> str:
    """Equal keys mean equal parts: the same weights on the same contents in the same order, the same options."""
    pairs = sorted((name, str(value)) for name, value in asdict(options).items())
    text = "\x1f".join([str(VERSION), weights, contract, str(size), repr(pairs), *contents])
    return hashlib.sha256(text.encode()).hexdigest()


class Embedder:
    """An encoder, ours or another project's, and its randomly initialised encoder on one device."""

    def __init__(self, encoder: FrozenEncoder, options: EmbeddingOptions, device: torch.device) -> None:
        self.encoder, self.untrained = encoder.to(device), encoder.untrained().to(device)
        self.options = options

    def write(self, job: Job, number: int, store: Store, volume_ids: Sequence[str]) -> None:
        """Computes part `number` and writes it; `job.file(number)`, renamed into place last, marks it as done.

        Raises OctjepaError: features that are not finite, tokens beyond half precision, or the disk refuses.
        """
        batches: dict[str, list[np.ndarray]] = {}
        token_batches: dict[str, list[np.ndarray]] = {}
        for start in range(0, len(volume_ids), self.options.batch):
            volumes = [store.read(name) for name in volume_ids[start : start + self.options.batch]]
            selected = [self.encoder.select_tokens(volume) for volume in volumes]
            tokens = {
                "vector": self.encoder.encode_tokens(selected),
                "untrained": self.untrained.encode_tokens(selected),
            }
            for name, features in self._features(volumes, selected, tokens):
                batches.setdefault(name, []).append(np.stack(features))
            if self.options.tokens:
                for name, volume_tokens in tokens.items():
                    named = zip(volume_tokens, volume_ids[start : start + self.options.batch], strict=True)
                    halves = [token_folder.half_precision(volume.features, volume_id) for volume, volume_id in named]
                    token_batches.setdefault(name, []).extend(halves)
                positions = [volume.grid_index.astype(np.int32) for volume in tokens["vector"]]
                token_batches.setdefault("positions", []).extend(positions)
        arrays = {name: np.concatenate(parts).astype(np.float32) for name, parts in batches.items()}
        for name, array in arrays.items():
            if name != "bscan" and not np.isfinite(array).all():
                broken = int((~np.isfinite(array).all(axis=1)).sum())
                raise OctjepaError(f"{name} is not finite in {broken} of {len(array)} volumes; check the checkpoint")
        if token_batches:
            token_arrays = {name: np.concatenate(parts) for name, parts in token_batches.items()}
            token_arrays["counts"] = arrays["token_count"][:, 0].astype(np.int32)
            token_folder.write_part(Path(self.options.tokens), job.name(number), token_arrays)
        arrays["volume_id"] = np.array(volume_ids, dtype=np.str_)
        write_atomic(job.file(number), lambda file: np.savez(file, allow_pickle=False, **arrays))

    def _features(
        self, volumes: Sequence[CanonicalVolume], selected: Sequence[object], tokens: dict[str, list[TokenFeatures]]
    ) -> Iterator[tuple[str, list[np.ndarray]]]:
        """(name, an array for each volume) of every feature block of the embedding table."""
        for name, volume_tokens in tokens.items():
            pairs = zip(volumes, volume_tokens, strict=True)
            yield name, [self.encoder.pool(volume, features, self.options.pools) for volume, features in pairs]
        yield "histogram", [intensity_histogram(volume, self.encoder.preprocessing) for volume in volumes]
        patches = [token_set for token_set in selected if isinstance(token_set, SelectedTokens)]
        if patches:  # an encoder of another project is given images
            yield "intensity", [intensity_features(patch) for patch in patches]
        yield "token_count", [np.array([len(volume.grid_index)]) for volume in tokens["vector"]]
        if self.options.per_bscan:
            means, counts = zip(*map(slice_means, tokens["vector"]), strict=True)
            yield "bscan", list(means)
            yield "bscan_tokens", list(counts)


def slice_means(volume: TokenFeatures) -> tuple[Float[np.ndarray, "slices dim"], Int[np.ndarray, " slices"]]:
    """Mean feature of the tokens in each slice of the grid, NaN if none was selected, and their number."""
    slices = np.unravel_index(volume.grid_index, volume.grid)[0]
    counts = np.bincount(slices, minlength=volume.grid[0])
    sums = np.zeros((volume.grid[0], volume.features.shape[1]))
    np.add.at(sums, slices, volume.features)
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts[:, None], out=means, where=counts[:, None] > 0)
    return means.astype(np.float32), counts


def intensity_features(chosen: SelectedTokens) -> Float[np.ndarray, " statistics"]:
    """`patch_intensity` of the encoder's own patches, by the default pooling: a baseline without a network.

    What an encoder has learned shows in the difference to this, not to the histogram: see docs/exam.
    """
    statistics = patch_intensity(chosen.patches)
    tokens = TokenFeatures(statistics, chosen.grid_index, chosen.grid, chosen.tissue)
    return pooling.pool_tokens(tokens, np.zeros(0, np.int64), (pooling.DEFAULT_POOL,))


def patch_intensity(patches: Float[np.ndarray, "k voxels"]) -> Float[np.ndarray, "k 4"]:
    """Mean, standard deviation, 5th and 95th percentile of the intensity of each patch."""
    values = patches.astype(np.float32)
    return np.stack([values.mean(axis=1), values.std(axis=1), *np.percentile(values, (5, 95), axis=1)], axis=1)


def intensity_histogram(volume: CanonicalVolume, preprocessing: Preprocessing) -> Float[np.ndarray, " bins"]:
    """Shares of tissue voxels in 32 bins of intensity, in the centred view."""
    crop, size = geometry.center_crop(preprocessing), preprocessing.image_size
    view = geometry.apply_transform(volume.pixels, crop, size)
    inside = geometry.tissue_mask(volume.band, crop, volume.pixels.shape[1], size)
    values = view[inside] if inside.any() else view.ravel()
    counts = np.bincount(values // (256 // HISTOGRAM_BINS), minlength=HISTOGRAM_BINS)
    return (counts / counts.sum()).astype(np.float32)
