"""Checkpoints as others publish them: read without running code, unpacked to tensors, with the file's checksum."""

from __future__ import annotations

import argparse
import hashlib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from octjepa.checkpoint.tensor_file import check_weights, read_safetensors
from octjepa.errors import CheckpointError, UsageError

StateDict = dict[str, Tensor]
# Where training scripts put the network: MAE, DINO and its followers, Lightning.
_CONTAINERS = ("model", "teacher", "target_encoder", "state_dict", "model_state_dict", "encoder")
_WRAPPERS = (
    "module.",
    "_orig_mod.",
    "backbone.",
    "model.",
)  # DistributedDataParallel, torch.compile, DINO, hub mix-ins


def read_state_dict(path: Path) -> StateDict:
    """The tensors of a .safetensors file or of a file of `torch.save`, in fp32, under the names within the network.

    No code of the file is run: pickles are read with `weights_only`, and besides tensors they may hold the
    `argparse.Namespace` in which MAE and its followers keep their options. Raises UsageError (no such file) and
    CheckpointError (a damaged file, other objects in it, or no tensors).
    """
    if not path.is_file():
        raise UsageError(f"no file at {path}: give the checkpoint as its authors publish it (.pth, .pt, .safetensors)")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    opened: set[int] = set()  # a damaged file may hold a container that holds itself
    while not _is_state_dict(content):
        opened.add(id(content))
        inners = (content[key] for key in _CONTAINERS if isinstance(content.get(key), Mapping))
        inner = next((inner for inner in inners if id(inner) not in opened), None)
        if inner is None:
            content_text = ", ".join(map(str, list(content)[:5])) or "nothing"
            raise CheckpointError(
                f"{path} holds no tensors, but {content_text}: expected them there or in model or teacher"
            )
        content = inner
    check_weights({str(name): value for name, value in content.items() if isinstance(value, Tensor)}, str(path))
    tensors = ((str(name), value) for name, value in content.items() if isinstance(value, Tensor))
    return {_plain_name(name): value.float() if value.is_floating_point() else value for name, value in tensors}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_archive(path: Path) -> None:
    """Raises CheckpointError where a file of `torch.save` unpacks to more than it holds.

    torch stores its tensors uncompressed, and would inflate a compressed member without a limit.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        packed = next((member for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise CheckpointError(f"{path} holds compressed data, which torch.save does not write: fetch the file again")


def _is_text(path: Path) -> bool:
    """Whether the file begins as text does: a page or a pointer of Git LFS that was fetched in place of weights."""
    with path.open("rb") as file:
        start = file.read(256)
    return start != b"" and start.isascii() and all(byte >= 32 or byte in b"\t\n\r" for byte in start)


def _read_pickle(path: Path) -> Mapping[str, Any]:
    try:
        if _is_text(path):
            raise CheckpointError(f"{path} is a text file and no checkpoint: fetch the weights, or name another file")
        _check_archive(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        causes = (line.partition("WeightsUnpickler error:")[2].strip() for line in str(error).splitlines())
        cause = next(filter(None, causes), "")  # without the library's request to file an issue
        raise CheckpointError(
            f"{path} is not a plain checkpoint, and none of its code was run ({cause or 'it cannot be unpickled'}): "
            "where "
            "you trust it, save only its state dict, with torch.save(network.state_dict(), FILE)"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, zipfile.BadZipFile, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).partition(chr(10))[0] or 'it ends too early'}") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}: expected the state dict of a network")
    return content


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        return read_safetensors(path)[0]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _is_state_dict(content: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and "." in str(name) for name, value in content.items())


def _plain_name(name: str) -> str:
    """Without wrappers, and without the chunks in which DINOv2 shards its blocks: N of `blocks.CHUNK.N` counts all."""
    while (wrapper := next((part for part in _WRAPPERS if name.startswith(part)), None)) is not None:
        name = name.removeprefix(wrapper)
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
