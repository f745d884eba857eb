"""What an exported folder says of the input: `preprocessing.json`, and `preprocessor_config.json` for transformers."""

from __future__ import annotations

import json
from typing import Any

from octjepa.checkpoint.encoder import PretrainedEncoder
from octjepa.recipe import Preprocessing

PROCESSOR = "OctjepaImageProcessor"
IMAGES, VIDEOS = (
    "pixel_values",
    "pixel_values_videos",
)  # inputs of OctjepaModel [B, 1, D, H, W], VJEPA2Model [B, D, 1, H, W]


def input_contract(encoder: PretrainedEncoder, inputs: dict[str, Any] | None = None) -> str:
    """preprocessing.json: what an input must have undergone."""
    recipe = encoder.recipe
    contract: dict[str, Any] = {
        "preprocessing": recipe.preprocessing.model_dump(mode="json"),
        "tokens": recipe.tokens.model_dump(mode="json"),
        "intensity": "z-score over the tissue band, once",
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
        "normalization": "z-score over the tissue band of each volume, once; no further mean or standard deviation",
        "preprocessing": preprocessing.model_dump(mode="json"),
    }
