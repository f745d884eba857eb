"""Folders of other projects with safetensors weights, never a pickle and never code: transformers and MONAI.

A 2D vision model of `transformers`, applied to every B-scan; V-JEPA 2 (`VJEPA2Model`), to which the B-scans are frames
of a video; a 3D network of MONAI, named in `monai.json`. Weights that leave a part of the network without values are
refused, because that part would be random.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from octjepa.checkpoint.tensor_file import check_weights, read_safetensors
from octjepa.encoders.external.architecture import (
    MONAI_ARGUMENTS,
    check_size,
    monai_arguments,
    offline,
    transformers_keys,
)
from octjepa.encoders.external.base import ENCODERS, ExternalEncoder
from octjepa.encoders.external.images import IMAGENET, ImageFormat
from octjepa.errors import CheckpointError, UsageError, install_command, is_out_of_memory
from octjepa.parsing import Malformed, check_safetensors, read_object, shown

CONFIG, MONAI_CONFIG = "config.json", "monai.json"
PREPROCESSORS = ("video_preprocessor_config.json", "preprocessor_config.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_NEED_EINOPS = ("SwinUNETR", "ViTAutoEnc")  # which no extra of ours installs
MONAI_NETWORKS = tuple(MONAI_ARGUMENTS)
_LARGEST_IMAGE, _LARGEST_VOLUME = 4096, 1024  # sides that an encoder may ask for, in pixels and voxels


def folder_format(folder: Path) -> str | None:
    """The name in `ENCODERS` of the format that `folder` holds; None if it describes no encoder."""
    if (folder / MONAI_CONFIG).is_file():
        return "monai"
    if not (folder / CONFIG).is_file():
        return None
    try:
        video = _read_json(folder / CONFIG).get("model_type") == "vjepa2"
    except UsageError:  # building it reports what is wrong
        video = False
    return "transformers_video" if video else "transformers"


class FolderEncoder(ExternalEncoder):
    """An encoder that a folder describes. files: content of its JSON files by name, if no folder holds them.

    version: counts up whenever the same folder gives other features. A tuned encoder keeps that of its tuning.
    """

    files: Mapping[str, Any] | None = None
    version: int = 1

    @classmethod
    def load(cls, folder: Path | None) -> Self:
        """The encoder of `folder` with its weights.

        Raises UsageError: no folder is given, or it describes none, or octjepa exported it for transformers.
        """
        if folder is None or folder_format(folder) is None:
            raise UsageError(
                f"{folder or 'no path'} holds neither {CONFIG} nor {MONAI_CONFIG}: it is not a known encoder"
            )
        _refuse_ours(folder)
        return cls.build(folder, trained=True)

    @classmethod
    @abstractmethod
    def build(cls, folder: Path, trained: bool) -> Self:
        """The network described in `folder`, with its weights or untrained."""

    def initial(self) -> Self:
        twin = self.from_files(self.architecture()["files"])
        twin.version = self.version
        return twin

    @classmethod
    def from_files(cls, files: Mapping[str, Any]) -> Self:
        """The network with initial weights that JSON `files` describe. Raises ValueError: a file of another name."""
        if others := set(files) - {CONFIG, MONAI_CONFIG, *PREPROCESSORS}:
            raise ValueError(f"{min(others)} is not a file that describes an encoder")
        with TemporaryDirectory(prefix="octjepa-") as folder:
            for name, content in files.items():
                (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
            network = cls.build(Path(folder), trained=False)
        network.files = files
        return network

    def architecture(self) -> dict[str, Any]:
        paths = [self.path / name for name in (CONFIG, MONAI_CONFIG, *PREPROCESSORS)]
        files = self.files or {path.name: _read_json(path) for path in paths if path.is_file()}
        return {"files": dict(files), **({"version": self.version} if self.version > 1 else {})}


class FrameEncoder(FolderEncoder):
    """A 2D vision model of transformers on every B-scan: all patch tokens (or map positions) of all B-scans.

    Class and register tokens, which come first, are left out where config.json states the size of a patch.

    B-scans are resized to the model's image size, repeated over its channels, and normalised as its
    preprocessor_config.json says (not at all if `do_normalize` is false), or to mean 0.5 and spread 0.5 if it says
    nothing.
    """

    reads_bscans = True
    version = 2  # 1 had class and register tokens among the patches

    @classmethod
    def build(cls, folder: Path, trained: bool) -> Self:
        network, config = _load_transformers(folder, "AutoModel", trained)
        images = _image_format(folder, config, "image_size", ((0.5,), (0.5,)))
        patches = _patch_count(images.size, getattr(config, "patch_size", None))
        about = {"images": images, "shuffles": config.model_type == "vit_mae", "patches": patches}
        return cls(network, about, folder)

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        return self.about["images"].encode(view, self._encode)

    def _encode(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n t dim"]:
        options: dict[str, Tensor] = {}
        if self.about["shuffles"]:  # patches by random noise, which it draws if it is given none
            count: int = self.network.embeddings.patch_embeddings.num_patches  # type: ignore[union-attr,assignment]
            options["noise"] = torch.arange(count, device=images.device).expand(len(images), -1)
        last: Tensor = self.network(pixel_values=images, **options).last_hidden_state
        if last.ndim == 4:  # [n, dim, height, width] of a convolutional network
            return last.flatten(2).movedim(1, -1)
        patches = self.about["patches"] if self.version > 1 else 0
        return last[:, -patches:] if 0 < patches < last.shape[1] else last  # [n, tokens, dim]


class VideoEncoder(FolderEncoder):
    """V-JEPA 2 on the B-scans as frames: evenly chosen ones, as many as the weights were trained with."""

    @classmethod
    def build(cls, folder: Path, trained: bool) -> Self:
        network, config = _load_transformers(folder, "VJEPA2Model", trained)
        images = _image_format(folder, config, "crop_size", IMAGENET)
        _check_sides([config.tubelet_size, config.patch_size, config.frames_per_clip], 3, 1024, f"{folder / CONFIG}")
        patch = (int(config.tubelet_size), int(config.patch_size))
        return cls(network, {"images": images, "frames": int(config.frames_per_clip), "patch": patch}, folder)

    def grid(self, view_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Of the frames' tubelets: a view of other length is sampled evenly, so its positions are scaled."""
        height, width = self.about["images"].size
        slices, size = self.about["patch"]
        return self.about["frames"] // slices, height // size, width // size

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        chosen = torch.linspace(0, len(view) - 1, self.about["frames"]).round().long()
        video = self.about["images"].prepare(view[chosen.to(view.device)])[None]
        tokens: Tensor = self.network(pixel_values_videos=video, skip_predictor=True).last_hidden_state[0]
        return tokens


