"""A frozen encoder as a scikit-learn transformer: scans in, a feature matrix out, for pipelines and cross-validation.

Input: paths, `OCTVolume`s, or ids of a store's volumes. Output: float32 `[n, features]`, one row per scan in the order
given, equal to `PretrainedEncoder.embed`. Nothing is fitted on the scans: `fit` loads the weights, so embedding
once before cross-validation gives the same features as embedding inside every fold. Raises UsageError for what is not a
scan, VolumeRejected for a file that cannot be read, ContractError for another preprocessing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import require_same_contract
from octjepa.encoders import load_encoder, pooling
from octjepa.encoders.base import GridEncoder
from octjepa.encoders.locate import open_encoder
from octjepa.errors import UsageError, VolumeRejected
from octjepa.progress import bar
from octjepa.shipped import is_segmenter
from octjepa.store import Store
from octjepa.volume import CanonicalVolume, OCTVolume

_log = logging.getLogger(__name__)

Scan = str | Path | OCTVolume


def _opened(source: str | Path, store: Store | None) -> GridEncoder[Any]:
    """The encoder at `source`; the segmentation network for volumes of `store`."""
    if not is_segmenter(source):
        return load_encoder(source)
    return cast(GridEncoder[Any], open_encoder(source, None if store is None else store.preprocessing))


class VolumeEmbedder(TransformerMixin, BaseEstimator):
    """scikit-learn transformer that embeds OCT volumes with a frozen encoder.

    encoder: a run, a checkpoint, a weights file, a name of weights in the package, or a loaded encoder (such as
        `load_encoder(...).untrained()`, the baseline).
    pool: a pooling of `octjepa embed --pool`.
    store: a store or its location; strings in `X` are then ids of its volumes instead of paths.
    batch: number of scans per batch, which does not change the result.

    Attributes after `fit`: `encoder_`, the loaded encoder; `store_`, the opened store or None.
    """

    def __init__(
        self,
        encoder: str | Path | GridEncoder[Any],
        *,
        pool: str = pooling.DEFAULT_POOL,
        store: str | Path | Store | None = None,
        batch: int = 16,
    ) -> None:
        self.encoder = encoder
        self.pool = pool
        self.store = store
        self.batch = batch

    def fit(self, X: Any = None, y: Any = None) -> VolumeEmbedder:
        """Loads the weights and opens the store. `X` and `y` are ignored.

        Raises UsageError (an unknown pool, a batch below 1, no store at the location), ContractError (a store with
        another preprocessing), CheckpointError (absent or damaged weights).
        """
        pooling.check_pools([self.pool])
        if self.batch < 1:
            raise UsageError(f"batch is {self.batch}, expected at least 1 volume")
        self.store_ = self.store if isinstance(self.store, Store | None) else Store.open(self.store)
        encoder = self.encoder if isinstance(self.encoder, GridEncoder) else _opened(self.encoder, self.store_)
        if self.store_ is not None:
            require_same_contract(encoder, self.store_, encoder.name)
        self.encoder_ = encoder.to(Runtime("fp32").device)
        return self

    def transform(self, X: Any) -> Float[np.ndarray, "n features"]:
        """Returns one float32 row of features per scan of `X`, in the order of `X`.

        Raises NotFittedError before `fit`, UsageError (an empty `X`, an item that is not a scan, a scan of a pattern
        that the encoder does not read, an id that the store lacks). Raises VolumeRejected for a file that cannot be
        read or made canonical; the message names it.
        """
        check_is_fitted(self, "encoder_")
        scans = _listed(X)
        rows, seen = [], 0
        with bar("embed", len(scans), "volume") as shown:
            for batch in _batched(scans, self.batch):
                volumes = [self._canonical(scan, number) for number, scan in batch]
                seen += sum(volume.volume_id in self.encoder_.recorded_training for volume in volumes)
                for volume, tokens in zip(volumes, self.encoder_.encode_volumes(volumes), strict=True):
                    rows.append(self.encoder_.pool(volume, tokens, [self.pool]))
                    shown.advance()
        if seen:
            _log.warning(
                "%s was pretrained on %d of these %d volumes: what is measured on them is too good",
                self.encoder_.name,
                seen,
                len(scans),
            )
        return np.stack(rows)

    def get_feature_names_out(self, input_features: object = None) -> np.ndarray:
        """Returns the column names, `<encoder>_<pool>_<number>`."""
        check_is_fitted(self, "encoder_")
        width = pooling.POOL_WIDTHS[self.pool] * self.encoder_.dim
        return np.array([f"{self.encoder_.name}_{self.pool}_{number}" for number in range(width)], dtype=object)

    def _canonical(self, scan: Scan, number: int) -> CanonicalVolume:
        if isinstance(scan, str) and self.store_ is not None:
            return self.store_.read(str(scan))
        try:
            return self.encoder_.prepare(scan)
        except VolumeRejected as error:
            where = scan.source or "an OCTVolume" if isinstance(scan, OCTVolume) else scan
            raise VolumeRejected(error.reason, f"scan {number} ({where}): {error.detail}") from None
        except UsageError as error:
            raise UsageError(f"scan {number}: {error}") from None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        tags.no_validation = True
        return tags


def _listed(X: Any) -> list[Scan]:
    """Raises UsageError for an empty list, a single scan, a table, and items that are not scans."""
    if isinstance(X, Scan):
        raise UsageError("one scan was given, expected a list of scans: write [scan]")
    if getattr(X, "ndim", 1) != 1:
        raise UsageError(
            f"a table of {getattr(X, 'ndim', 0)} dimensions was given, expected a list of scans: name one column"
        )
    scans = list(X)
    if not scans:
        raise UsageError("no scan was given: nothing can be embedded")
    for number, scan in enumerate(scans):
        if not isinstance(scan, Scan):
            raise UsageError(
                f"scan {number} is {type(scan).__name__}, expected a path, an OCTVolume or the id of a store's volume"
            )
    return scans


def _batched(scans: Sequence[Scan], size: int) -> Iterator[list[tuple[int, Scan]]]:
    numbered = list(enumerate(scans))
    for start in range(0, len(numbered), size):
        yield numbered[start : start + size]
