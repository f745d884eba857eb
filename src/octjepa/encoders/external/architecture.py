"""Checks the description of a network that comes with a folder, before any library reads it.

In: the content of a folder's config.json (transformers) or monai.json (MONAI), which may come from a stranger. Out: the
keys that shape the network, all with plain values of ordinary size. Libraries act on many other keys: they fetch
weights (`backbone`, `use_pretrained_backbone`, `pretrained`), load native code (`attn_implementation`,
`quantization_config`) or pass arguments to a further library (`timm_wrapper`). An allow list is the only list that
stays right when a library adds a key. `offline` in addition keeps the hub's client from the network.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from octjepa.errors import UsageError
from octjepa.machine import excess_of_parameters
from octjepa.parsing import shown

# Vision encoders of transformers that take `pixel_values` and build nothing of another library.
MODEL_TYPES = (
    "beit",
    "clip_vision_model",
    "convnext",
    "convnextv2",
    "data2vec-vision",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_convnext",
    "dinov3_vit",
    "focalnet",
    "hiera",
    "ijepa",
    "pvt_v2",
    "regnet",
    "resnet",
    "siglip_vision_model",
    "swin",
    "swinv2",
    "vit",
    "vit_mae",
    "vit_msn",
    "vjepa2",
)
# Keys of their configurations that shape the network or its computation.
_SHAPE_KEYS = frozenset(
    [
        "apply_layernorm",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "crop_size",
        "decoder_depth",
        "decoder_hidden_size",
        "decoder_intermediate_size",
        "decoder_num_attention_heads",
        "decoder_num_heads",
        "decoder_num_hidden_layers",
        "depths",
        "downsample_in_bottleneck",
        "downsample_in_first_stage",
        "drop_path_rate",
        "embed_dim",
        "embed_dim_multiplier",
        "embedding_size",
        "encoder_stride",
        "focal_levels",
        "focal_windows",
        "frames_per_clip",
        "groups_width",
        "hidden_act",
        "hidden_dropout_prob",
        "hidden_size",
        "hidden_sizes",
        "image_size",
        "in_chans",
        "intermediate_size",
        "key_bias",
        "layer_norm_eps",
        "layer_norm_init",
        "layer_scale_init_value",
        "layer_type",
        "layerscale_value",
        "linear_attention",
        "mask_ratio",
        "masked_unit_attention",
        "masked_unit_size",
        "mlp_bias",
        "mlp_ratio",
        "mlp_ratios",
        "norm_pix_loss",
        "normalize_modulator",
        "num_attention_heads",
        "num_channels",
        "num_encoder_blocks",
        "num_heads",
        "num_hidden_layers",
        "num_layers",
        "num_pooler_layers",
        "num_query_pool",
        "num_register_tokens",
        "num_stages",
        "patch_padding",
        "patch_size",
        "patch_sizes",
        "patch_stride",
        "pooler_act",
        "pooler_output_size",
        "pos_embed_jitter",
        "pos_embed_rescale",
        "pos_embed_shift",
        "pred_hidden_size",
        "pred_mlp_ratio",
        "pred_num_attention_heads",
        "pred_num_hidden_layers",
        "pred_num_mask_tokens",
        "pred_zero_init_mask_tokens",
        "pretrained_window_sizes",
        "proj_bias",
        "projection_dim",
        "qkv_bias",
        "query_bias",
        "query_stride",
        "rope_theta",
        "sr_ratios",
        "strides",
        "tubelet_size",
        "use_absolute_embeddings",
        "use_absolute_position_embeddings",
        "use_conv_embed",
        "use_gated_mlp",
        "use_layerscale",
        "use_mask_token",
        "use_mean_pooling",
        "use_post_layernorm",
        "use_post_layernorm_in_modulation",
        "use_relative_position_bias",
        "use_shared_relative_position_bias",
        "use_swiglu_ffn",
        "value_bias",
        "vision_use_head",
        "vocab_size",
        "window_size",
    ]
)
# Keys that say nothing about the encoder: they are left out, whatever they hold.
_IGNORED_KEYS = frozenset(
    [
        "_name_or_path",
        "add_cross_attention",
        "add_fpn",
        "architectures",
        "auxiliary_channels",
        "auxiliary_concat_input",
        "auxiliary_loss_weight",
        "auxiliary_num_convs",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "normalize_pixel_loss",
        "out_features",
        "out_indices",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pool_scales",
        "problem_type",
        "reshape_hidden_states",
        "return_dict",
        "semantic_loss_ignore_index",
        "stage_names",
        "tie_word_embeddings",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_auxiliary_head",
        "use_cache",
    ]
)
# Arguments of MONAI's networks that shape them; `pretrained` would fetch weights.
_MONAI_RESNET = frozenset(
    [
        "spatial_dims",
        "n_input_channels",
        "num_classes",
        "widen_factor",
        "shortcut_type",
        "conv1_t_size",
        "conv1_t_stride",
        "no_max_pool",
        "feed_forward",
        "bias_downsample",
        "act",
        "norm",
    ]
)
MONAI_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "resnet10": _MONAI_RESNET,
    "resnet18": _MONAI_RESNET,
    "resnet34": _MONAI_RESNET,
    "resnet50": _MONAI_RESNET,
    "DenseNet121": frozenset(
        [
            "spatial_dims",
            "in_channels",
            "out_channels",
            "init_features",
            "growth_rate",
            "block_config",
            "bn_size",
            "act",
            "norm",
            "dropout_prob",
        ]
    ),
    "SegResNet": frozenset(
        [
            "spatial_dims",
            "init_filters",
            "in_channels",
            "out_channels",
            "dropout_prob",
            "act",
            "norm",
            "norm_name",
            "num_groups",
            "use_conv_final",
            "blocks_down",
            "blocks_up",
            "upsample_mode",
        ]
    ),
    "SwinUNETR": frozenset(
        [
            "img_size",
            "in_channels",
            "out_channels",
            "patch_size",
            "depths",
            "num_heads",
            "window_size",
            "qkv_bias",
            "mlp_ratio",
            "feature_size",
            "norm_name",
            "drop_rate",
            "attn_drop_rate",
            "dropout_path_rate",
            "normalize",
            "patch_norm",
            "spatial_dims",
            "downsample",
            "use_v2",
        ]
    ),
    "ViTAutoEnc": frozenset(
        [
            "in_channels",
            "img_size",
            "patch_size",
            "out_channels",
            "deconv_chns",
            "hidden_size",
            "mlp_dim",
            "num_layers",
            "num_heads",
            "proj_type",
            "dropout_rate",
            "spatial_dims",
            "qkv_bias",
        ]
    ),
}
_LARGEST = 65_536  # of a width, a number of heads or an image side
_MOST_LAYERS = 256
_MOST_ITEMS = 64  # of a list, such as the depths of the stages
_LONGEST_TEXT = 60  # such as the name of an activation


def transformers_keys(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of config.json that shape the network, and its `model_type`. Raises UsageError for any other key."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UsageError(f"{where}: model_type is {shown(kind)}, expected one of {', '.join(MODEL_TYPES)}")
    unknown = sorted(set(config) - _SHAPE_KEYS - _IGNORED_KEYS)
    if unknown:
        raise UsageError(
            f"{where}: the key {shown(unknown[0])} is not read from a folder, because a key may fetch files or load "
            "code: remove it if the encoder does not need it"
        )
    shape = {key: value for key, value in config.items() if key in _SHAPE_KEYS}
    check_values(shape, where)
    return {**shape, "model_type": kind}


def monai_arguments(network: str, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of a MONAI network. Raises UsageError for one that is not in `MONAI_ARGUMENTS`."""
    unknown = sorted(set(arguments) - MONAI_ARGUMENTS[network])
    if unknown:
        raise UsageError(
            f"{where}: the argument {shown(unknown[0])} of {network} is not read from a folder; read are "
            f"{', '.join(sorted(MONAI_ARGUMENTS[network]))}"
        )
    check_values(arguments, where)
    return dict(arguments)


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Raises UsageError for a value that no network has: huge, not finite, a long text, a deep or long list."""
    for key, value in values.items():
        layers = any(part in key for part in ("layers", "depth", "block", "stages", "registers"))
        _check_value(key, value, _MOST_LAYERS if layers else _LARGEST, 0, where)


def _check_value(key: str, value: Any, largest: int, depth: int, where: str) -> None:
    if isinstance(value, Mapping):  # such as MONAI's ["GROUP", {"num_groups": 8}]
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        if len(value) > _MOST_ITEMS or depth > 2:
            raise UsageError(f"{where}: {shown(key)} holds {len(value):,} values or lists in lists in lists")
        for item in value:
            _check_value(key, item, largest, depth + 1, where)
    elif isinstance(value, str):
        if len(value) > _LONGEST_TEXT or "/" in value:
            raise UsageError(f"{where}: {shown(key)} is {shown(value)}: expected a short word")
    elif not (value is None or isinstance(value, bool) or _is_ordinary(value, largest)):
        raise UsageError(f"{where}: {shown(key)} is {shown(value)}: expected a number of at most {largest:,}")


def _is_ordinary(value: object, largest: int) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= largest


class _NumbersOnCpu(TorchFunctionMode):
    """Constructors read rates of stochastic depth from `torch.linspace`: "meta" holds no values to read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {}), **({"device": "cpu"} if func is torch.linspace else {})}
        return func(*args, **kwargs)


def check_size(build: Callable[[], nn.Module], where: str) -> None:
    """Builds the network on the device "meta", where a tensor takes no memory.

    Raises UsageError where its parameters would exceed half of this machine's memory, and whatever `build` raises.
    """
    with torch.device("meta"), _NumbersOnCpu():
        count = sum(parameter.numel() for parameter in build().parameters())
    if excess := excess_of_parameters(count):
        raise UsageError(f"{where} describes a network of {excess}")


@contextmanager
def offline() -> Iterator[None]:
    """Within it, neither huggingface_hub nor transformers contact the network, whatever a folder says."""
    constants: Any = None
    with suppress(ImportError):  # MONAI does without it
        constants = import_module("huggingface_hub.constants")  # reads the variables now, before they are set here
    was_offline = getattr(constants, "HF_HUB_OFFLINE", None)
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    if constants is not None:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if constants is not None:
            constants.HF_HUB_OFFLINE = was_offline
