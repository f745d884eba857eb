"""Tensors that are dealt over the ranks (FSDP2's), and any others alike: this rank's part, and all parts together.

They are told by what they can do: torch's module of them takes half a second to import, and few runs need it.
"""

from __future__ import annotations

from torch import Tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is dealt over the ranks; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All parts of a tensor that is dealt over the ranks, which all call this; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