class MonaiEncoder(FolderEncoder):
    """A 3D network of MONAI on the whole view, z-scored, resized to `input_size` of monai.json if that is given.

    monai.json: {"network": one of MONAI_NETWORKS, "arguments": {...}, "input_size": [D, H, W]}. Tokens are the
    positions of the encoder's last feature map.
    """

    version = 2  # 1 shrank volumes without a low-pass

    @classmethod
    def build(cls, folder: Path, trained: bool) -> Self:
        about = _read_json(folder / MONAI_CONFIG)
        name, arguments = about.get("network"), about.get("arguments", {})
        where = str(folder / MONAI_CONFIG)
        if name not in MONAI_NETWORKS or not isinstance(arguments, dict):
            raise UsageError(f"{where}: network is {shown(name)}, known are {', '.join(MONAI_NETWORKS)}")
        arguments = monai_arguments(name, arguments, where)
        if about.get("input_size") is not None:
            _check_sides(about["input_size"], 3, _LARGEST_VOLUME, f"{where}: input_size")
        try:
            from monai.networks import nets
        except ImportError:
            raise UsageError(f"{folder} needs MONAI: {install_command('monai')}") from None
        if name in _NEED_EINOPS and find_spec("einops") is None:
            raise UsageError(f"{folder}: MONAI's {name} needs einops: pip install einops")
        try:
            with offline():
                check_size(lambda: getattr(nets, name)(**arguments), str(folder / MONAI_CONFIG))
                network: nn.Module = getattr(nets, name)(**arguments)
        except (UsageError, MemoryError):
            raise
        except Exception as error:  # whatever the library raises for arguments that it cannot use
            raise UsageError(
                f"{folder / MONAI_CONFIG}: MONAI does not build {name} of these arguments: {str(error)[:300]}"
            ) from None
        if trained:
            _load_weights(network, folder)
        return cls(network, {**about, "arguments": arguments}, folder)

    @torch.inference_mode()
    def grid(self, view_shape: tuple[int, int, int]) -> tuple[int, int, int] | None:
        device = next(self.network.parameters()).device
        output = self._output(torch.zeros(view_shape, device=device))
        return None if output.ndim != 5 else (output.shape[2], output.shape[3], output.shape[4])

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        output = self._output(view)
        return output[0] if output.ndim == 3 else output[0].flatten(1).T  # of a map [positions, channels]

    def _output(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "1 ..."]:
        """The last feature map `[1, dim, d, h, w]`, or tokens `[1, T, dim]`. Raises UsageError: it takes no volume."""
        volume = ((view - view.mean()) / view.std().clamp_min(1e-6))[None, None]
        if size := self.about.get("input_size"):
            if self.version > 1:  # means over areas where an axis shrinks: interpolation would skip voxels
                smaller = tuple(map(min, volume.shape[2:], size))
                volume = F.interpolate(volume, smaller, mode="area")
            volume = F.interpolate(volume, tuple(size), mode="trilinear", align_corners=False)
        try:
            return self._encode(volume)
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            shape_text = " x ".join(map(str, volume.shape[2:]))
            raise UsageError(
                f"{self.path / MONAI_CONFIG}: {self.about['network']} does not take a volume of one channel and "
                f"{shape_text} voxels ({str(error).splitlines()[0][:200]}): set its input channels to 1, spatial_dims "
                "to 3, and an input_size that it can divide"
            ) from None

    def _encode(self, volume: Float[Tensor, "1 1 d h w"]) -> Float[Tensor, "1 ..."]:
        name, network = self.about["network"], self.network
        if name == "SegResNet":
            features = network.encode(volume)[0]  # type: ignore[operator]
        elif name == "DenseNet121":
            features = network.features(volume)  # type: ignore[operator]
        elif name == "SwinUNETR":
            features = network.swinViT(volume)[-1]  # type: ignore[operator]
        elif name == "ViTAutoEnc":
            features = _layer_output(network, "norm", volume)  # [1, tokens, dim]
        else:
            features = _layer_output(network, "layer4", volume)
        return features


