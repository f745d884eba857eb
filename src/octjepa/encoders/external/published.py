"""Published encoders by name: what their files hold, and how it becomes a network of ours or of transformers.

The names and shapes of tensors are those of the repositories named in `PUBLISHED`, whose licences bind whoever uses
their weights. No file is fetched: the user gives one, and its checksum is recorded. Pictures are applied to every
B-scan, so that tokens stand in raster order over slice, row and column of patches; OCTCube reads the volume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.checkpoint.tensor_file import misfit
from octjepa.encoders.external.architecture import check_size, check_values
from octjepa.encoders.external.base import ENCODERS, ExternalEncoder
from octjepa.encoders.external.convert import dinov3_layout, mirage_layout, octcube_layout, vit_layout
from octjepa.encoders.external.dinov3 import DINOv3, transformers_names
from octjepa.encoders.external.images import IMAGENET, ImageFormat
from octjepa.encoders.external.state_dict import StateDict, file_sha256, read_state_dict
from octjepa.encoders.external.vit import VisionTransformer, ViTShape
from octjepa.errors import CheckpointError, UsageError

CHECKSUM = "#sha256="
# width -> (blocks, heads) of ViT-S, B and L
_VIT_SIZES = MappingProxyType({384: (12, 6), 768: (12, 12), 1024: (24, 16)})


@dataclass(frozen=True)
class Published:
    """One published encoder.

    sizes: width -> (blocks, heads) of the released networks; image: what the network is given, (height, width) or for
    3D networks (slice, depth, column); mean, std: of intensities 0..1; keys: tensors that tell its files from others';
    convert: the tensors of a file -> those of `vit.VisionTransformer`, for the grid of `image`. rename: these -> those
    of `network`, if it is another. patch: in pixels or voxels.
    """

    title: str
    source: str
    licence: str
    sizes: Mapping[int, tuple[int, int]]
    patch: tuple[int, ...]
    image: tuple[int, ...]
    keys: tuple[str, ...]
    convert: Callable[[StateDict, tuple[int, ...]], StateDict] = vit_layout
    network: Callable[[ViTShape], nn.Module] = VisionTransformer
    rename: Callable[[StateDict, nn.Module], StateDict] = lambda weights, network: weights
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    closing_residual: bool = True

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of patches along each axis of `image`."""
        return tuple(size // patch for size, patch in zip(self.image, self.patch, strict=True))

    def load(self, path: Path | None) -> PublishedEncoder:
        """The encoder of a published file, whose path may end with `#sha256=` and the expected checksum.

        Raises UsageError (no file, or another checksum) and CheckpointError (a damaged file, or other tensors in it).
        """
        if path is None:
            raise UsageError(f"{self.title} is read from a file: write NAME:PATH. Its weights: {self.source}")
        path, expected = _split_checksum(path)
        weights = read_state_dict(path)
        checksum = file_sha256(path)
        if expected and checksum != expected:
            raise UsageError(f"{path} has the SHA-256 {checksum}, expected {expected}: fetch it again")
        network = self.build(weights, path)
        about = {"encoder": self.title, "source": self.source, "licence": self.licence, "sha256": checksum}
        return PublishedEncoder(network, about, path, self)

    def build(self, weights: StateDict, path: Path) -> nn.Module:
        """The network that holds the tensors of the file `path`. Raises CheckpointError if they are others."""
        if not set(self.keys) <= weights.keys():
            raise CheckpointError(self._other_keys(weights, path))
        converted = self.convert(weights, self.grid)
        shape = self._shape(converted, path)
        network = self.network(shape)
        converted = self.rename(converted, network)
        if difference := misfit(converted, network):
            raise CheckpointError(
                f"{path} does not fit {self.title}: {difference}. It is another network than {self.source} describes"
            )
        network.load_state_dict(converted)
        return network

    def _shape(self, weights: StateDict, path: Path) -> ViTShape:
        """The network's shape by its tensors. Raises CheckpointError: a size that was never published."""
        kernel, width = weights["patch_embed.proj.weight"], weights["cls_token"].shape[-1]
        depth = sum(name.startswith("blocks.") and name.endswith(".norm1.weight") for name in weights)
        blocks, heads = self.sizes.get(width, (0, 0))
        patch = tuple(kernel.shape[2:])
        if blocks != depth or patch != self.patch:
            sizes_text = ", ".join(f"width {size} with {blocks} blocks" for size, (blocks, _) in self.sizes.items())
            raise CheckpointError(
                f"{path} has width {width}, {depth} blocks and patches of {patch}; {self.title} is published with "
                f"{sizes_text} and patches of {self.patch}"
            )
        gated = "blocks.0.mlp.w3.weight" in weights
        return ViTShape(
            width,
            depth,
            heads,
            hidden=weights[f"blocks.0.mlp.{'w3.weight' if gated else 'fc2.weight'}"].shape[1],
            channels=kernel.shape[1],
            patch=patch,
            grid=self.grid,
            registers=weights["register_tokens"].shape[1] if "register_tokens" in weights else 0,
            layer_scale="blocks.0.ls1.gamma" in weights,
            gated=gated,
            qkv_bias="blocks.0.attn.qkv.bias" in weights,
            norm="norm.weight" in weights,
            closing_residual=self.closing_residual,
        )

    def _other_keys(self, weights: StateDict, path: Path) -> str:
        missing = ", ".join(sorted(set(self.keys) - weights.keys()))
        fitting = [name for name, other in PUBLISHED.items() if set(other.keys) <= weights.keys()]
        fitting.sort(key=lambda name: -len(PUBLISHED[name].keys))  # the most particular first
        remedy = (
            f"its names are those of {' and '.join(fitting)}: write {fitting[0]}:PATH"
            if fitting
            else f"is it the file that {self.source} publishes?"
        )
        return (
            f"{path} is not a checkpoint of {self.title}: it holds {len(weights)} tensors such as "
            f"{', '.join(list(weights)[:3])}, and lacks {missing}; {remedy}"
        )


class PublishedEncoder(ExternalEncoder):
    """A network of `Published`: on every B-scan, or on the whole volume where its patches are three-dimensional."""

    def __init__(self, network: nn.Module, about: Mapping[str, str], path: Path, published: Published) -> None:
        super().__init__(network, about, path)
        self.published, self.shape = published, cast(ViTShape, network.shape)
        self.reads_bscans = len(published.image) == 2

    def initial(self) -> ExternalEncoder:
        network = self.published.network(self.shape)
        return PublishedEncoder(network, self.about, self.path, self.published)

    def architecture(self) -> dict[str, Any]:
        return {"title": self.published.title, "shape": asdict(self.shape)}

    def width(self, view_shape: tuple[int, int, int]) -> int:
        return self.shape.width

    def grid(self, view_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        slices, depth, columns = (view_shape[0], *self.published.grid)[-3:]
        return slices, depth, columns

    def features(self, view: Float[Tensor, "d h w"]) -> Float[Tensor, "k dim"]:
        published = self.published
        channels: int = self.shape.channels
        if len(published.image) == 3:
            volume = F.interpolate(view[None, None], published.image, mode="trilinear", align_corners=False)
            volume = (volume - published.mean[0]) / published.std[0]
            tokens: Tensor = self.network(volume.expand(-1, channels, -1, -1, -1))[0]
            return tokens
        images = ImageFormat(published.image, channels, published.mean, published.std)  # type: ignore[arg-type]
        return images.encode(view, self.network)


def from_architecture(stored: Mapping[str, Any], path: Path) -> PublishedEncoder:
    """The encoder with initial weights that `PublishedEncoder.architecture` describes.

    Raises KeyError, TypeError, ValueError: it describes none; UsageError: a network beyond the machine's memory.
    """
    check_values(stored["shape"], str(path))
    sizes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored["shape"].items()
    }
    shape = ViTShape(**sizes)
    titles = {published.title: published for published in PUBLISHED.values()}
    image = tuple(count * patch for count, patch in zip(shape.grid, shape.patch, strict=True))
    published = replace(titles[stored["title"]], image=image)
    check_size(lambda: published.network(shape), str(path))
    return PublishedEncoder(published.network(shape), {}, path, published)


def _split_checksum(path: Path) -> tuple[Path, str]:
    text, sign, checksum = str(path).rpartition(CHECKSUM)
    return (Path(text), checksum.lower()) if sign and not path.exists() else (path, "")


# A network that was tuned with another norm (fc_norm) lacks norm.weight, and is not what its authors published.
_VIT_KEYS = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "norm.weight")

