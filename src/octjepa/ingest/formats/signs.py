"""By what a format is known: its mark in the first bytes of a file. Each takes (path, first 1,024 bytes)."""

from __future__ import annotations

from pathlib import Path


def dicom(_: Path, head: bytes) -> bool:
    return head[128:132] == b"DICM"