_FORMATS: dict[str, type[FolderEncoder]] = {
    "transformers": FrameEncoder,
    "transformers_video": VideoEncoder,
    "monai": MonaiEncoder,
}
for _name, _format in _FORMATS.items():
    ENCODERS.register(_name)(_format.load)


def from_architecture(kind: str, stored: Mapping[str, Any]) -> FolderEncoder:
    """The encoder with initial weights that `FolderEncoder.architecture` describes.

    Raises KeyError, TypeError, ValueError: it describes none; UsageError: a library is absent.
    """
    encoder = _FORMATS[kind].from_files(stored["files"])
    encoder.version = int(stored.get("version", 1))
    return encoder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror or "") if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read as a JSON object: {reason}") from None


def _refuse_ours(folder: Path) -> None:
    """Raises UsageError where octjepa wrote `folder` for transformers.

    As another project's encoder it would get images normalised otherwise than in its training. The record of its
    training volumes would be lost, and leaks would not be seen.
    """
    try:
        check_safetensors(folder / WEIGHTS[0])
        with safe_open(folder / WEIGHTS[0], framework="pt") as file:
            is_ours = "octjepa" in (file.metadata() or {})
    except (OSError, Malformed, SafetensorError):
        return  # whoever reads the weights next reports what is wrong
    if is_ours:
        raise UsageError(
            f"{folder} was exported by octjepa for transformers, and octjepa does not read this form: export the same "
            "encoder with --format safetensors"
        )


def _check_weights(folder: Path) -> None:
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise UsageError(
            f"{folder} holds no {WEIGHTS[0]}: weights are only read from safetensors, because a pickle (.bin, .pt) "
            "can run code. Convert them with the project that made them"
        )


