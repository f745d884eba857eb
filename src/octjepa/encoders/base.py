"""The protocol of an encoder of volumes, whoever made it.

`FrozenEncoder` is the protocol that embedding, evaluation and the tasks use. `EncoderBase` implements what all encoders
share; ours (`pretrained`, `dense`) and those of other projects (`external.prepared`) add how a volume becomes their
input.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from octjepa.checkpoint.location import Location
from octjepa.encoders.module import prepare_volume
from octjepa.encoders.pooling import (
    DEFAULT_POOLS,
    TokenFeatures,
    check_pools,
    pool_features,
    pool_tokens,
    tissue_layers,
)
from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing, Recipe
from octjepa.volume import CanonicalVolume, OCTVolume

Scan = str | Path | OCTVolume | CanonicalVolume
Input = TypeVar("Input")


@runtime_checkable
class FrozenEncoder(Protocol):
    """A frozen encoder of prepared volumes.

    name: in results. dim: the width of a token's features. grid: (slices, depth, columns) of its tokens, None where a
    token has no position. preprocessing: by which its volumes are prepared. parameters: their number. patterns: the
    scan patterns that it reads. token_choice: which of a volume's tokens it reads, one of `embed.table.TOKENS`.
    default_pools: the poolings of its table, if none is asked for. location: where its training is recorded, None if
    that is not known. recorded_training: content ids of the volumes that it was trained on, and the `uid_key` of those
    that have a UID; empty if nothing is known. origin: source, licence and checksum of another project's weights;
    None for ours.
    """

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int, int] | None: ...
    @property
    def preprocessing(self) -> Preprocessing: ...
    @property
    def parameters(self) -> int: ...
    @property
    def patterns(self) -> Collection[str]: ...
    @property
    def token_choice(self) -> str: ...
    @property
    def default_pools(self) -> tuple[str, ...]: ...
    @property
    def recorded_training(self) -> frozenset[str]: ...
    @property
    def location(self) -> Location | None: ...
    @property
    def origin(self) -> Mapping[str, str] | None: ...

    def tokens(self, volume: Scan) -> TokenFeatures:
        """The features of the tokens of a volume, with their positions."""

    def embed(self, volume: Scan, pool: str = "mean") -> Float[np.ndarray, " n"]:
        """One vector of a volume."""

    def select_tokens(self, volume: CanonicalVolume) -> Any:
        """The encoder's input for a prepared volume. The untrained copy takes the same."""

    def encode_tokens(self, selected: Sequence[Any]) -> list[TokenFeatures]:
        """The features of several volumes, given as `select_tokens` returns them."""

    def encode_volumes(self, volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        """The features of several prepared volumes."""

    def prepare(self, volume: Scan) -> CanonicalVolume:
        """The volume with the encoder's preprocessing."""

    def check_pools(self, pools: Sequence[str]) -> tuple[str, ...]:
        """The names once each. Raises UsageError: none, or one that this encoder's tokens do not allow."""

    def pool(
        self, volume: CanonicalVolume, features: TokenFeatures, pools: Sequence[str]
    ) -> Float[np.ndarray, " features"]:
        """The poolings `pools` of the tokens of a volume, one after the other."""

    def untrained(self) -> Self:
        """The same architecture with random initial weights, the same at every call."""

    def weights_hash(self) -> str:
        """SHA-256 of the weights."""

    def to(self, device: torch.device) -> Self:
        """Moves the encoder to `device`."""


class EncoderBase(ABC, Generic[Input]):
    """The properties that follow from an encoder's network, preprocessing, `select_tokens` and `encode_tokens`."""

    name: str

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The network with its weights."""

    @property
    @abstractmethod
    def preprocessing(self) -> Preprocessing:
        """By which its volumes are prepared."""

    @property
    @abstractmethod
    def patterns(self) -> Collection[str]:
        """The scan patterns that it reads."""

    @abstractmethod
    def select_tokens(self, volume: CanonicalVolume) -> Input:
        """The encoder's input for a prepared volume."""

    @abstractmethod
    def encode_tokens(self, selected: Sequence[Input]) -> list[TokenFeatures]:
        """Returns the features of several volumes, given as `select_tokens` returns them."""

    @property
    def device(self) -> torch.device:
        """Where the network is; the processor for a network without parameters."""
        return next((parameter.device for parameter in self.network.parameters()), torch.device("cpu"))

    @property
    def parameters(self) -> int:
        """Number of the encoder's parameters."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    def to(self, device: torch.device) -> Self:
        """Moves the encoder to `device`."""
        self.network.to(device)
        return self

    def weights_hash(self) -> str:
        """SHA-256 over names and values of the weights."""
        return hash_weights(self.network)

    def prepare(self, volume: Scan) -> CanonicalVolume:
        """Returns `volume` with the encoder's preprocessing: spacing, size, orientation and flattening.

        volume: a path, an OCTVolume, or a CanonicalVolume, which is returned unchanged. Raises VolumeRejected for a
        file that cannot be read, UsageError for a scan of a pattern that the encoder does not read.
        """
        from octjepa.read.reader import read_volume

        native = read_volume(volume) if isinstance(volume, str | Path) else volume
        if isinstance(native, OCTVolume) and native.pattern not in self.patterns:
            where = volume if isinstance(volume, str | Path) else native.source or "the scan"
            patterns_text = ", ".join(self.patterns)
            raise UsageError(f"the pattern of {where} is {native.pattern}: the encoder knows {patterns_text}")
        return prepare_volume(native, self.preprocessing)

    def tokens(self, volume: Scan) -> TokenFeatures:
        """Returns the features of the tokens of `volume`, `[K, dim]` in fp32, with their positions.

        Ours are all tokens that contain tissue. Raises as `prepare`.
        """
        return self.encode_volumes([self.prepare(volume)])[0]

    def encode_volumes(self, volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        """Returns what `tokens` does, for several prepared volumes."""
        return self.encode_tokens([self.select_tokens(volume) for volume in volumes])

    def embed(self, volume: Scan, pool: str = "mean") -> Float[np.ndarray, " n"]:
        """Returns the embedding of `volume`: its tokens, pooled to one float32 vector.

        pool: a name of `octjepa.encoders.pooling.POOL_WIDTHS`; the vector has `POOL_WIDTHS[pool] * dim` values.
        Raises UsageError for another name, or one that needs positions which the tokens do not have; and as `prepare`.
        """
        self.check_pools([pool])
        prepared = self.prepare(volume)
        return self.pool(prepared, self.encode_volumes([prepared])[0], [pool])

    def check_pools(self, pools: Sequence[str]) -> tuple[str, ...]:
        """The names once each. Raises UsageError: none, or one that this encoder's tokens do not allow."""
        for name in pools:
            pool_features(np.zeros((1, 1), np.float32), name)
        return check_pools(pools)

    def pool(
        self, volume: CanonicalVolume, features: TokenFeatures, pools: Sequence[str]
    ) -> Float[np.ndarray, " features"]:
        """The poolings `pools` of the tokens of a volume, one after the other."""
        return np.concatenate([pool_features(features.features, name) for name in pools])


class GridEncoder(EncoderBase[Input]):
    """An encoder whose tokens are patches of a grid, by the preprocessing and the tokens of its `recipe`."""

    recipe: Recipe
    dim: int
    default_pools = DEFAULT_POOLS
    origin: Mapping[str, str] | None = None
    location: Location | None = None  # what it was loaded from

    @property
    @abstractmethod
    def recorded_training(self) -> frozenset[str]:
        """All that is recorded of its training volumes. What is made from it inherits the record."""

    @abstractmethod
    def untrained(self) -> Self:
        """The same architecture with its initial weights, which is the baseline of every probe."""

    @property
    def preprocessing(self) -> Preprocessing:
        """By which its volumes are prepared."""
        return self.recipe.preprocessing

    @property
    def grid(self) -> tuple[int, int, int]:
        """(slices, depth, columns) of the token grid."""
        return self.recipe.grid

    @property
    def token_choice(self) -> str:
        """ "tissue" if it reads the tokens that hold tissue, "all" if it reads every token."""
        return self.recipe.tokens.select

    def check_pools(self, pools: Sequence[str]) -> tuple[str, ...]:
        """The names once each. Raises UsageError: none, or an unknown one."""
        return check_pools(pools)

    def pool(
        self, volume: CanonicalVolume, features: TokenFeatures, pools: Sequence[str]
    ) -> Float[np.ndarray, " features"]:
        """The poolings `pools` of the tokens of a volume, one after the other."""
        by_layer = "layers" in pools  # the others do not read the layer of a token
        layers = tissue_layers(volume, self.recipe) if by_layer else np.zeros(self.recipe.grid_tokens, np.int64)
        return pool_tokens(features, layers[features.grid_index], pools)


def hash_weights(network: nn.Module, kind: str = "") -> str:
    """SHA-256 over `kind`, names and values of a network's weights."""
    digest = hashlib.sha256(kind.encode())
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(value.detach().cpu().float().numpy()).tobytes())
    return digest.hexdigest()
