"""Reads weights files: every loader of an encoder, of octjepa or of another project, gets its tensors here.

In: the path of a .safetensors file. Out: tensors by name. Weights may come from strangers, so the length of the header
is limited, and weights that are NaN or infinite, or that repeat a small storage to declare a huge tensor, are refused
before anything is computed with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from octjepa.errors import CheckpointError
from octjepa.parsing import Malformed, check_safetensors


def read_safetensors(path: Path, name: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by name, metadata) of the safetensors file `path`, which messages call `name`.

    Raises CheckpointError (damaged, or a header longer than any of ours could be) and OSError (it cannot be read).
    """
    try:
        check_safetensors(path)
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- no mapping
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, Malformed) as error:
        raise CheckpointError(f"{name or path} is damaged: {str(error)[:300]}") from None


def misfit(weights: Mapping[str, Tensor], network: nn.Module) -> str:
    """The first tensor by name that `network` does not have in this shape, or that is absent; "" if all fit."""
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if shapes == expected:
        return ""
    name = min(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    return f"{name[:120]} is {shapes.get(name, 'absent')} in the file, expected {expected.get(name, 'absent')}"


def check_weights(weights: Mapping[str, Tensor], name: str) -> None:
    """Raises CheckpointError where weights hold NaN or infinity, declare more values than they store, or are not
    plain tensors but sparse, quantized, packed or without values (on the device "meta").

    A sum over each tensor is enough and takes no memory: NaN and infinity propagate through it.
    """
    for key, value in weights.items():
        is_packed = value.is_quantized or value.dtype == torch.float4_e2m1fn_x2
        if value.layout != torch.strided or value.is_meta or is_packed:
            raise CheckpointError(
                f"the weights of {name} cannot be read: {key[:120]} is not a plain tensor. Save the network's state "
                "dict as dense fp32, fp16 or bf16 tensors"
            )
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(f"the weights of {name} are damaged: {key[:120]} declares more values than it stores")
        if (value.is_floating_point() or value.is_complex()) and not torch.isfinite(
            value.sum(dtype=torch.float64 if value.dtype == torch.float64 else torch.float32)
        ):
            raise CheckpointError(
                f"the weights of {name} hold NaN or infinite values ({key[:120]}): every feature would be NaN. Take an "
                "earlier checkpoint, or fetch the file again"
            )
