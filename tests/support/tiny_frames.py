"""Writes src/octjepa/doctor/frames.json anew: .venv/bin/python tests/support/tiny_frames.py"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from pydicom.pixels.encoders import RLELosslessEncoder
from pydicom.uid import RLELossless

from octjepa.doctor import install
from syntaxes import CODED

OUT = Path(install.__file__).parent / "frames.json"


def frames() -> dict[str, bytes]:
    shape = {"rows": 16, "columns": 16, "number_of_frames": 1, "samples_per_pixel": 1, "pixel_representation": 0}
    depth = {"bits_allocated": 8, "bits_stored": 8, "photometric_interpretation": "MONOCHROME2"}
    coded = {str(RLELossless): bytes(RLELosslessEncoder.encode(install.frame(), **shape, **depth))}
    return coded | {str(kind.syntax): kind.encode(install.frame(), 8) for kind in CODED}


if __name__ == "__main__":
    text = {syntax: base64.b64encode(code).decode() for syntax, code in frames().items()}
    OUT.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
