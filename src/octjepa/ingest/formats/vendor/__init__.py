"""Proprietary scans: Heidelberg .vol, HEYEX XML and .e2e, Topcon .fda and .fds, Zeiss .img, Bioptigen and Optovue .OCT.

By what each is known: a mark in the first bytes, or for Zeiss and Optovue, which have none, the file's name. The
readers are in the modules of this package. eyepy and oct-converter (extra `vendor`) are asked where they are right;
`docs/formats.md` says where they are not, and what is done instead.
"""

from __future__ import annotations

import re
from pathlib import Path

_VOL = (b"HSF-OCT", b"ep-v")  # HEYEX; eyepy's writer
_E2E = (b"CMDb", b"E2EMultipleVolumeFile")
_CUBE_BYTES = (512 * 128 * 1024, 200 * 200 * 1024)
_ZEISS = re.compile(r"(^|_)(cube_(z|raw)|FlowCube_z|hidef_(z|raw)|hd\w*|lslo|iris)\.img$", re.IGNORECASE)


def is_vol(_: Path, head: bytes) -> bool:
    return head.startswith(_VOL)


def is_heyex_xml(_: Path, head: bytes) -> bool:
    return b"<HEDX" in head


def is_e2e(_: Path, head: bytes) -> bool:
    return head.startswith(_E2E)


def is_topcon(_: Path, head: bytes) -> bool:
    return head.startswith(b"FOCT")


def is_zeiss(path: Path, _: bytes) -> bool:
    """By the name that a Cirrus gives, or by the size of its cubes: other formats, too, call their values .img."""
    if path.suffix.lower() != ".img":
        return False
    return _ZEISS.search(path.name) is not None or path.stat().st_size in _CUBE_BYTES


def is_bioptigen(_: Path, head: bytes) -> bool:
    return head[10:21] == b"FRAMEHEADER"


def is_optovue(path: Path, head: bytes) -> bool:
    return path.suffix.lower() == ".oct" and not is_bioptigen(path, head) and path.with_suffix(".txt").is_file()
