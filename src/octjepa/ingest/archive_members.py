"""The members of a ZIP archive: which may be written and where, and which are refused and why.

An archive is not trusted: nothing in it may be written outside the target, hide another file, or grow beyond its
declared size. Each such member is refused by itself and named.
"""

from __future__ import annotations

import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipInfo

from octjepa.read.manifest import MANIFEST, PARTICIPANTS
from octjepa.recipe import DEVICES
from octjepa.record import Record

REFUSALS = {
    "not_an_archive": "no ZIP archive, or its table of contents is cut off or damaged",
    "unreadable_folder": "a folder whose files cannot be listed",
    "path_escapes": "its name leads out of the target: absolute, with .., a drive letter or a backslash",
    "link": "a link or a special file, no regular file",
    "name_collides": "another member has this name, or one that differs in case or accents only",
    "name_unsafe": "its name holds control characters or marks that turn the direction of text, or begins with -",
    "name_too_long": "its name, or a part of it, is longer than file systems allow",
    "encrypted": "encrypted: expand it with its password by the program that made it",
    "compression_unknown": "compressed by a method that is not read here",
    "too_large": "it would grow as only a ZIP bomb does",
    "overlaps": "it shares its bytes with another member, as only in a ZIP bomb",
    "damaged": "its content is not what the archive's table promises",
    "other_file": "another file has its path: remove that one, or choose another target",
}
# Control characters, and the marks that change the direction of text: a name with them is shown as another name.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_METHODS = {ZIP_STORED, ZIP_DEFLATED, ZIP_BZIP2, ZIP_LZMA}
_CALLED = {9: "Deflate64", 93: "Zstandard", 95: "XZ", 99: "AES"}
_RATIO, _RATIO_FROM_BYTES = 200, 64 << 20  # noise of OCT halves at best; small tables and masks may shrink a lot
_NAME_BYTES, _PATH_BYTES = 255, 3000
_LOCAL_HEADER_BYTES = 30
_TREE = "retinal_oct/structural_oct"
_TABLES = {PARTICIPANTS: PARTICIPANTS, MANIFEST: f"retinal_oct/{MANIFEST}"}


@dataclass(frozen=True)
class Member:
    """A file to write: `path` is its path below the target, "/" between the parts."""

    info: ZipInfo
    path: str


@dataclass(frozen=True)
class Refusal(Record):
    """A member (or, with "", a whole archive) that is not written; `reason` is a key of REFUSALS."""

    archive: str
    member: str
    reason: str
    detail: str = ""


@dataclass
class ArchivePlan:
    """The members of one archive that are written, refused, and left out (counted by kind)."""

    archive: str
    members: list[Member] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class ClaimedPaths:
    """Target paths in use, over all archives; case and accents do not distinguish files on every disk."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}
        self._folders: set[str] = set()

    def claim(self, member: Member) -> bool | None:
        """True for a free path, None for a second copy of the same content, False for a path in use."""
        key = unicodedata.normalize("NFC", member.path).casefold()
        content = (member.info.file_size, member.info.CRC)
        if key in self._files:
            return None if self._files[key] == content else False
        above = [parent.as_posix() for parent in PurePosixPath(key).parents]
        if key in self._folders or any(parent in self._files for parent in above):
            return False
        self._files[key] = content
        self._folders.update(above)
        return True


def plan_members(archive: PurePosixPath, infos: Sequence[ZipInfo], size: int, claimed: ClaimedPaths) -> ArchivePlan:
    """Decides which members of an archive of `size` bytes to write; `archive` is its path below the source."""
    plan = ArchivePlan(str(archive))
    overlapping = _overlapping(infos, size)
    accepted: list[tuple[ZipInfo, list[str]]] = []
    for index, info in enumerate(infos):
        parts = [part for part in info.filename.split("/") if part not in {"", "."}]
        if info.filename.endswith("/"):
            continue
        if "__MACOSX" in parts or (parts and (parts[-1].startswith("._") or parts[-1] == ".DS_Store")):
            plan.left_out["macOS side files"] += 1
            continue
        reason, detail = _fault(info, parts)
        if not reason and index in overlapping:
            reason = "overlaps"
        if reason:
            plan.refused.append(Refusal(plan.archive, info.filename, reason, detail))
        else:
            accepted.append((info, parts))
    target_path = _target_path(archive, [parts for _, parts in accepted])
    for info, parts in accepted:
        member = Member(info, "/".join(target_path(parts)))
        free = claimed.claim(member)
        if free:
            plan.members.append(member)
        elif free is None:
            plan.left_out["second copies"] += 1
        else:
            plan.refused.append(Refusal(plan.archive, info.filename, "name_collides"))
    return plan


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
    if _UNSAFE.search(name) or any(part.startswith("-") for part in parts):
        return "name_unsafe", ""
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
    """Indices of members whose bytes reach into the next one's, or beyond the archive."""
    order = sorted(range(len(infos)), key=lambda index: infos[index].header_offset)
    overlapping: set[int] = set()
    for index, following in zip(order, [*order[1:], None], strict=True):
        end = infos[index].header_offset + _LOCAL_HEADER_BYTES + infos[index].compress_size
        if following is None:
            overlapping.update({index} if end > size else ())
        elif end > infos[following].header_offset:
            overlapping.update({index, following})
    return overlapping


def _target_path(archive: PurePosixPath, names: Sequence[Sequence[str]]) -> Callable[[Sequence[str]], list[str]]:
    """A function from the parts of a member's name to those of its path below the target.

    How far the names of one archive go into AI-READI's tree decides:

    | the names hold | and go to |
    |---|---|
    | retinal_oct/ (or another retinal_*) | the target, without the folders above |
    | structural_oct/ | retinal_oct/ |
    | a device's folder | retinal_oct/structural_oct/ |
    | none, but the archive or its folder is called like a device | retinal_oct/structural_oct/{device}/ |
    | none of these | a folder called like the archive |
    """
    own_folder = [*archive.parent.parts, archive.stem]
    above: list[str] = []
    mark, prefix = "", ""
    for mark, prefix in (("retinal_.+", ""), ("structural_oct", "retinal_oct"), ("|".join(DEVICES), _TREE)):  # noqa: B007
        indices = (
            (parts, index) for parts in names for index, part in enumerate(parts[:-1]) if re.fullmatch(mark, part)
        )
        if found := next(indices, None):
            above = list(found[0][: found[1]])
            break
    else:
        device = next((name for name in (archive.stem, archive.parent.name) if name in DEVICES), "")
        if not device:
            return lambda parts: [*own_folder, *parts]
        mark, prefix = "", f"{_TREE}/{device}"

    def target_path(parts: Sequence[str]) -> list[str]:
        rest = list(parts[len(above) :])
        if list(parts[: len(above)]) != above:
            return [*own_folder, *parts]
        if len(rest) == 1 and rest[0] in _TABLES:
            return _TABLES[rest[0]].split("/")
        inside = not mark or (len(rest) > 1 and re.fullmatch(mark, rest[0]))
        return [*filter(None, prefix.split("/")), *rest] if inside else [*own_folder, *parts]

    return target_path
