"""Encoders of other projects behind our interface, so that they stand on the board under the same protocol.

A folder on this disk with safetensors weights, never a pickle and never code: a 2D vision model of `transformers`,
applied to every B-scan; V-JEPA 2 (`VJEPA2Model`), which sees the B-scans as frames of a video; a 3D network of MONAI,
named in `monai.json`. Each gives tokens of the centred view of a canonical volume, which are then pooled exactly as
ours are. Weights that leave a part of the network without values are refused: they would be random without a word.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from octjepa.checkpoint.encoder import pooled
from octjepa.checkpoint.location import Place
from octjepa.errors import CheckpointError, UsageError
from octjepa.extras import to_install

CONFIG, MONAI_CONFIG = "config.json", "monai.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Names as in monai.networks.nets; its transformers are not among them, as they need a library that we do not.
MONAI_NETWORKS = ("resnet10", "resnet18", "resnet34", "resnet50", "DenseNet121", "SegResNet")
_B_SCANS_AT_ONCE = 16
_UNTRAINED_SEED = 0
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Adapter(ABC):
    """A frozen network of others. `dim`: width of its tokens; `name`: of its folder."""

    def __init__(self, network: nn.Module, about: Mapping[str, Any], folder: Path) -> None:
        self.network = network.eval().requires_grad_(False)
        self.about, self.folder, self.name = about, folder, folder.name

    @classmethod
    @abstractmethod
    def build(cls, folder: Path, trained: bool) -> Adapter:
        """From the description in `folder`, with its weights or with first ones."""

    @abstractmethod
    def _features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        """Tokens of one volume of grey levels 0..1."""

    def untrained(self) -> Adapter:
        """The same architecture with first weights, drawn by a fixed seed: the baseline of its row."""
        with torch.random.fork_rng():
            torch.manual_seed(_UNTRAINED_SEED)
            return self.build(self.folder, trained=False)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def to(self, device: torch.device) -> Adapter:
        self.network.to(device)
        return self

    @torch.inference_mode()
    def tokens(self, view: UInt8[np.ndarray, "d h w"]) -> Float[np.ndarray, "k dim"]:
        """Tokens of one volume as canonical pixels, fp32. Raises UsageError where the network gives none or NaN."""
        levels = torch.from_numpy(view).to(self.device, torch.float32) / 255
        found = self._features(levels).float().cpu().numpy()
        if not len(found) or not np.isfinite(found).all():
            raise UsageError(f"{self.name} gives no finite features of a volume of {view.shape} voxels")
        return found

    def embed(self, view: UInt8[np.ndarray, "d h w"], pool: str = "mean") -> Float[np.ndarray, " n"]:
        """One vector, as `PretrainedEncoder.embed`: `[dim]`, or `[3 dim]` with pool mean_std_max."""
        return pooled(self.tokens(view), pool)


class FrameAdapter(Adapter):
    """A 2D vision model of transformers on every B-scan: all patch tokens (or places of the map) of all B-scans.

    B-scans are resized to the model's image size, repeated over its channels, and normalised as its
    preprocessor_config.json says, or to mean 0.5 and spread 0.5 where it says nothing.
    """

    @classmethod
    def build(cls, folder: Path, trained: bool) -> FrameAdapter:
        network, config = _of_transformers(folder, "AutoModel", trained)
        return cls(network, _normalising(folder) | {"size": _size(config, "image_size"), **_channels(config)}, folder)

    def _features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        found = []
        for frames in view.split(_B_SCANS_AT_ONCE):
            pixels = _as_images(frames, self.about)
            last = self.network(pixel_values=pixels).last_hidden_state
            # [n, tokens, dim] of a transformer, [n, dim, rows, columns] of a convolutional network
            found.append(last.flatten(0, 1) if last.ndim == 3 else last.movedim(1, -1).flatten(0, 2))
        return torch.cat(found)


class VideoAdapter(Adapter):
    """V-JEPA 2 on the B-scans as frames: evenly chosen ones, as many as the weights were trained with."""

    @classmethod
    def build(cls, folder: Path, trained: bool) -> VideoAdapter:
        network, config = _of_transformers(folder, "VJEPA2Model", trained)
        about = _normalising(folder, _IMAGENET) | {"size": _size(config, "crop_size"), **_channels(config)}
        return cls(network, about | {"frames": int(config.frames_per_clip)}, folder)

    def _features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        chosen = torch.linspace(0, len(view) - 1, self.about["frames"]).round().long()
        video = _as_images(view[chosen.to(view.device)], self.about)[None]
        tokens: Tensor = self.network(pixel_values_videos=video, skip_predictor=True).last_hidden_state[0]
        return tokens


class MonaiAdapter(Adapter):
    """A 3D network of MONAI on the whole view, z-scored, resized to `input_size` of monai.json where that is given.

    monai.json: {"network": one of MONAI_NETWORKS, "arguments": {...}, "input_size": [D, H, W]}. Tokens are the places
    of the encoder's last feature map.
    """

    @classmethod
    def build(cls, folder: Path, trained: bool) -> MonaiAdapter:
        about = _json(folder / MONAI_CONFIG)
        name, arguments = about.get("network"), about.get("arguments", {})
        if name not in MONAI_NETWORKS or not isinstance(arguments, dict):
            raise UsageError(f"{folder / MONAI_CONFIG}: network is {name!r}, known are {', '.join(MONAI_NETWORKS)}")
        try:
            from monai.networks import nets
        except ImportError:
            raise UsageError(f"{folder} needs MONAI: {to_install('segment')}") from None
        try:
            network: nn.Module = getattr(nets, name)(**arguments)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{folder / MONAI_CONFIG}: MONAI does not build {name} of these arguments: {error}"
            ) from None
        if trained:
            _fill(network, folder)
        return cls(network, about, folder)

    def _features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        volume = ((view - view.mean()) / view.std().clamp_min(1e-6))[None, None]
        if self.about.get("input_size"):
            volume = F.interpolate(volume, tuple(self.about["input_size"]), mode="trilinear", align_corners=False)
        name = self.about["network"]
        if name == "SegResNet":
            features = self.network.encode(volume)[0]  # type: ignore[operator]
        elif name == "DenseNet121":
            features = self.network.features(volume)  # type: ignore[operator]
        else:
            features = _output_of(self.network, "layer4", volume)
        return features[0].flatten(1).T


def is_foreign(place: Place) -> bool:
    """Whether a folder describes a network of transformers or of MONAI."""
    return isinstance(place, Path) and any((place / name).is_file() for name in (CONFIG, MONAI_CONFIG))


def load_adapter(folder: str | Path) -> Adapter:
    """The encoder that `folder` describes.

    Raises UsageError: no description, an unknown or unreadable one, weights that are no safetensors or that do not fill
    the network, a library that is not installed.
    """
    folder = Path(folder)
    if (folder / MONAI_CONFIG).is_file():
        return MonaiAdapter.build(folder, trained=True)
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} holds neither {CONFIG} (transformers) nor {MONAI_CONFIG}: it is no known encoder")
    kind = VideoAdapter if _json(folder / CONFIG).get("model_type") == "vjepa2" else FrameAdapter
    return kind.build(folder, trained=True)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{path} cannot be read as JSON") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no JSON object")
    return found


def _check_weights(folder: Path) -> None:
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise UsageError(
            f"{folder} holds no {WEIGHTS[0]}: weights are read from safetensors alone, because a pickle (.bin, .pt) "
            "can run code. Convert them with the project that made them"
        )


def _of_transformers(folder: Path, kind: str, trained: bool) -> tuple[nn.Module, Any]:
    try:
        import transformers
    except ImportError:
        raise UsageError(f"{folder} needs transformers: {to_install('hf')}") from None
    only_here = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **only_here)
        if not trained:
            made = transformers.AutoModel.from_config(config, trust_remote_code=False)
            return made, config
        _check_weights(folder)
        with _no_bars(transformers):
            network, said = getattr(transformers, kind).from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"transformers does not read {folder}: {str(error).splitlines()[0]}") from None
    # A pooler is not used, and a decoder or predictor not run: encoders are often saved without.
    missing = [key for key in said["missing_keys"] if not key.startswith(("pooler", "predictor"))]
    empty = sorted(map(str, [*missing, *said["mismatched_keys"]]))
    if empty:
        raise CheckpointError(
            f"the weights of {folder} leave {len(empty)} of the encoder's tensors without values (such as {empty[0]}): "
            "they would be random"
        )
    return network, config


@contextmanager
def _no_bars(transformers: Any) -> Iterator[None]:
    """Without the library's own progress bars, which know nothing of --quiet."""
    said = transformers.utils.logging
    shown = said.is_progress_bar_enabled()
    said.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            said.enable_progress_bar()