PUBLISHED: dict[str, Published] = {
    "retfound": Published(
        "RETFound (MAE, ViT-L/16)",
        "github.com/rmaphoh/RETFound_MAE",
        "CC BY-NC 4.0",
        {1024: (24, 16)},
        (16, 16),
        (224, 224),
        _VIT_KEYS,
    ),
    "visionfm": Published(
        "VisionFM (ViT-B/16)",
        "github.com/ABILab-CUHK/VisionFM",
        "see its repository",
        {768: (12, 12)},
        (16, 16),
        (224, 224),
        _VIT_KEYS,
        mean=(0.211, 0.211, 0.211),
        std=(0.176, 0.176, 0.176),  # its utils.get_stats("OCT")
    ),
    "dinov2": Published(
        "DINOv2 (ViT-S, B, L or g/14)",
        "github.com/facebookresearch/dinov2",
        "Apache-2.0",
        {**_VIT_SIZES, 1536: (40, 24)},
        (14, 14),
        (224, 224),
        (*_VIT_KEYS, "blocks.0.ls1.gamma"),
    ),
    "dinov3": Published(
        "DINOv3 (ViT/16)",
        "github.com/facebookresearch/dinov3",
        "DINOv3 License",
        {**_VIT_SIZES, 1280: (32, 20), 4096: (40, 32)},
        (16, 16),
        (224, 224),
        ("cls_token", "storage_tokens", "rope_embed.periods", "blocks.0.attn.qkv.weight"),
        dinov3_layout,
        DINOv3,
        transformers_names,
    ),
    "mirage": Published(
        "MIRAGE (ViT-B or L/32)",
        "github.com/j-morano/MIRAGE",
        "CC BY-NC-ND 4.0",
        {768: (12, 12), 1024: (24, 16)},
        (32, 32),
        (512, 512),
        ("global_tokens", "input_adapters.bscan.proj.weight", "input_adapters.bscan.pos_emb"),
        mirage_layout,
        mean=(0.0,),
        std=(1.0,),
    ),
    # Pretrained on 60 slices of 256 x 256. Its blocks pass on MLP output and sum apart; the output alone is normalised.
    "octcube": Published(
        "OCTCube (3D MAE, ViT-L/3x16x16)",
        "github.com/ZucksLiu/OCTCubeM",
        "see its repository",
        {1024: (24, 16)},
        (3, 16, 16),
        (60, 256, 256),
        ("cls_token", "pos_embed_spatial", "pos_embed_temporal", "patch_embed.proj.weight"),
        octcube_layout,
        mean=(0.0,),
        std=(1.0,),
        closing_residual=False,
    ),
}
PUBLISHED["retfound_dinov2"] = replace(
    PUBLISHED["dinov2"],
    title="RETFound (DINOv2, ViT-L/14)",
    source="github.com/rmaphoh/RETFound",
    licence="CC BY-NC 4.0",
    sizes={1024: (24, 16)},
)

for _name, _published in PUBLISHED.items():
    ENCODERS.register(_name)(_published.load)
