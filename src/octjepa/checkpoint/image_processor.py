"""The input of an exported encoder for `transformers.AutoImageProcessor`: scans to the tensor that its model takes.

    import octjepa.checkpoint.auto_model
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = processor("scan.dcm")  # or several; also OCTVolume, or the volumes of a store

No class of `transformers` computes this: theirs resize pictures by pixels, and this resamples a volume by its spacing
in millimetres, levels Bruch's membrane, and takes z-scores over the tissue band of each volume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from octjepa.checkpoint.input_contract import IMAGES, VIDEOS
from octjepa.checkpoint.module import collate_images, prepare_volume
from octjepa.recipe import Preprocessing
from octjepa.store import CanonicalVolume
from octjepa.volume import OCTVolume

Scan = str | Path | OCTVolume | CanonicalVolume


class OctjepaImageProcessor(BaseImageProcessor):
    """Scans -> `{input_name: tensor}`; `preprocessing` is the contract by which the encoder's volumes were prepared."""

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
