"""Encoders of other projects behind one interface, so that they are compared under the same protocol.

An encoder is a folder on this disk with safetensors weights, never a pickle and never code: a 2D vision model of
`transformers`, applied to every B-scan; V-JEPA 2 (`VJEPA2Model`), to which the B-scans are frames of a video; a 3D
network of MONAI, named in `monai.json`. Each gives tokens of the centred view of a canonical volume, which are pooled
exactly as ours are. Weights that leave a part of the network without values are refused, because that part would be
random. Another format is a subclass of `ExternalEncoder`, registered in `ENCODERS` by its decorator or by an entry
point of the group `octjepa.encoders`.
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

from octjepa.checkpoint.location import Location
from octjepa.checkpoint.pooling import pool_features
from octjepa.errors import CheckpointError, UsageError, install_command
from octjepa.registry import Registry

CONFIG, MONAI_CONFIG = "config.json", "monai.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Names as in monai.networks.nets; its transformers are not among them, as they need a library that we do not.
MONAI_NETWORKS = ("resnet10", "resnet18", "resnet34", "resnet50", "DenseNet121", "SegResNet")
_B_SCANS_AT_ONCE = 16
_UNTRAINED_SEED = 0
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class ExternalEncoder(ABC):
    """A frozen network of another project. `name` is that of its folder."""

    def __init__(self, network: nn.Module, about: Mapping[str, Any], folder: Path) -> None:
        self.network = network.eval().requires_grad_(False)
        self.about, self.folder, self.name = about, folder, folder.name

    @classmethod
    @abstractmethod
    def matches(cls, folder: Path) -> bool:
        """Whether `folder` describes an encoder of this format; at most one format matches a folder."""

    @classmethod
    @abstractmethod
    def build(cls, folder: Path, trained: bool) -> ExternalEncoder:
        """The network described in `folder`, with its weights or untrained."""

    @abstractmethod
    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        """Tokens of one volume of intensities 0..1."""

    def untrained(self) -> ExternalEncoder:
        """The same architecture with initial weights, drawn by a fixed seed: the baseline of its row."""
        with torch.random.fork_rng():
            torch.manual_seed(_UNTRAINED_SEED)
            return self.build(self.folder, trained=False)

    def to(self, device: torch.device) -> ExternalEncoder:
        """Moves the network to `device`."""
        self.network.to(device)
        return self

    @torch.inference_mode()
    def tokens(self, view: UInt8[np.ndarray, "d h w"]) -> Float[np.ndarray, "k dim"]:
        """Tokens of one volume as canonical pixels, fp32. Raises UsageError where the network gives none or NaN."""
        device = next(self.network.parameters()).device
        intensities = torch.from_numpy(view).to(device, torch.float32) / 255
        tokens: np.ndarray = self.features(intensities).float().cpu().numpy()
        if not len(tokens) or not np.isfinite(tokens).all():
            raise UsageError(f"{self.name} gives no finite features of a volume of {view.shape} voxels")
        return tokens

    def embed(self, view: UInt8[np.ndarray, "d h w"], pool: str = "mean") -> Float[np.ndarray, " n"]:
        """One vector, as `PretrainedEncoder.embed`: `[dim]`, or `[3 dim]` with pool mean_std_max."""
        return pool_features(self.tokens(view), pool)


ENCODERS: Registry[type[ExternalEncoder]] = Registry("encoder format", "octjepa.encoders")


def is_external(location: Location) -> bool:
    """Whether a folder describes an encoder of another project."""
    return isinstance(location, Path) and _format(location) is not None


def load_external(folder: str | Path) -> ExternalEncoder:
    """The encoder that `folder` describes.

    Raises UsageError: no description, an unknown or unreadable one, weights that are no safetensors, a library that is
    not installed; CheckpointError: weights that are damaged or do not fill the network.
    """
    folder = Path(folder)
    encoder = _format(folder)
    if encoder is None:
        raise UsageError(f"{folder} holds neither {CONFIG} (transformers) nor {MONAI_CONFIG}: it is no known encoder")
    return encoder.build(folder, trained=True)


def _format(folder: Path) -> type[ExternalEncoder] | None:
    return next((part for part in map(ENCODERS.get, ENCODERS.names()) if part.matches(folder)), None)


@ENCODERS.register("transformers")
class FrameEncoder(ExternalEncoder):
    """A 2D vision model of transformers on every B-scan: all patch tokens (or map positions) of all B-scans.

    B-scans are resized to the model's image size, repeated over its channels, and normalised as its
    preprocessor_config.json says, or to mean 0.5 and spread 0.5 where it says nothing.
    """

    @classmethod
    def matches(cls, folder: Path) -> bool:
        return _is_transformers(folder) and not _is_video(folder)

    @classmethod
    def build(cls, folder: Path, trained: bool) -> FrameEncoder:
        _read_json(folder / CONFIG)
        network, config = _load_transformers(folder, "AutoModel", trained)
        return cls(network, _image_settings(folder, config, "image_size", (0.5, 0.5)), folder)

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        tokens = []
        for b_scans in view.split(_B_SCANS_AT_ONCE):
            last = self.network(pixel_values=_as_images(b_scans, self.about)).last_hidden_state
            # [n, tokens, dim] of a transformer, [n, dim, height, width] of a convolutional network
            tokens.append(last.flatten(0, 1) if last.ndim == 3 else last.movedim(1, -1).flatten(0, 2))
        return torch.cat(tokens)


@ENCODERS.register("vjepa2")
class VideoEncoder(ExternalEncoder):
    """V-JEPA 2 on the B-scans as frames: evenly chosen ones, as many as the weights were trained with."""

    @classmethod
    def matches(cls, folder: Path) -> bool:
        return _is_transformers(folder) and _is_video(folder)

    @classmethod
    def build(cls, folder: Path, trained: bool) -> VideoEncoder:
        network, config = _load_transformers(folder, "VJEPA2Model", trained)
        about = _image_settings(folder, config, "crop_size", _IMAGENET)
        return cls(network, about | {"frames": int(config.frames_per_clip)}, folder)

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        chosen = torch.linspace(0, len(view) - 1, self.about["frames"]).round().long()
        video = _as_images(view[chosen.to(view.device)], self.about)[None]
        tokens: Tensor = self.network(pixel_values_videos=video, skip_predictor=True).last_hidden_state[0]
        return tokens


@ENCODERS.register("monai")
class MonaiEncoder(ExternalEncoder):
    """A 3D network of MONAI on the whole view, z-scored, resized to `input_size` of monai.json where that is given.

    monai.json: {"network": one of MONAI_NETWORKS, "arguments": {...}, "input_size": [D, H, W]}. Tokens are the
    positions of the encoder's last feature map.
    """

    @classmethod
    def matches(cls, folder: Path) -> bool:
        return (folder / MONAI_CONFIG).is_file()

    @classmethod
    def build(cls, folder: Path, trained: bool) -> MonaiEncoder:
        about = _read_json(folder / MONAI_CONFIG)
        name, arguments = about.get("network"), about.get("arguments", {})
        if name not in MONAI_NETWORKS or not isinstance(arguments, dict):
            raise UsageError(f"{folder / MONAI_CONFIG}: network is {name!r}, known are {', '.join(MONAI_NETWORKS)}")
        try:
            from monai.networks import nets
        except ImportError:
            raise UsageError(f"{folder} needs MONAI: {install_command('segment')}") from None
        try:
            network: nn.Module = getattr(nets, name)(**arguments)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{folder / MONAI_CONFIG}: MONAI does not build {name} of these arguments: {error}"
            ) from None
        if trained:
            _load_weights(network, folder)
        return cls(network, about, folder)

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        volume = ((view - view.mean()) / view.std().clamp_min(1e-6))[None, None]
        if self.about.get("input_size"):
            volume = F.interpolate(volume, tuple(self.about["input_size"]), mode="trilinear", align_corners=False)
        name = self.about["network"]
        if name == "SegResNet":
            features = self.network.encode(volume)[0]  # type: ignore[operator]
        elif name == "DenseNet121":
            features = self.network.features(volume)  # type: ignore[operator]
        else:
            features = _layer_output(self.network, "layer4", volume)
        return features[0].flatten(1).T  # [positions, channels]


def _is_transformers(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not (folder / MONAI_CONFIG).is_file()


def _is_video(folder: Path) -> bool:
    try:
        return _read_json(folder / CONFIG).get("model_type") == "vjepa2"
    except UsageError:  # building it reports what is wrong
        return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{path} cannot be read as JSON") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no JSON object")
    return content


def _check_weights(folder: Path) -> None:
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise UsageError(
            f"{folder} holds no {WEIGHTS[0]}: weights are read from safetensors alone, because a pickle (.bin, .pt) "
            "can run code. Convert them with the project that made them"
        )


def _load_transformers(folder: Path, kind: str, trained: bool) -> tuple[nn.Module, Any]:
    try:
        import transformers
    except ImportError:
        raise UsageError(f"{folder} needs transformers: {install_command('hf')}") from None
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **local)
        if not trained:
            return transformers.AutoModel.from_config(config, trust_remote_code=False), config
        _check_weights(folder)
        with _without_progress_bars(transformers):
            network, info = getattr(transformers, kind).from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"transformers does not read {folder}: {str(error).splitlines()[0]}") from None
    # A pooler is not used, and a decoder or predictor not run: encoders are often saved without.
    missing = [key for key in info["missing_keys"] if not key.startswith(("pooler", "predictor"))]
    empty = sorted(map(str, [*missing, *info["mismatched_keys"]]))
    if empty:
        raise CheckpointError(
            f"the weights of {folder} leave {len(empty)} of the encoder's tensors without values (such as {empty[0]}): "
            "they would be random"
        )
    return network, config


@contextmanager
def _without_progress_bars(transformers: Any) -> Iterator[None]:
    """Disables the library's own progress bars, which do not respect --quiet."""
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _load_weights(network: nn.Module, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_weights(folder)
    try:
        network.load_state_dict(load_file(folder / WEIGHTS[0]))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS[0]} is damaged: {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS[0]} does not fit the network: {str(error)[:300]}") from None


