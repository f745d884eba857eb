"""An encoder of any recipe for transformers' `AutoModel` and `AutoImageProcessor`: import this module first.

    import octjepa.encoders.auto_model
    model = transformers.AutoModel.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)  # of either form
    inputs = processor("scan.dcm")  # or several; also OCTVolume, or the volumes of a store

`octjepa export --format hf` writes this form where `VJEPA2Model` cannot compute the encoder's function: paired rotary
positions, positions in millimetres, a grid or patches that are not square, a stem of two layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from octjepa.config import stored_recipe
from octjepa.encoders.export import IMAGES, VIDEOS
from octjepa.encoders.module import VolumeEncoder, collate_images, prepare_volume
from octjepa.model import VJEPA3D
from octjepa.recipe import Preprocessing
from octjepa.volume import CanonicalVolume, OCTVolume

MODEL_TYPE = "octjepa"
Scan = str | Path | OCTVolume | CanonicalVolume


class OctjepaConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """`recipe`: that of the encoder's pretraining, which fixes its shape, its positions and the images it takes."""

    model_type = MODEL_TYPE

    def __init__(self, recipe: Mapping[str, Any] | None = None, **others: Any) -> None:
        self.recipe = dict(recipe or {})
        super().__init__(**others)


class OctjepaModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Images `[B, 1, D, H, W]`, prepared by the contract -> `last_hidden_state` `[B, T, width]`, `pooler_output`.

    Tokens are those of the whole grid, in raster order over slice, depth and column; `pooler_output` is their mean.
    """

    config_class = OctjepaConfig
    main_input_name = "pixel_values"

    def __init__(self, config: OctjepaConfig) -> None:
        super().__init__(config)
        self.recipe = stored_recipe(config.recipe, "of config.json")
        self.encoder = VJEPA3D.from_recipe(self.recipe).target_encoder
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: the encoder draws its own initial weights."""

    def forward(
        self, pixel_values: Float[Tensor, "b 1 d h w"], return_dict: bool | None = None
    ) -> BaseModelOutputWithPooling | tuple[Tensor, Tensor]:
        module = VolumeEncoder(self.encoder, self.recipe).to(pixel_values.device)
        tokens, pooled = module(pixel_values)
        if return_dict is False:
            return tokens, pooled
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)


class OctjepaImageProcessor(BaseImageProcessor):
    """Scans -> `{input_name: tensor}`; `preprocessing` is the contract by which the encoder's volumes were prepared.

    No class of `transformers` computes this: theirs resize pictures by pixels, and this resamples a volume by its
    spacing in millimetres, levels Bruch's membrane, and takes z-scores over the tissue band of each volume.
    """

    def __init__(self, preprocessing: Mapping[str, Any] | None = None, input_name: str = IMAGES, **others: Any) -> None:
        self.preprocessing = Preprocessing.model_validate(dict(preprocessing or {})).model_dump(mode="json")
        self.input_name = input_name
        super().__init__(**others)
        self.model_input_names = [input_name]

    def preprocess(self, images: Scan | Sequence[Scan], return_tensors: str | None = "pt") -> BatchFeature:
        """One scan or several: paths, native volumes, or volumes of a store with the same contract.

        Calling the processor calls this. Raises VolumeRejected for a file that cannot be read.
        """
        contract = Preprocessing.model_validate(self.preprocessing)
        scans = [images] if isinstance(images, Scan) else images
        batch = collate_images([prepare_volume(scan, contract) for scan in scans], contract)  # [B, 1, D, H, W]
        if self.input_name == VIDEOS:
            batch = batch.transpose(1, 2)
        return BatchFeature({self.input_name: batch.numpy()}, tensor_type=return_tensors)


AutoConfig.register(MODEL_TYPE, OctjepaConfig, exist_ok=True)
AutoModel.register(OctjepaConfig, OctjepaModel, exist_ok=True)
AutoImageProcessor.register(OctjepaConfig, slow_image_processor_class=OctjepaImageProcessor, exist_ok=True)