def _load_transformers(folder: Path, kind: str, trained: bool) -> tuple[nn.Module, Any]:
    """(network, configuration) of the folder's config.json, whose keys are checked before the library sees them.

    The library gets a folder that holds nothing but these keys and the weights: it would also read an adapter, a
    generation configuration or code from a folder that holds them.
    """
    keys = transformers_keys(_read_json(folder / CONFIG), str(folder / CONFIG))
    try:
        import transformers
    except ImportError:
        raise UsageError(f"{folder} needs transformers: {install_command('hf')}") from None
    try:
        with offline():
            config = transformers.CONFIG_MAPPING[keys.pop("model_type")](**keys)
            if config.model_type == "vit_mae":
                config.mask_ratio = 0.0  # its encoder would leave out that share of the patches at random
            check_size(lambda: transformers.AutoModel.from_config(config), str(folder / CONFIG))
            if not trained:
                return transformers.AutoModel.from_config(config, trust_remote_code=False), config
            with _only_weights(folder) as weights, _without_progress_bars(transformers):
                network, info = getattr(transformers, kind).from_pretrained(
                    weights,
                    config=config,
                    use_safetensors=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
    except (UsageError, CheckpointError, MemoryError):
        raise
    except Exception as error:  # whatever the library raises for keys or weights that it cannot use
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UsageError(f"transformers does not read {folder}: {reason}") from None
    # A pooler is not used, and a decoder or predictor not run: encoders are often saved without.
    missing = [key for key in info["missing_keys"] if not key.startswith(("pooler", "predictor"))]
    empty = sorted(map(str, [*missing, *info["mismatched_keys"]]))
    if empty:
        raise CheckpointError(
            f"the weights of {folder} leave {len(empty)} of the encoder's tensors without values (such as {empty[0]}): "
            "they would be random"
        )
    check_weights(network.state_dict(), str(folder))
    return network, config


@contextmanager
def _only_weights(folder: Path) -> Iterator[Path]:
    """A temporary folder of links to the weights of `folder`. Raises UsageError: there are none; CheckpointError."""
    _check_weights(folder)
    names = [WEIGHTS[0]] if (folder / WEIGHTS[0]).is_file() else []
    with TemporaryDirectory(prefix="octjepa-") as temporary:
        if not names:
            try:
                parts = _read_json(folder / WEIGHTS[1])["weight_map"]
                parts = {str(key): Path(name).name for key, name in parts.items()}  # a name, never a path out of it
            except (KeyError, TypeError, AttributeError):
                raise CheckpointError(f"{folder / WEIGHTS[1]} is damaged: fetch the folder again") from None
            names = sorted(set(parts.values()))
            index = json.dumps({"metadata": {}, "weight_map": parts})
            (Path(temporary) / WEIGHTS[1]).write_text(index, encoding="utf-8")
        for name in names:
            try:
                check_safetensors(folder / name)
            except (Malformed, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CheckpointError(f"{folder / name} is damaged: {reason}") from None
            (Path(temporary) / name).symlink_to((folder / name).resolve())
        yield Path(temporary)


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
    _check_weights(folder)
    weights, _ = read_safetensors(folder / WEIGHTS[0])
    check_weights(weights, str(folder))
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS[0]} does not fit the network: {str(error)[:300]}") from None


def _image_format(folder: Path, config: Any, size_key: str, normalisation: tuple[Any, Any]) -> ImageFormat:
    """The images that a model of transformers takes; `normalisation`: (mean, std) if no file states them."""
    mean, std = normalisation
    for name in PREPROCESSORS:
        if (folder / name).is_file():
            settings = _read_json(folder / name)
            mean, std = settings.get("image_mean", mean), settings.get("image_std", std)
            if settings.get("do_normalize") is False:  # such files may state values that their library does not use
                mean, std = (0.0,), (1.0,)
            for key, values in (("image_mean", mean), ("image_std", std)):
                _check_intensities(values, f"{folder / name}: {key}", above=0.0 if key == "image_std" else -1e3)
            break
    size = getattr(config, size_key, None) or 224
    height, width = size[:2] if isinstance(size, list | tuple) else (size, size)
    _check_sides([height, width], 2, _LARGEST_IMAGE, f"{folder / CONFIG}: {size_key}")
    channels = getattr(config, "num_channels", None) or getattr(config, "in_chans", None) or 3
    _check_sides([channels], 1, 1024, f"{folder / CONFIG}: the number of channels")
    return ImageFormat((int(height), int(width)), int(channels), mean, std)


def _patch_count(size: tuple[int, int], patch_size: object) -> int:
    """The number of patches in an image of this size; 0 if it is not known."""
    sides = patch_size if isinstance(patch_size, list | tuple) else (patch_size, patch_size)
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        return 0
    (height, width), (rows, columns) = size, sides
    return 0 if height % rows or width % columns else (height // rows) * (width // columns)


def _check_sides(sides: object, count: int, largest: int, what: str) -> None:
    """Raises UsageError where `sides` are not `count` whole numbers from 1 to `largest`."""
    whole = isinstance(sides, list | tuple) and all(type(side) is int and 0 < side <= largest for side in sides)
    if not whole or len(sides) != count:  # type: ignore[arg-type]
        raise UsageError(f"{what} is {shown(sides)}: expected {count} whole number(s) from 1 to {largest:,}")


def _check_intensities(values: object, what: str, above: float) -> None:
    """Raises UsageError where `values` are not one to 1,024 finite numbers above `above`."""
    numbers = isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and above < value < 1e3 for value in values
    )
    if not numbers or not 0 < len(values) <= 1024:  # type: ignore[arg-type]
        raise UsageError(f"{what} is {shown(values)}: expected numbers, one for each channel")


class _FirstOutput:
    """A forward hook that keeps the output of the first call of its layer; None before."""

    output: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.output = output if self.output is None else self.output


def _layer_output(network: nn.Module, layer: str, volume: Float[Tensor, "1 1 d h w"]) -> Float[Tensor, "1 ..."]:
    """The output of the inner `layer` while the whole network runs."""
    recorder = _FirstOutput()
    hook = network.get_submodule(layer).register_forward_hook(recorder)
    try:
        network(volume)
    finally:
        hook.remove()
    assert recorder.output is not None  # both networks run their layer
    return recorder.output
