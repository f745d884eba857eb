"""The installation: Python, the libraries octjepa needs, its extras, its own code, the decoders of OCT DICOM.

The decoders read a tiny file of every transfer syntax. `frames.json` holds one compressed 16 x 16 frame per syntax, so
that no encoder is needed (and none can mislead); `tests/support/tiny_frames.py` made it. Uncompressed and deflated
files are written by pydicom.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib.resources import files

import numpy as np
from jaxtyping import UInt8

from octjepa.doctor.checks import Check, Setup, State, register
from octjepa.errors import install_command
from octjepa.read.pixels import decode_pixels
from octjepa.train.run_folder import code_hash

NATIVE = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99")
LOSS = 10  # intensity levels that a lossy coding may be off
_FRAMES = 4
_REINSTALL = "reinstall the decoders: pip install --force-reinstall pylibjpeg-openjpeg python-gdcm pyjpegls pillow"
_EVERY_SYNTAX = "every transfer syntax of OCT decodes to the known frame"
_REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?(?P<limits>[^;]*)(?:;.*extra == ['\"](?P<extra>[\w-]+))?"
)
_OLDEST_PYTHON = (3, 11)
_UNTRIED_PYTHON = (3, 14)  # as requires-python in pyproject.toml


@register("libraries", "libraries within their limits", "make setup in the checkout, or pip install --upgrade octjepa")
def library_checks(setup: Setup) -> Iterator[Check]:
    """Python, octjepa itself, the libraries it requires, and each extra."""
    by_extra: dict[str, list[tuple[str, str]]] = {}
    for requirement in importlib.metadata.requires("octjepa") or ():
        parts = _REQUIREMENT.match(requirement)
        if parts is not None and parts["name"] != "octjepa":
            by_extra.setdefault(parts["extra"] or "", []).append((parts["name"], parts["limits"].strip(" ()")))
    status: State = "ok" if _OLDEST_PYTHON <= sys.version_info < _UNTRIED_PYTHON else "warning"
    if sys.version_info < _OLDEST_PYTHON:
        status = "failed"
    to_do = "" if status == "ok" else "use 3.11, 3.12 or 3.13: others were not tried"
    yield Check("python", status, platform.python_version(), "3.11 to 3.13", to_do)
    yield Check(
        "octjepa",
        "ok",
        f"{importlib.metadata.version('octjepa')}, code {code_hash()[:12]}",
        "the same code on every machine of a run: compare this hash",
    )
    yield _required_libraries(by_extra.pop("", []))
    for extra, requirements in sorted(by_extra.items()):
        if extra != "dev":
            yield _extra(extra, requirements)


def _required_libraries(requirements: list[tuple[str, str]]) -> Check:
    faults = [fault for name, limits in requirements if (fault := _fault(name, limits))]
    expected = f"{len(requirements)} libraries within their limits"
    if faults:
        to_do = "make setup in the checkout, or pip install --upgrade octjepa"
        return Check("libraries", "failed", "; ".join(faults), expected, to_do)
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "pydicom"))
    return Check("libraries", "ok", shown, expected)


def _extra(extra: str, requirements: list[tuple[str, str]]) -> Check:
    name, to_do = f"extra {extra}", install_command(extra)
    faults = [fault for library, limits in requirements if (fault := _fault(library, limits))]
    if not faults:
        versions = ", ".join(f"{library} {importlib.metadata.version(library)}" for library, _ in requirements)
        return Check(name, "ok", versions, "optional")
    absent = all(fault.endswith("is not installed") for fault in faults) and len(faults) == len(requirements)
    return Check(name, "ok" if absent else "warning", "; ".join(faults), "optional", to_do)


def _fault(name: str, limits: str) -> str:
    """The problem with the library `name`, or "". `limits` are those of pyproject.toml: >= and <."""
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    for sign, limit in re.findall(r"(>=|<)\s*([\w.]+)", limits):
        if (_numbers(installed) >= _numbers(limit)) != (sign == ">="):
            return f"{name} {installed} is not {sign} {limit}"
    return ""


def _numbers(version: str) -> list[int]:
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release[0].split(".")] if release else []


def frame() -> UInt8[np.ndarray, "16 16"]:
    """[depth, column] The frame in every file: a bright band on a slope, like a small B-scan."""
    depth, columns = np.mgrid[:16, :16]
    band = np.exp(-(((depth - 6 - columns / 8) / 3) ** 2))
    return (20 + 180 * band + 2 * columns).astype(np.uint8)


def compressed() -> dict[str, bytes]:
    """{transfer syntax UID: one encoded frame}."""
    text = (files("octjepa.doctor") / "frames.json").read_text(encoding="utf-8")
    return {syntax: base64.b64decode(code) for syntax, code in json.loads(text).items()}


@register("codecs", _EVERY_SYNTAX, _REINSTALL)
def codec_check(setup: Setup) -> Iterator[Check]:
    """Decodes a file of every transfer syntax and names those that fail."""
    from pydicom.uid import UID

    syntaxes, faults = (*NATIVE, *compressed()), []
    for syntax in syntaxes:
        try:
            error = np.abs(decoded(syntax).astype(int) - frame()).max()
            fault = f"off by {error} intensity levels" if error > LOSS else ""
        except Exception as failure:  # a decoder may raise anything
            fault = type(failure).__name__
        if fault:
            faults.append(f"{UID(syntax).name} ({fault})")
    if faults:
        yield Check("codecs", "failed", "; ".join(faults), _EVERY_SYNTAX, _REINSTALL)
    else:
        yield Check("codecs", "ok", f"{len(syntaxes)} transfer syntaxes", _EVERY_SYNTAX)


def decoded(syntax: str) -> UInt8[np.ndarray, "F 16 16"]:
    """The frames of a file in memory of this transfer syntax, as `octjepa ingest` decodes them."""
    from pydicom import Dataset, dcmread, dcmwrite
    from pydicom.dataset import FileMetaDataset
    from pydicom.encaps import encapsulate
    from pydicom.uid import UID, OphthalmicTomographyImageStorage

    data, meta = Dataset(), FileMetaDataset()
    meta.TransferSyntaxUID = UID(syntax)
    data.SOPClassUID = meta.MediaStorageSOPClassUID = OphthalmicTomographyImageStorage
    data.SOPInstanceUID = meta.MediaStorageSOPInstanceUID = "1.2.3"
    data.Rows, data.Columns = frame().shape
    data.NumberOfFrames, data.SamplesPerPixel, data.PixelRepresentation = _FRAMES, 1, 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 8, 8, 7
    data.PhotometricInterpretation = "MONOCHROME2"
    coded = compressed().get(syntax)
    data.PixelData = frame().tobytes() * _FRAMES if coded is None else encapsulate([coded] * _FRAMES)
    data["PixelData"].VR = "OB"
    data.file_meta = meta
    file = io.BytesIO()
    dcmwrite(file, data, enforce_file_format=True)
    return decode_pixels(dcmread(io.BytesIO(file.getvalue()))).pixels
