"""The encoder as an ONNX graph, for runtimes without torch.

Inputs are those of `PretrainedEncoder.select_tokens`: `patches` [batch, tokens, voxels], z-scored over the tissue band,
and `positions` [batch, tokens, 3]. Output `features` [batch, tokens, dim], fp32. Batch and tokens are free.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from octjepa.encoders.pretrained import PretrainedEncoder
from octjepa.errors import UsageError, install_command
from octjepa.model.vjepa3d import grid_positions
from octjepa.progress import bar

OPSET = 18
LARGEST_BYTES = 2_000_000_000  # of one file: protobuf counts in 32 bits


def graph_of(encoder: PretrainedEncoder, about: dict[str, str]) -> bytes:
    """The file's bytes, `about` in its metadata.

    Raises UsageError: the extra is not installed, torch makes no graph, or the weights exceed what one file can hold.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 -- torch's exporter needs it
    except ImportError:
        raise UsageError(f"the ONNX form needs the libraries of an extra: {install_command('onnx')}") from None
    if 4 * encoder.parameters > LARGEST_BYTES:
        raise UsageError(
            f"{encoder.parameters:,} parameters do not fit into one ONNX file: export with --format safetensors"
        )
    recipe = encoder.recipe
    voxels = math.prod(recipe.tokens.patch_size)
    tokens = min(8, recipe.grid_tokens)
    positions = grid_positions(recipe.grid)[:tokens].expand(2, -1, -1).clone()
    batch, count = torch.export.Dim("batch"), torch.export.Dim("tokens")
    try:
        with _quiet(), bar("export", 1, "graph") as progress:
            program = torch.onnx.export(
                encoder.encoder.cpu(),
                (torch.randn(2, tokens, voxels, generator=torch.Generator().manual_seed(0)), positions),
                input_names=["patches", "positions"],
                output_names=["features"],
                dynamic_shapes=({0: batch, 1: count}, {0: batch, 1: count}),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
            progress.advance()
    except torch.onnx.OnnxExporterError as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"torch makes no graph of this encoder ({reason}): export with --format safetensors") from None
    assert program is not None  # only of dynamo=False
    model = program.model_proto
    _forget_sources(model)
    onnx.helper.set_model_props(model, about)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _forget_sources(model: Any) -> None:
    """Takes out what torch notes of where in whose files each node was made."""
    for owner in (model.graph, *model.functions):
        parts = [owner, *owner.node, *owner.value_info]
        if owner is model.graph:
            parts += [*owner.initializer, *owner.input, *owner.output]
        for part in parts:
            part.doc_string = ""
            del part.metadata_props[:]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A user cannot act on the messages of torch's exporter about its steps."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            exporter.setLevel(level)
