"""Exports an encoder with a model card and what it says of its input: safetensors, a model of transformers, or ONNX."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import yaml
from safetensors.torch import save
from torch import Tensor

from octjepa.checkpoint.folder import SCHEMA
from octjepa.checkpoint.weights import EXPORTED, PREFIXES
from octjepa.config import science_hash
from octjepa.encoders.pretrained import PretrainedEncoder, load_encoder
from octjepa.errors import CheckpointError, UsageError
from octjepa.files import write_atomic
from octjepa.locks import LOCK, writer_lock
from octjepa.model.vjepa2 import to_vjepa2, vjepa2_config
from octjepa.recipe import Preprocessing
from octjepa.views.sample import token_positions
from octjepa.views.tokens import COUNT_MULTIPLE, TISSUE_SHARE

Form = Literal["safetensors", "hf", "onnx"]
WEIGHTS, GRAPH, CARD, SUMS = EXPORTED, "model.onnx", "README.md", "SHA256SUMS"
Content = str | bytes | dict[str, Tensor]
PROCESSOR = "OctjepaImageProcessor"
IMAGES, VIDEOS = (
    "pixel_values",
    "pixel_values_videos",
)  # inputs of OctjepaModel [B, 1, D, H, W], VJEPA2Model [B, D, 1, H, W]


def export(
    source: str | Path,
    form: Form,
    out: Path,
    licence: str | None = None,
    metrics: Mapping[str, float] | None = None,
) -> list[str]:
    """Writes the encoder of `source` into the folder `out`; returns the names of its files.

    licence: of the weights, as the Hugging Face Hub names it. metrics: values by name. Both for the card.

    Form safetensors is read back by `load_encoder`; hf is a folder for `transformers.AutoModel`: a VJEPA2Model if
    that computes the same features, otherwise the model of `encoders.auto_model`; onnx a graph from the patches and
    positions of selected tokens to their features. Raises UsageError: `out` is not empty, or the extra of onnx is not
    installed; CheckpointError: the disk refuses.
    """
    return export_encoder(load_encoder(source), form, out, licence, metrics)


def export_encoder(
    encoder: PretrainedEncoder,
    form: Form,
    out: Path,
    licence: str | None = None,
    metrics: Mapping[str, float] | None = None,
) -> list[str]:
    """As `export`, for an encoder that is already loaded or was just trained."""
    if out.exists() and not out.is_dir():
        raise _not_empty(out)
    file_contents = {"safetensors": _safetensors, "hf": _hugging_face, "onnx": _onnx}[form](encoder)
    file_contents[CARD] = front_matter(encoder, form, licence, metrics or {}) + str(file_contents[CARD])
    files = {name: _bytes(content, _about(encoder)) for name, content in file_contents.items()}
    sums = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    files[SUMS] = "".join(sums).encode()  # last: with it the folder is whole
    with writer_lock(out):
        try:
            _remove_left_over(out, files)
            for name, data in files.items():
                write_atomic(out / name, partial(_write, data))
        except OSError as error:
            raise CheckpointError(f"could not write {out}: {error.strerror or error}") from None
    return list(files)


def _bytes(content: Content, about: dict[str, str]) -> bytes:
    if isinstance(content, dict):
        return with_sorted_metadata(save(content, about))
    return content.encode() if isinstance(content, str) else content


# The last paragraph of a card; the card of packaged weights says how they were made in its place.
OF_THE_RECIPE = """\
The objective and the tokens are those of the recipe in the weights. The weights do not record what else the encoder
learned from: the labels of a fine-tuning, the truth of phantoms, the tokens of a teacher.
"""


def with_sorted_metadata(data: bytes) -> bytes:
    """The file with its metadata in order: safetensors writes them in any, and equal exports should be equal files."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data[start:]


def _write(data: bytes, file: IO[bytes]) -> None:
    file.write(data)


def _remove_left_over(out: Path, files: Mapping[str, bytes]) -> None:
    """Removes halves of `files`, as a killed export leaves them. Raises UsageError where anything else is there."""
    halves = {f".{name}.tmp" for name in files}
    existing = [path for path in out.iterdir() if path.name != LOCK]
    if any(path.name not in halves and not _holds(path, files.get(path.name)) for path in existing):
        raise _not_empty(out)
    for path in existing:
        if path.name in halves:
            path.unlink()


