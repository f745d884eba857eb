"""The encoder as an ONNX graph, for runtimes without torch.

Inputs are those of `PretrainedEncoder.selected`: `patches` [batch, tokens, voxels], z-scored over the tissue band, and
`places` [batch, tokens, 3]. Output `features` [batch, tokens, dim], fp32. Batch and tokens are free.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator

import torch

from octjepa.checkpoint.encoder import PretrainedEncoder
from octjepa.errors import UsageError
from octjepa.extras import to_install
from octjepa.model.vjepa3d import grid_places

OPSET = 18
LARGEST_BYTES = 2_000_000_000  # of one file: protobuf counts in 32 bits


def graph_of(encoder: PretrainedEncoder) -> bytes:
    """The file's bytes. Raises UsageError: the extra is not installed, or the weights exceed what one file can hold."""
    try:
        import onnx
        import onnxscript  # noqa: F401 -- torch's exporter needs it
    except ImportError:
        raise UsageError(f"the ONNX form needs the libraries of an extra: {to_install('onnx')}") from None
    if 4 * encoder.parameters > LARGEST_BYTES:
        raise UsageError(
            f"{encoder.parameters:,} parameters do not fit into one ONNX file: export with --format safetensors"
        )
    recipe = encoder.recipe
    voxels = math.prod(recipe.tokens.patch_size)
    tokens = min(8, recipe.grid_tokens)
    places = grid_places(recipe.grid)[:tokens].expand(2, -1, -1).clone()
    batch, count = torch.export.Dim("batch"), torch.export.Dim("tokens")
    with _quiet():
        made = torch.onnx.export(
            encoder.encoder.cpu(),
            (torch.randn(2, tokens, voxels, generator=torch.Generator().manual_seed(0)), places),
            input_names=["patches", "places"],
            output_names=["features"],
            dynamic_shapes=({0: batch, 1: count}, {0: batch, 1: count}),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    if made is None:
        raise UsageError("torch made no graph of this encoder: export with --format safetensors")
    onnx.checker.check_model(made.model_proto)
    return made.model_proto.SerializeToString()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch's exporter tells of its own steps is nothing that a user could act on."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            exporter.setLevel(level)
