"""Opens the encoder at a location, whoever made it."""

from __future__ import annotations

from pathlib import Path

from octjepa.checkpoint.location import parse_location
from octjepa.checkpoint.weights import newest_checkpoint
from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.external.base import ExternalEncoder, check_address, is_external, load_external
from octjepa.encoders.external.prepared import PreparedExternal
from octjepa.encoders.pretrained import load_encoder
from octjepa.errors import OctjepaError, UsageError
from octjepa.recipe import Preprocessing
from octjepa.shipped import is_segmenter, shipped


def open_encoder(location: str | Path, preprocessing: Preprocessing | None = None) -> FrozenEncoder:
    """The encoder at `location`, octjepa's or another project's.

    location: what `load_encoder` or `load_external` takes, or "phantom-unet", the segmentation network as an encoder.
    preprocessing: of the volumes that phantom-unet or another project's encoder is to read; others of ours, and one
    that was tuned here, have their own. Raises what `load_encoder` and `load_external` raise.
    """
    if is_segmenter(location):
        from octjepa.encoders.dense import DenseEncoder  # it imports the phantoms, which other encoders do without

        return DenseEncoder.packaged(preprocessing)
    if not is_external(location):
        check_address(location)
        return load_encoder(location)
    return prepare_external(load_external(location), preprocessing)


def current_checkpoint(location: str | Path) -> str | Path:
    """The step folder that is the newest of the run at `location` now; anything else that can be opened stays.

    A run that is still training has another newest checkpoint later.
    """
    if shipped(location) is not None:
        return location
    try:
        return newest_checkpoint(parse_location(location))
    except OctjepaError:  # no run; whoever opens it reports what is wrong
        return location


def prepare_external(external: ExternalEncoder, preprocessing: Preprocessing | None) -> PreparedExternal:
    """Another project's encoder for volumes prepared by `preprocessing`, or as it was tuned, which takes precedence.

    Raises UsageError: neither is known.
    """
    prepared = preprocessing if external.tuned_on is None else external.tuned_on.preprocessing
    if prepared is None:
        raise UsageError(f"{external.path} is an encoder of another project that was not tuned here")
    return PreparedExternal(external, prepared)
