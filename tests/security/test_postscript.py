"""Pillow hands PostScript to Ghostscript, which executes it: no picture of a stranger may get that far."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import EpsImagePlugin

import octjepa
from octjepa.errors import VolumeRejected
from octjepa.read.reader import read_volume
from octjepa.read.single_bscan import is_picture, read_bscan

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_under_the_name_of_a_picture_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *inputs: executed.append(inputs))
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(POSTSCRIPT)
    picture = tmp_path / "0.png"
    assert not is_picture(picture)
    with pytest.raises(VolumeRejected, match="frames_broken"):
        read_volume(tmp_path)
    with pytest.raises(VolumeRejected, match="frames_broken"):
        read_bscan(picture)
    assert not executed


def test_every_picture_is_opened_with_a_list_of_formats() -> None:
    package = Path(octjepa.__file__).parent
    opened = {
        f"{file.relative_to(package)}: {call}"
        for file in package.rglob("*.py")
        for call in re.findall(r"\bImage\.open\(.*", file.read_text("utf-8"))
    }
    assert opened
    assert not {call for call in opened if "formats=" not in call}