def _image_settings(folder: Path, config: Any, size_key: str, default: tuple[Any, Any]) -> dict[str, Any]:
    """mean, std, size (height, width) and channels of the images that a model of transformers takes."""
    mean, std = default
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            settings = _read_json(folder / name)
            mean, std = settings.get("image_mean", mean), settings.get("image_std", std)
            break
    size = getattr(config, size_key, None) or 224
    height, width = size[:2] if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_chans", None) or 3
    return {"mean": mean, "std": std, "size": (int(height), int(width)), "channels": int(channels)}


def _as_images(b_scans: Float[Tensor, "n h w"], about: Mapping[str, Any]) -> Float[Tensor, "n c h2 w2"]:
    """B-scans as the model's images: resized, one intensity in every channel, normalised."""
    images = F.interpolate(b_scans[:, None], about["size"], mode="bilinear", align_corners=False, antialias=True)
    images = images.expand(-1, about["channels"], -1, -1)
    mean, std = (torch.as_tensor(about[key], dtype=images.dtype, device=images.device) for key in ("mean", "std"))
    if mean.numel() not in (1, about["channels"]):
        mean, std = mean.mean(), std.mean()  # one channel of weights that were averaged over colours
    normalised: Tensor = (images - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)
    return normalised


def _layer_output(network: nn.Module, layer: str, volume: Float[Tensor, "1 1 d h w"]) -> Float[Tensor, "1 c d2 h2 w2"]:
    """The output of the inner `layer` while the whole network runs."""
    outputs: list[Tensor] = []
    hook = network.get_submodule(layer).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        network(volume)
    finally:
        hook.remove()
    return outputs[0]