def _holds(path: Path, content: bytes | None) -> bool:
    """Whether `path` is a file with this content. A file of another size, which may be large, is not read."""
    return (
        content is not None and path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
    )


def _not_empty(out: Path) -> UsageError:
    return UsageError(f"{out} exists and is not an empty folder: name a new one")


def _about(encoder: PretrainedEncoder) -> dict[str, str]:
    recipe = encoder.recipe
    about = {
        "schema": SCHEMA,
        "recipe": recipe.model_dump(mode="json"),
        "contract_hash": science_hash(recipe.preprocessing),
        "trained_on": sorted(encoder.recorded_training),
    }
    return {"octjepa": json.dumps(about), "format": "pt"}


def _safetensors(encoder: PretrainedEncoder) -> dict[str, Content]:
    prefix = PREFIXES[encoder.which]
    weights: Content = {f"{prefix}{name}": value for name, value in encoder.encoder.state_dict().items()}
    return {WEIGHTS: weights, CARD: card(encoder, "octjepa.load_encoder(folder)")}


def _hugging_face(encoder: PretrainedEncoder) -> dict[str, Content]:
    """The files of a `transformers` export: a VJEPA2Model if it computes the same, otherwise a model of ours."""
    recipe, grid = encoder.recipe, encoder.recipe.grid
    reason = ""
    if recipe.model.position_unit != "index":
        reason = f"positions in {recipe.model.position_unit}: VJEPA2Model counts token steps"
    elif grid[1] != grid[2]:
        reason = f"a grid of {grid[1]} x {grid[2]} tokens in the plane: VJEPA2Model numbers positions on a square one"
    try:
        weights = to_vjepa2(encoder.encoder, recipe.tokens.patch_size)
    except ValueError as error:
        reason = reason or str(error)
    processor = processor_config(recipe.preprocessing, IMAGES if reason else VIDEOS)
    files: dict[str, Content] = {
        "preprocessing.json": input_contract(encoder),
        "preprocessor_config.json": json.dumps(processor, indent=2),
    }
    if reason:
        weights = {f"encoder.{name}": value for name, value in encoder.encoder.state_dict().items()}
        config = {"architectures": ["OctjepaModel"], "model_type": "octjepa", "recipe": recipe.model_dump(mode="json")}
        text = card(encoder, "import octjepa.encoders.auto_model; transformers.AutoModel.from_pretrained(folder)")
        text += f"\nWhy not VJEPA2Model: {reason}. So octjepa has to be installed where this is loaded.\n"
    else:
        config = vjepa2_config(encoder.encoder, recipe.tokens.patch_size, grid)
        text = card(encoder, "transformers.AutoModel.from_pretrained(folder)")
    if recipe.token_count < recipe.grid_tokens:
        text += (
            f"\nThis model takes all {recipe.grid_tokens} tokens of a volume, and the encoder was trained on "
            f"{recipe.token_count} of them, of tissue first, and octjepa embeds only with tissue tokens: its "
            "features here are not those of `octjepa embed`, and their quality was not measured.\n"
        )
    return {WEIGHTS: weights, "config.json": json.dumps(config, indent=2), **files, CARD: text}


def _onnx(encoder: PretrainedEncoder) -> dict[str, Content]:
    """The files of an ONNX export by name."""
    from octjepa.encoders.graph import graph_of

    recipe = encoder.recipe
    how = f'onnxruntime.InferenceSession("{GRAPH}").run(["features"], {{"patches": ..., "positions": ...}})'
    inputs = {
        "patches": f"[batch, tokens, {math.prod(recipe.tokens.patch_size)}]: voxels of a patch by slice, row and "
        "column, minus the mean and by the standard deviation of the volume's tissue mask",
        "positions": "[batch, tokens, 3]: of each patch its row of grid_positions",
        "chosen": "any number of patches a volume; octjepa gives every patch with a share of at least "
        f"{TISSUE_SHARE} of tissue, filled up to a multiple of {COUNT_MULTIPLE} by the nearest others (with "
        "tokens.select all, every patch)",
        "grid": recipe.grid,
        "position_unit": recipe.model.position_unit,
        "grid_positions": token_positions(np.arange(recipe.grid_tokens), recipe).tolist(),
    }
    text = card(encoder, how) + ("\nA runtime checks nothing: its inputs must follow preprocessing.json.\n")
    return {
        GRAPH: graph_of(encoder, _about(encoder)),
        "preprocessing.json": input_contract(encoder, inputs),
        CARD: text,
    }


