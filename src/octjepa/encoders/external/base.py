"""The protocol of an encoder of another project, and how one is found from a folder or an address `NAME:PATH`.

A package adds an encoder by an entry point of the group `octjepa.encoders`: a function that takes a path, or None for
initial weights, and returns an `nn.Module` on images `[B, 1, D, H, W]` (intensities 0..1) or an `ExternalEncoder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from octjepa.encoders.pooling import pool_features
from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing
from octjepa.registry import Registry

_UNTRAINED_SEED = 0
ORIGIN = ("encoder", "source", "licence", "sha256")
_FOLDERS, _PUBLISHED = "octjepa.encoders.external.folders", "octjepa.encoders.external.published"


@dataclass(frozen=True)
class TunedOn:
    """The data that an encoder was fine-tuned on: content ids and `uid_key` of its volumes, and their preprocessing.

    folder: its checkpoint.
    """

    volume_ids: frozenset[str]
    preprocessing: Preprocessing
    folder: Path


class ExternalEncoder(ABC):
    """A frozen network of another project. `name` is that of its folder or file, `about` what is known of it.

    kind: its name in `ENCODERS`; tuned_on: only of an encoder that octjepa fine-tuned.
    """

    kind: str = ""
    tuned_on: TunedOn | None = None
    reads_bscans: bool = False  # each B-scan by itself, so that a single one needs no others around it

    def __init__(self, network: nn.Module, about: Mapping[str, Any], path: Path) -> None:
        self.network = network.eval().requires_grad_(False)
        self.about, self.path, self.name = about, path, path.stem if path.is_file() else path.name

    @property
    def origin(self) -> dict[str, str]:
        """Source, licence and checksum of the weights, as far as they are known."""
        return {key: value for key, value in self.about.items() if key in ORIGIN}

    @abstractmethod
    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        """Tokens of one volume of intensities 0..1."""

    @abstractmethod
    def initial(self) -> ExternalEncoder:
        """The same architecture with new initial weights."""

    def architecture(self) -> dict[str, Any]:
        """The function that builds the network without the file of its weights, as JSON (`external.saved`).

        Empty where the function called `kind` in `ENCODERS` makes it of no path.
        """
        return {}

    def width(self, view_shape: tuple[int, int, int]) -> int:
        """The number of features of a token."""
        return self.tokens(np.zeros(view_shape, dtype=np.uint8)).shape[1]

    def grid(self, view_shape: tuple[int, int, int]) -> tuple[int, int, int] | None:
        """(slices, depth, columns) of the tokens of a view `[D, H, W]`, which are then in raster order.

        None where a token has no position, as a class token or the vector of a volume.
        """
        return None

    def untrained(self) -> ExternalEncoder:
        """The same architecture with initial weights, drawn by a fixed seed: the baseline of its row."""
        with torch.random.fork_rng():
            torch.manual_seed(_UNTRAINED_SEED)
            return self.initial()

    def to(self, device: torch.device) -> ExternalEncoder:
        """Moves the network to `device`."""
        self.network.to(device)
        return self

    @torch.inference_mode()
    def tokens(self, view: UInt8[np.ndarray, "d h w"]) -> Float[np.ndarray, "k dim"]:
        """Tokens of one volume as canonical pixels, fp32. Raises UsageError where the network gives none or NaN."""
        device = next((parameter.device for parameter in self.network.parameters()), torch.device("cpu"))
        intensities = torch.from_numpy(view).to(device, torch.float32) / 255
        tokens: np.ndarray = self.features(intensities).float().cpu().numpy()
        if not len(tokens) or not np.isfinite(tokens).all():
            raise UsageError(f"{self.name} gives no finite features of a volume of {view.shape} voxels")
        return tokens

    def embed(self, view: UInt8[np.ndarray, "d h w"], pool: str = "mean") -> Float[np.ndarray, " n"]:
        """One vector, as `PretrainedEncoder.embed`: `[dim]`, or `[3 dim]` with pool mean_std_max."""
        return pool_features(self.tokens(view), pool)


class ModuleEncoder(ExternalEncoder):
    """Any `nn.Module` on images `[B, 1, D, H, W]` of intensities 0..1, as `create` of another package makes it.

    It returns tokens `[B, T, dim]`, a vector `[B, dim]`, a feature map `[B, dim, d, h, w]`, or a tuple that begins
    with one of them. `create(None)` makes the module with initial weights. Of a feature map the positions are known; of
    tokens where the module has a method `grid((D, H, W))` that returns (d, h, w).
    """

    def __init__(self, module: nn.Module, create: Callable[[Path | None], Any], path: Path) -> None:
        super().__init__(module, {}, path)
        self.create = create

    def initial(self) -> ExternalEncoder:
        return ModuleEncoder(self.create(None), self.create, self.path)

    @torch.inference_mode()
    def grid(self, view_shape: tuple[int, int, int]) -> tuple[int, int, int] | None:
        if callable(grid_of := getattr(self.network, "grid", None)):
            slices, depth, columns = grid_of(view_shape)
            return int(slices), int(depth), int(columns)
        device = next((parameter.device for parameter in self.network.parameters()), None)
        output = self._output(torch.zeros(view_shape, device=device))
        return None if output.ndim != 5 else (output.shape[2], output.shape[3], output.shape[4])

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        output = self._output(view)
        if output.ndim == 5:
            return output[0].flatten(1).T
        return output.flatten(0, -2)

    def _output(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "1 ..."]:
        """The output of the module for one image. Raises UsageError for anything else than it may return."""
        output = self.network(view[None, None])
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, Tensor) or output.ndim not in (2, 3, 5) or len(output) != 1:
            output_text = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise UsageError(
                f"{self.name} gives {output_text} of one image [1, 1, D, H, W]: expected tokens [1, T, dim], a vector "
                "[1, dim] or a feature map [1, dim, d, h, w]"
            )
        return output


ENCODERS: Registry[Callable[[Path | None], nn.Module | ExternalEncoder]] = Registry(
    "encoder",
    "octjepa.encoders",
    {
        "transformers": _FOLDERS,
        "transformers_video": _FOLDERS,
        "monai": _FOLDERS,
        **dict.fromkeys(("retfound", "retfound_dinov2", "visionfm", "dinov2", "dinov3"), _PUBLISHED),
        "mirage": _PUBLISHED,
        "octcube": _PUBLISHED,
    },
)


def split_address(text: str | Path) -> tuple[str, Path | None] | None:
    """(name, path) of `NAME:PATH` or `NAME:` where NAME is a known encoder; None for anything else."""
    name, sign, path = str(text).partition(":")
    if not sign or path.startswith("//") or Path(text).exists() or name not in ENCODERS:
        return None
    return name, Path(path) if path else None


def is_external(location: str | Path) -> bool:
    """Whether `location` is the address of another project's encoder, or a folder that holds one."""
    return split_address(location) is not None or _folder_format(location) is not None or _tuned(location) is not None


