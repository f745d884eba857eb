"""The members of a ZIP archive: which may be written and where, and which are refused and why.

An archive is a stranger's word. Nothing in it may be written outside the target, hide another file, or grow beyond
what it says; each such member is refused by itself and named.
"""

from __future__ import annotations

import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipInfo

from octjepa.ingest.manifest import MANIFEST, PARTICIPANTS
from octjepa.recipe import DEVICES

REFUSALS = {
    "not_an_archive": "no ZIP archive, or its table of contents is cut off or damaged",
    "unreadable_folder": "a folder whose files cannot be listed",
    "path_escapes": "its name leads out of the target: absolute, with .., a drive letter or a backslash",
    "link": "a link or a special file, no regular file",
    "name_collides": "another member has this name, or one that differs in case or accents only",
    "name_too_long": "its name, or a part of it, is longer than file systems allow",
    "encrypted": "encrypted: expand it with its password by the program that made it",
    "compression_unknown": "compressed by a method that is not read here",
    "too_large": "it would grow as only a ZIP bomb does",
    "overlaps": "it shares its bytes with another member, as only in a ZIP bomb",
    "damaged": "its content is not what the archive's table promises",
    "other_file": "another file stands in its place: remove that one, or choose another target",
}
_METHODS = {ZIP_STORED, ZIP_DEFLATED, ZIP_BZIP2, ZIP_LZMA}
_CALLED = {9: "Deflate64", 93: "Zstandard", 95: "XZ", 99: "AES"}
_RATIO, _RATIO_FROM_BYTES = 200, 64 << 20  # noise of OCT halves at best; small tables and masks may shrink a lot
_NAME_BYTES, _PATH_BYTES = 255, 3000
_LOCAL_HEADER_BYTES = 30
_TREE = "retinal_oct/structural_oct"
_TABLES = {PARTICIPANTS: PARTICIPANTS, MANIFEST: f"retinal_oct/{MANIFEST}"}


@dataclass(frozen=True)
class Member:
    """A file to write: `place` is its path below the target, "/" between the parts."""

    info: ZipInfo
    place: str


@dataclass(frozen=True)
class Refusal:
    """A member (or, with "", a whole archive) that is not written; `reason` is a key of REFUSALS."""

    archive: str
    member: str
    reason: str
    detail: str = ""


@dataclass
class Contents:
    """One archive, judged."""

    archive: str
    members: list[Member] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class Taken:
    """Places that are spoken for, over all archives: case and accents do not tell files apart on every disk."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}
        self._folders: set[str] = set()

    def claim(self, member: Member) -> bool | None:
        """True for a free place, None for a second copy of the same content, False for another's place."""
        key = unicodedata.normalize("NFC", member.place).casefold()
        content = (member.info.file_size, member.info.CRC)
        if key in self._files:
            return None if self._files[key] == content else False
        above = [parent.as_posix() for parent in PurePosixPath(key).parents]
        if key in self._folders or any(parent in self._files for parent in above):
            return False
        self._files[key] = content
        self._folders.update(above)
        return True


def judge(archive: PurePosixPath, infos: Sequence[ZipInfo], size: int, taken: Taken) -> Contents:
    """What of an archive of `size` bytes is written and what not; `archive` is its path below the source."""
    made = Contents(str(archive))
    overlapping = _overlapping(infos, size)
    sound: list[tuple[ZipInfo, list[str]]] = []
    for number, info in enumerate(infos):
        parts = [part for part in info.filename.split("/") if part not in {"", "."}]
        if info.filename.endswith("/"):
            continue
        if "__MACOSX" in parts or (parts and (parts[-1].startswith("._") or parts[-1] == ".DS_Store")):
            made.left_out["macOS side files"] += 1
            continue
        reason, detail = _fault(info, parts)
        if not reason and number in overlapping:
            reason = "overlaps"
        if reason:
            made.refused.append(Refusal(made.archive, info.filename, reason, detail))
        else:
            sound.append((info, parts))
    placed = _Placement(archive, [parts for _, parts in sound])
    for info, parts in sound:
        member = Member(info, "/".join(placed.of(parts)))
        free = taken.claim(member)
        if free:
            made.members.append(member)
        elif free is None:
            made.left_out["second copies"] += 1
        else:
            made.refused.append(Refusal(made.archive, info.filename, "name_collides"))
    return made


