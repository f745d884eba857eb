"""A codec that is not installed: the reason names the transfer syntax and the line that installs the decoders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pydicom.pixels
import pytest
from pydicom.uid import JPEGLSLossless

from octjepa.errors import VolumeRejected
from octjepa.read.encapsulated import FrameDecoder


def test_a_missing_codec_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pydicom.pixels, "get_decoder", lambda syntax: SimpleNamespace(is_available=False))
    layout: Any = None
    with pytest.raises(VolumeRejected, match="no installed library decodes JPEG-LS") as caught:
        FrameDecoder(JPEGLSLossless, layout)
    assert caught.value.reason == "no_decoder"
    assert "pyjpegls" in caught.value.detail