def _fill(network: nn.Module, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_weights(folder)
    try:
        network.load_state_dict(load_file(folder / WEIGHTS[0]))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS[0]} is damaged: {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS[0]} does not fit the network: {str(error)[:300]}") from None


def _size(config: Any, key: str) -> tuple[int, int]:
    found = getattr(config, key, None) or 224
    return (int(found[0]), int(found[1])) if isinstance(found, list | tuple) else (int(found), int(found))


def _channels(config: Any) -> dict[str, int]:
    return {"channels": int(getattr(config, "num_channels", None) or getattr(config, "in_chans", None) or 3)}


def _normalising(folder: Path, default: tuple[Any, Any] = (0.5, 0.5)) -> dict[str, Any]:
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            said = _json(folder / name)
            default = (said.get("image_mean", default[0]), said.get("image_std", default[1]))
            break
    return {"mean": default[0], "std": default[1]}


def _as_images(frames: Float[Tensor, "n h w"], about: Mapping[str, Any]) -> Float[Tensor, "n c rows columns"]:
    """B-scans as the model's images: resized, one grey level in every channel, normalised."""
    images = F.interpolate(frames[:, None], about["size"], mode="bilinear", align_corners=False, antialias=True)
    images = images.expand(-1, about["channels"], -1, -1)
    mean, std = (torch.as_tensor(about[key], dtype=images.dtype, device=images.device) for key in ("mean", "std"))
    if mean.numel() not in (1, about["channels"]):
        mean, std = mean.mean(), std.mean()  # one channel of weights that were averaged over colours
    normalised: Tensor = (images - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)
    return normalised


def _output_of(network: nn.Module, layer: str, volume: Float[Tensor, "1 1 d h w"]) -> Float[Tensor, "1 c d2 h2 w2"]:
    """What the inner `layer` gives while the whole network runs."""
    found: list[Tensor] = []
    hook = network.get_submodule(layer).register_forward_hook(lambda module, given, made: found.append(made))
    try:
        network(volume)
    finally:
        hook.remove()
    return found[0]