def check_address(location: str | Path) -> None:
    """Raises UsageError where `location` is not a path or url and reads as `NAME:PATH`, but nothing is called NAME."""
    name, sign, path = str(location).partition(":")
    if sign and name.isidentifier() and not path.startswith("//") and not Path(location).exists():
        ENCODERS.get(name)


def refuse_external(location: str | Path, verb: str) -> None:
    """Raises UsageError for an encoder of another project, which `verb` cannot train or read; it says what can."""
    if is_external(location):
        raise UsageError(
            f"{location} is an encoder of another project, and octjepa {verb} only takes encoders of octjepa (its "
            "stages "
            "and positions are theirs): tune it by octjepa finetune, or read it frozen by octjepa embed --tokens and "
            "probe --probe attentive, or by octjepa leaderboard; its module for your loop is "
            "octjepa.load_external(...).network"
        )


def load_external(location: str | Path) -> ExternalEncoder:
    """The encoder at `location`: a folder, also that of a fine-tuning of one, or `NAME:PATH`.

    Raises UsageError (no description, an unknown or unreadable one, a library or file that is not there) and
    CheckpointError (weights that are damaged or do not fill the network).
    """
    address = split_address(location)
    if address is None and (tuned := _tuned(location)) is not None:
        from octjepa.encoders.external.saved import load_saved

        return load_saved(tuned)
    name, path = address or (_folder_format(location), Path(location))
    if name is None:
        raise UsageError(
            f"{location} is not a known encoder: expected a folder with config.json (transformers) or monai.json, or "
            f"NAME:PATH with one of {', '.join(ENCODERS.names())}"
        )
    create = ENCODERS.get(name)
    external = create(path)
    if isinstance(external, nn.Module):
        external = ModuleEncoder(external, create, path or Path(name))
    if not isinstance(external, ExternalEncoder):
        raise UsageError(
            f"encoder {name} makes a {type(external).__name__}: expected an nn.Module or an ExternalEncoder"
        )
    external.kind = name
    return external


def _tuned(location: str | Path) -> Path | None:
    from octjepa.encoders.external.saved import find_tuned

    return find_tuned(Path(location)) if Path(location).is_dir() else None


def _folder_format(location: str | Path) -> str | None:
    from octjepa.encoders.external.folders import folder_format

    path = Path(location)
    return folder_format(path) if path.is_dir() else None
