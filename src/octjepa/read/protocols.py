"""Known scan protocols: the field of view and depth spacing that a device's fixed cubes have.

The last resort of the spacing resolver. Only protocols whose field is fixed by the device are here; Spectralis
lets the operator choose the lines, so its entries hold for their exact line count only.
Source: the devices' AI-READI exports (spacing = field / lines, or field / (lines - 1) where the export says so).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ProtocolSpacing:
    """Spacing in mm (None: not fixed by the protocol); `exact` when the shape is the device's own."""

    slice_mm: float | None
    depth_mm: float | None
    column_mm: float | None
    exact: bool


# device -> native depth samples -> depth spacing in mm
_DEPTH_MM = {
    "heidelberg_spectralis": {496: 0.003872},
    "topcon_maestro2": {885: 0.0026},
    "topcon_triton": {992: 0.0026},
    "zeiss_cirrus": {1024: 2.0 / 1024},
}
_NATIVE = {
    "topcon_maestro2": {(128, 885, 512), (360, 885, 360)},
    "topcon_triton": {(256, 992, 512), (320, 992, 320), (512, 992, 512)},
    "zeiss_cirrus": {(128, 1024, 512), (200, 1024, 200), (350, 1024, 350)},
}
# Two lengths, with decimals or not. Counts of samples, which have three digits, are not a field: "cube 512x128".
_FIELD_TEXT = re.compile(r"(?<!\d)(?<!\d\.)(\d{1,2}(?:\.\d+)?)\s*(?:mm)?\s*x\s*(\d{1,2}(?:\.\d+)?)(?!\.?\d)")


def field_in_text(text: str) -> tuple[float, float] | None:
    """(along a B-scan, across the B-scans) as a protocol in lower case names its field: "wide 12x9" -> (12, 9)."""
    field = _FIELD_TEXT.search(text)
    return None if field is None else (float(field[1]), float(field[2]))


def _field_mm(device: str, text: str) -> tuple[float, float, bool] | None:
    """(slow, fast, lines - 1) of a fixed cube, or None where the text does not name one."""
    if device not in _NATIVE:
        return None
    if named := field_in_text(text):
        fast, slow = named
        return slow, fast, False
    if device == "zeiss_cirrus":
        return 6.0, 6.0, False  # every structural cube covers 6 x 6 mm; a scan for angiography names its field
    if "wide" in text or (device == "topcon_triton" and "radial" in text):
        return 9.0, 12.0, True
    if device == "topcon_maestro2" and "mac" in text:
        return 6.0, 6.0, True
    return None


def protocol_spacing(device: str, text: str, shape: tuple[int, int, int]) -> ProtocolSpacing | None:
    """The spacing that a protocol fixes for a scan of `shape` [D, H, W]; `text` is protocol and region, lower case."""
    frames, depth, columns = shape
    depth_mm = _DEPTH_MM.get(device, {}).get(depth)
    if device == "heidelberg_spectralis":
        if depth == 496 and columns in (768, 1536) and frames in (60, 61) and "20x20" not in text:
            return ProtocolSpacing(0.1285, depth_mm, 0.01206 * 768 / columns, True)
        if shape == (512, 496, 512):
            return ProtocolSpacing(0.0117, depth_mm, 0.0117, True)
        return ProtocolSpacing(None, depth_mm, None, False) if depth_mm else None
    field = _field_mm(device, text)
    if field is None:
        return ProtocolSpacing(None, depth_mm, None, False) if depth_mm else None
    slow, fast, minus_one = field
    return ProtocolSpacing(slow / (frames - minus_one), depth_mm, fast / columns, shape in _NATIVE[device])
