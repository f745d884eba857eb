"""The content of a source before anything is read into a store: files by format and kind, and the personal data in
them.

Of DICOM the headers only, of other formats the scan. Nothing is written, no value is quoted, no id is listed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octjepa.errors import VolumeRejected
from octjepa.ingest.sources import Discovery, SourceFile, discover
from octjepa.progress import bar
from octjepa.read.devices import stated_device
from octjepa.read.dicom import has_dicom_magic, known_modality
from octjepa.read.dicom_file import read_header
from octjepa.read.formats import read_scan, recognise
from octjepa.read.personal_data import count_fields, mask_path, personal_fields, repeats_personal_text
from octjepa.record import Record
from octjepa.time_limit import SECONDS_PER_FILE, time_limit


def _modality(text: str) -> str:
    return known_modality(text) or ("of unknown modality" if text else "without modality")


@dataclass(frozen=True)
class FileFacts:
    """The facts in the header of a file: its kind, device, filled fields of personal data, and whether its path names
    the person.
    """

    kind: str
    device: str = ""
    personal: tuple[str, ...] = ()
    path_is_personal: bool = False


def _header_facts(path: Path, name: str) -> FileFacts:
    """The facts about one file, of DICOM from its header."""
    try:
        if not has_dicom_magic(path):
            return _other(path, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd values are counted here, not refused
            header = read_header(path)
            identity = str(header.get("PatientName", "")), str(header.get("PatientBirthDate", ""))
            return FileFacts(
                kind=f"dicom {_modality(str(header.get('Modality') or ''))}",
                device=_stated_device(
                    str(header.get("Manufacturer") or ""),
                    str(header.get("ManufacturerModelName") or ""),
                    *identity,
                    [str(header.get("PatientID") or "")],
                ),
                personal=personal_fields(header),
                path_is_personal=mask_path(name, *identity) != name,
            )
    except VolumeRejected:
        return FileFacts("unreadable")
    except Exception:  # pydicom raises what a damaged header made of its parser; ingest will name the reason
        return FileFacts("dicom with a damaged header")


def _stated_device(manufacturer: str, model: str, name: str, birth_date: str, also: Sequence[str]) -> str:
    """The device that a header states, "" for none. A text that repeats personal data is left out."""
    texts = (manufacturer, model)
    return stated_device(*("" if repeats_personal_text(text, name, birth_date, also) else text for text in texts))[0]


def _other(path: Path, name: str) -> FileFacts:
    """Of other formats and of folders the whole scan is read: personal data may be anywhere in them."""
    format = recognise(path)
    if format is None:
        return FileFacts("unknown")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scan = read_scan(path, format)
        header = scan.header
        personal = header.person_name, header.birth_date, [*header.also_personal, header.person_id]
        device = _stated_device(header.manufacturer, header.model, *personal)
        paths = [name, *(f"{name}/{child.name}" for child in path.iterdir())] if path.is_dir() else [name]
        is_personal = any(mask_path(each, header.person_name, header.birth_date) != each for each in paths)
        return FileFacts(format, device, scan.personal, is_personal)
    except Exception:  # a damaged file may raise anything, as in `read_volume`; ingest will name the reason
        return FileFacts(f"{format}, refused")


def personal_fields_in_file(path: Path) -> tuple[str, ...]:
    """The fields of personal data that one file fills, () for what cannot be read."""
    try:
        with time_limit(SECONDS_PER_FILE):
            return _header_facts(path, path.name).personal
    except VolumeRejected:
        return ()


@dataclass(frozen=True)
class SourceAudit(Record):
    """Files by kind and device, those that were ignored or refused, and where personal data is.

    refused: {file: why ingest would refuse it unopened}; names of people are masked in it.
    personal_data: {field: {files, kind, direct}}.
    """

    files: int
    refused: Mapping[str, str]
    by_kind: Mapping[str, int]
    by_device: Mapping[str, int]
    ignored: Mapping[str, int]
    personal_data: Mapping[str, Mapping[str, int | str | bool]]
    files_with_direct_data: int
    paths_with_personal_data: int


def audit(sources: Sequence[str | Path]) -> SourceAudit:
    """Looks at the headers of `sources`. Raises UsageError as `discover` does."""
    discovery = discover(sources)
    facts: list[FileFacts] = []
    with bar("looking at headers", len(discovery.files), "files") as progress:
        for file in discovery.files:
            facts.append(_look(file))
            progress.advance()
    fields = count_fields(fact.personal for fact in facts)
    direct = {field for field, about in fields.items() if about["direct"]}
    return SourceAudit(
        files=len(facts),
        refused=_refused(discovery),
        by_kind=dict(sorted(Counter(fact.kind for fact in facts).items())),
        by_device=dict(sorted(Counter(fact.device or "unknown" for fact in facts).items())),
        ignored=dict(sorted(discovery.ignored.items())),
        personal_data=fields,
        files_with_direct_data=sum(bool(direct & set(fact.personal)) for fact in facts),
        paths_with_personal_data=sum(fact.path_is_personal for fact in facts),
    )


def _refused(discovery: Discovery) -> dict[str, str]:
    """{name of the file, masked as in the quarantine: reason and detail} of files that ingest would refuse unread."""
    found = {}
    for source, reason, detail in discovery.refused:
        person = source.stated_person()
        found[mask_path(source.name, person.name, person.birth_date)] = f"{reason}: {detail}"
    return found


def _look(file: SourceFile) -> FileFacts:
    try:
        with file.local() as path, time_limit(SECONDS_PER_FILE):
            return _header_facts(path, file.name) if path.is_file() else _other(path, file.name)
    except VolumeRejected:
        return FileFacts("unreadable")
