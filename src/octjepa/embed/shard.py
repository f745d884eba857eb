"""A part of the volumes of a store, from pixels to arrays: the piece of work that a rank, a Ray worker or one process
takes, writes whole, and never does again.

What a part holds is decided by the store and the options, not by who works on it, so every division of the work gives
the same rows. On one thread the values are the same bits for any batch; with several threads, on an accelerator or on
another machine, sums are taken in another order and features of size 4 differ by less than 1e-5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from octjepa.checkpoint import PretrainedEncoder
from octjepa.checkpoint.encoder import TokenFeatures
from octjepa.embed import pooling, token_folder
from octjepa.errors import OctjepaError
from octjepa.files import write_atomic
from octjepa.recipe import Preprocessing
from octjepa.store import CanonicalVolume, Store
from octjepa.views import geometry

HISTOGRAM_BINS = 32
VERSION = 1  # of what a part holds


@dataclass(frozen=True)
class EmbeddingOptions:
    """What is computed of each volume. tokens: folder for token features, "" for none; batch: volumes a forward."""

    pools: tuple[str, ...] = pooling.DEFAULT_POOLS
    tokens: str = ""
    per_bscan: bool = False
    batch: int = 16


@dataclass(frozen=True)
class Job:
    """Everything that a worker on any machine needs. `folder` is where parts go; all machines see it."""

    checkpoint: str
    store: str
    folder: Path
    key: str
    wanted: EmbeddingOptions

    def file(self, number: int) -> Path:
        return self.folder / f"{self.name(number)}.npz"

    def name(self, number: int) -> str:
        return f"{self.key[:12]}-{number:06d}"


def weights_hash(encoder: PretrainedEncoder) -> str:
    """SHA-256 over names and values of the weights."""
    digest = hashlib.sha256()
    for name, value in sorted(encoder.encoder.state_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(value.detach().cpu().numpy()).tobytes())
    return digest.hexdigest()


def job_key(weights: str, contract: str, contents: Sequence[str], wanted: EmbeddingOptions, size: int) -> str:
    """Equal keys mean equal parts: the same weights on the same contents in the same order, the same options."""
    options = sorted((name, str(value)) for name, value in asdict(wanted).items())
    text = "\x1f".join([str(VERSION), weights, contract, str(size), repr(options), *contents])
    return hashlib.sha256(text.encode()).hexdigest()


class Embedder:
    """The encoder and its untrained twin on one device."""

    def __init__(self, encoder: PretrainedEncoder, wanted: EmbeddingOptions, device: torch.device) -> None:
        self.encoder, self.untrained = encoder.to(device), encoder.untrained().to(device)
        self.wanted = wanted

    def write(self, job: Job, number: int, store: Store, volume_ids: Sequence[str]) -> None:
        """Computes part `number` and writes it; its file in `job.folder`, renamed into place last, says it is done."""
        arrays: dict[str, list[np.ndarray]] = {}
        token_arrays: dict[str, list[np.ndarray]] = {}
        for start in range(0, len(volume_ids), self.wanted.batch):
            volumes = [store.read(name) for name in volume_ids[start : start + self.wanted.batch]]
            found = {
                "vector": self.encoder.encode_volumes(volumes),
                "untrained": self.untrained.encode_volumes(volumes),
            }
            for name, array in self._rows(volumes, found):
                arrays.setdefault(name, []).append(array)
            if self.wanted.tokens:
                for name, many in found.items():
                    token_arrays.setdefault(name, []).append(np.stack([t.features.astype(np.float16) for t in many]))
                places = np.stack([one.grid_index.astype(np.int32) for one in found["vector"]])
                token_arrays.setdefault("places", []).append(places)
        whole = {name: np.concatenate(parts) for name, parts in arrays.items()}
        for name, array in whole.items():
            if name != "bscan" and not np.isfinite(array).all():
                broken = int((~np.isfinite(array).all(axis=1)).sum())
                raise OctjepaError(f"{name} is not finite in {broken} of {len(array)} volumes; check the checkpoint")
        if token_arrays:
            together = {name: np.concatenate(parts) for name, parts in token_arrays.items()}
            token_folder.write_part(Path(self.wanted.tokens), job.name(number), together)
        whole["volume_id"] = np.array(volume_ids, dtype=np.str_)
        write_atomic(job.file(number), lambda file: np.savez(file, allow_pickle=False, **whole))

    def _rows(
        self, volumes: list[CanonicalVolume], found: dict[str, list[TokenFeatures]]
    ) -> list[tuple[str, np.ndarray]]:
        layers = [pooling.tissue_layers(volume, self.encoder.recipe) for volume in volumes]
        rows = [
            (
                name,
                [pooling.pool_tokens(t, at[t.grid_index], self.wanted.pools) for t, at in zip(m, layers, strict=True)],
            )
            for name, m in found.items()
        ]
        rows.append(("histogram", [histogram(volume, self.encoder) for volume in volumes]))
        rows.append(("intensity", [intensity_features(volume, self.encoder) for volume in volumes]))
        if self.wanted.per_bscan:
            rows.append(("bscan", [slab_means(one) for one in found["vector"]]))
            rows.append(("bscan_tokens", [slab_counts(one).astype(np.float32) for one in found["vector"]]))
        return [(name, np.stack(many).astype(np.float32)) for name, many in rows]


def _slabs(one: TokenFeatures) -> np.ndarray:
    """Which slice of the grid each token lies in."""
    return np.unravel_index(one.grid_index, one.grid)[0]


def slab_counts(one: TokenFeatures) -> np.ndarray:
    """Tokens in each slice of the grid."""
    return np.bincount(_slabs(one), minlength=one.grid[0])


def slab_means(one: TokenFeatures) -> Float[np.ndarray, "slabs dim"]:
    """Mean feature of the tokens in each slice of the grid; NaN where none was selected."""
    slabs, counts = _slabs(one), slab_counts(one)
    sums = np.zeros((one.grid[0], one.features.shape[1]))
    np.add.at(sums, slabs, one.features)
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts[:, None], out=means, where=counts[:, None] > 0)
    return means.astype(np.float32)


def histogram(volume: CanonicalVolume, encoder: PretrainedEncoder) -> Float[np.ndarray, " levels"]:
    """`intensity_histogram` in the view of the encoder."""
    return intensity_histogram(volume, encoder.recipe.preprocessing)


def intensity_features(volume: CanonicalVolume, encoder: PretrainedEncoder) -> Float[np.ndarray, " statistics"]:
    """What the grey of the encoder's own patches tells, by place, without a network.

    Of each selected patch the mean, the spread, the 5th and the 95th percentile, read by the pooling `zones`. Whatever
    an encoder is worth shows above this, not above the histogram: see docs/study/zones.md.
    """
    chosen = encoder.select_tokens(volume)
    said = patch_intensity(chosen.patches)
    none = np.zeros(0, np.int64)
    return pooling.pool_tokens(TokenFeatures(said, chosen.grid_index, chosen.grid, chosen.tissue), none, ("zones",))


def patch_intensity(patches: Float[np.ndarray, "k voxels"]) -> Float[np.ndarray, "k 4"]:
    """Mean, standard deviation, 5th and 95th percentile of the grey of each patch."""
    grey = patches.astype(np.float32)
    return np.stack([grey.mean(axis=1), grey.std(axis=1), *np.percentile(grey, (5, 95), axis=1)], axis=1)


def intensity_histogram(volume: CanonicalVolume, preprocessing: Preprocessing) -> Float[np.ndarray, " levels"]:
    """Shares of tissue voxels at 32 grey levels, in the centred view: what intensity alone tells."""
    shape, size = geometry.center_crop(preprocessing), preprocessing.image_size
    view = geometry.apply_geometry(volume.pixels, shape, size)
    inside = geometry.tissue_mask(volume.band, shape, volume.pixels.shape[1], size)
    values = view[inside] if inside.any() else view.ravel()
    counts = np.bincount(values // (256 // HISTOGRAM_BINS), minlength=HISTOGRAM_BINS)
    return (counts / counts.sum()).astype(np.float32)