def _fault(info: ZipInfo, parts: Sequence[str]) -> tuple[str, str]:
    """(reason, detail) why a member cannot be written wherever it should go, else ("", "")."""
    name = info.orig_filename  # `filename` ends at a zero byte
    kind = stat.S_IFMT(info.external_attr >> 16)
    if not parts:
        return "path_escapes", "it has no name"
    if name.startswith("/") or ".." in parts or re.match("[A-Za-z]:", name) or "\\" in name or "\0" in name:
        return "path_escapes", ""
    if kind not in {0, stat.S_IFREG}:
        return "link", ""
    if any(len(part.encode()) > _NAME_BYTES for part in parts) or len(name.encode()) > _PATH_BYTES:
        return "name_too_long", ""
    if info.flag_bits & 0x1:
        return "encrypted", ""
    if info.compress_type not in _METHODS:
        return "compression_unknown", _CALLED.get(info.compress_type, f"method {info.compress_type}")
    if info.file_size > max(_RATIO_FROM_BYTES, _RATIO * info.compress_size):
        return "too_large", f"{info.compress_size} bytes would become {info.file_size}"
    return "", ""


def _overlapping(infos: Sequence[ZipInfo], size: int) -> set[int]:
    """Numbers of members whose bytes reach into the next one's, or beyond the archive."""
    order = sorted(range(len(infos)), key=lambda number: infos[number].header_offset)
    found: set[int] = set()
    for number, following in zip(order, [*order[1:], None], strict=True):
        end = infos[number].header_offset + _LOCAL_HEADER_BYTES + infos[number].compress_size
        if following is None:
            found.update({number} if end > size else ())
        elif end > infos[following].header_offset:
            found.update({number, following})
    return found


class _Placement:
    """Where the members of one archive belong, by how far its names go into AI-READI's tree.

    | the names hold | and go to |
    |---|---|
    | retinal_oct/ (or another retinal_*) | the target, without the folders above |
    | structural_oct/ | retinal_oct/ |
    | a device's folder | retinal_oct/structural_oct/ |
    | none, but the archive or its folder is called like a device | retinal_oct/structural_oct/{device}/ |
    | none of these | a folder called like the archive |
    """

    def __init__(self, archive: PurePosixPath, names: Sequence[Sequence[str]]) -> None:
        self._aside = [*archive.parent.parts, archive.stem]
        device = next((name for name in (archive.stem, archive.parent.name) if name in DEVICES), "")
        self._above: tuple[str, ...] = ()
        self._mark = re.compile("")
        self._prefix: list[str] | None = None
        for mark, prefix in (("retinal_.+", ""), ("structural_oct", "retinal_oct"), ("|".join(DEVICES), _TREE)):
            found = next((at for parts in names if (at := _first(mark, parts)) is not None), None)
            if found is not None:
                self._above, self._mark, self._prefix = found, re.compile(mark), prefix.split("/") if prefix else []
                return
        if device:
            self._prefix = [*_TREE.split("/"), device]

    def of(self, parts: Sequence[str]) -> list[str]:
        """The place of one member below the target."""
        above = len(self._above)
        if self._prefix is None or tuple(parts[:above]) != self._above:
            return [*self._aside, *parts]
        rest = list(parts[above:])
        if len(rest) == 1 and rest[0] in _TABLES:
            return _TABLES[rest[0]].split("/")
        inside = not self._mark.pattern or (len(rest) > 1 and self._mark.fullmatch(rest[0]))
        return [*self._prefix, *rest] if inside else [*self._aside, *parts]


def _first(mark: str, parts: Sequence[str]) -> tuple[str, ...] | None:
    """The folders above the first one that `mark` matches."""
    for number, part in enumerate(parts[:-1]):
        if re.fullmatch(mark, part):
            return tuple(parts[:number])
    return None
