"""Reads .plain files: a line of JSON (shape, spacing_mm, laterality, person_id), then 8-bit voxels, slice by slice."""

import json

import numpy as np

from octjepa.read.formats import Format
from octjepa.read.raw_scan import FrameGeometry, HeaderFields, RawScan
from octjepa.reasons import rejection


def read_plain(path):
    """The scan of a file. What is wrong with it is one of the reason codes of docs/ingest.md."""
    line, _, voxels = path.read_bytes().partition(b"\n")
    try:
        about = json.loads(line.removeprefix(b"PLAIN "))
        slices, depth, columns = about["shape"]
        spacing_mm = tuple(map(float, about["spacing_mm"]))
    except (ValueError, KeyError, TypeError) as error:
        raise rejection("broken_header", f"the first line describes no scan: {error}") from None
    if len(voxels) != slices * depth * columns:
        raise rejection("truncated", f"{len(voxels)} voxels, the header says {slices * depth * columns}")
    header = HeaderFields(person_id=about.get("person_id", ""), laterality=about.get("laterality", ""))
    pixels = np.frombuffer(voxels, np.uint8).reshape(slices, depth, columns)
    return RawScan("plain", pixels, FrameGeometry.unknown(slices), header, spacing_mm=spacing_mm)


PLAIN = Format(
    "plain",
    (".plain",),
    matches=lambda path, head: head.startswith(b"PLAIN "),
    reader="octjepa_example.reader:read_plain",  # imported when a file of the format is read
    experimental=True,  # until files of a real device have proved it
)