def front_matter(encoder: PretrainedEncoder, form: Form, licence: str | None, metrics: Mapping[str, float]) -> str:
    """The YAML block at the head of a card, as the Hugging Face Hub reads it; `metrics` as its model-index."""
    measured = [{"type": name, "value": value} for name, value in metrics.items()]
    result = {
        "task": {"type": "image-feature-extraction"},
        "dataset": {"name": "see the card", "type": "retinal-oct"},
        "metrics": measured,
    }
    about = {
        "library_name": "transformers" if form == "hf" else "octjepa",
        **({} if licence is None else {"license": licence}),
        "pipeline_tag": "image-feature-extraction",
        "tags": ["octjepa", "optical-coherence-tomography", "retina", "medical", encoder.recipe.objective.name],
        **({"metrics": list(metrics), "model-index": [{"name": encoder.name, "results": [result]}]} if metrics else {}),
    }
    return f"---\n{yaml.safe_dump(about, sort_keys=False)}---\n\n"


def card(encoder: PretrainedEncoder, how: str) -> str:
    """A model card in Markdown: architecture, expected input, training data, and limits."""
    recipe = encoder.recipe
    size, spacing, patch = (
        " x ".join(map(str, values))
        for values in (
            recipe.preprocessing.image_size,
            recipe.preprocessing.target_spacing_mm,
            recipe.tokens.patch_size,
        )
    )
    recorded = "content hashes" + (" and hashes of their SOP instance UIDs" if encoder.trained_on_uids else "")
    trained_on = f"{len(encoder.trained_on)} volumes; their {recorded} are in the weights' metadata"
    entries = {
        "Objective": recipe.objective.name,
        "Weights": "the EMA target" if encoder.which == "target" else "the student",
        "Encoder": f"{recipe.model.size}, {encoder.dim} features a token, {encoder.parameters:,} parameters",
        "Input": f"{size} voxels at {spacing} mm (slice, depth, column), "
        f"one channel, left eyes mirrored: {recipe.preprocessing.orientation == 'OD'}",
        "Tokens": f"patches of {patch}, trained on {recipe.token_count} of {recipe.grid_tokens} in a volume",
        "Trained on": trained_on if encoder.recorded_training else "no scan that the weights' metadata name",
        "Contract": science_hash(recipe.preprocessing),
        "Load with": f"`{how}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in entries.items())
    return f"""# {encoder.name}

| | |
|---|---|
{table}

Features of retinal OCT volumes, for research. Not a medical device: no decision about a patient may rest on it. Their
quality has to be shown by probes on held-out people of your data, next to an untrained encoder
(`octjepa probe`). Volumes must be prepared by the contract above; `octjepa` refuses others.

{OF_THE_RECIPE}"""


def input_contract(encoder: PretrainedEncoder, inputs: dict[str, Any] | None = None) -> str:
    """preprocessing.json: what an input must have undergone."""
    recipe = encoder.recipe
    contract: dict[str, Any] = {
        "preprocessing": recipe.preprocessing.model_dump(mode="json"),
        "tokens": recipe.tokens.model_dump(mode="json"),
        "intensity": "z-score over the tissue mask, once",
        **({} if inputs is None else {"inputs": inputs}),
    }
    return json.dumps(contract, indent=2)


def processor_config(preprocessing: Preprocessing, input_name: str) -> dict[str, Any]:
    """The `preprocessor_config.json` of an encoder whose model calls its input `input_name`.

    The keys that no code here reads say the contract to whoever prepares the input by other means.
    """
    slices, depth, columns = preprocessing.image_size
    shape = ["B", 1, slices, depth, columns] if input_name == IMAGES else ["B", slices, 1, depth, columns]
    return {
        "image_processor_type": PROCESSOR,
        "input_name": input_name,
        "input_shape": shape,
        "size": {"slices": slices, "depth": depth, "columns": columns},
        "spacing_mm": list(preprocessing.target_spacing_mm),
        "num_channels": 1,
        "normalization": "z-score over the tissue mask of each volume, once; no further mean or standard deviation",
        "preprocessing": preprocessing.model_dump(mode="json"),
    }
