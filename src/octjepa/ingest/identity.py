"""Who and what a file is: person, eye, device, protocol and region, each from several sources that are cross-checked.

File names are parsed leniently: the three AI-READI generations differ in how often "oct" is said
(`1001_spectralis_ppol_mac_hr_oct_l_1.3.6...`, `1001_spectralis_ppol_mac_hr_oct_oct_l_1.3.6...`).
No name, birth date or other personal field is read here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octjepa.ingest.manifest import ManifestRow, clean_person_id
from octjepa.recipe import DEVICES
from octjepa.volume import Laterality

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_DEVICE_WORDS = {
    "spectralis": "heidelberg_spectralis",
    "heidelberg": "heidelberg_spectralis",
    "maestro": "topcon_maestro2",
    "3doct-1": "topcon_maestro2",
    "triton": "topcon_triton",
    "cirrus": "zeiss_cirrus",
    "zeiss": "zeiss_cirrus",
}
_EYES: dict[str, Laterality] = {
    "R": "OD",
    "RIGHT": "OD",
    "OD": "OD",
    "RE": "OD",
    "L": "OS",
    "LEFT": "OS",
    "OS": "OS",
    "LE": "OS",
}
_FILE_NAME = re.compile(
    r"^(?P<person>\d{4})_(?P<protocol>[a-z0-9_]+?)(?:_oct)?_(?P<eye>l|r)_(?P<uid>[\d.]+)$", re.IGNORECASE
)
_FIELD_IN_NAME = re.compile(r"(\d{1,2})\s*x\s*(\d{1,2})", re.IGNORECASE)


@dataclass(frozen=True)
class Identity:
    person_id: str
    laterality: Laterality | None
    laterality_source: str
    device: str
    protocol: str
    region: str
    sop_instance_uid: str
    notes: tuple[str, ...]


def _text(header: Dataset, keyword: str) -> str:
    value = header.get(keyword)
    return "" if value is None else str(value).strip()


def eye_of(text: str) -> Laterality | None:
    """ "R", "Right", "OD" -> "OD"; "B", "U" and "" -> None."""
    return _EYES.get(text.strip().upper())


def device_of(text: str) -> str:
    """The known device that a text names, or ""."""
    lower = text.lower()
    for word, device in _DEVICE_WORDS.items():
        if word in lower:
            return device
    return ""


def region_of(text: str) -> str:
    """AI-READI's region words from a protocol text: "macula 6x6" -> "Macula, 6 x 6"; "" if it names none."""
    lower = text.lower().replace("_", " ")
    if re.search(r"\b(disc|onh|optic)", lower):
        place = "Optic Disc"
    elif "wide" in lower:
        return "Wide Field"
    elif "mac" in lower:
        place = "Macula"
    else:
        return ""
    field = _FIELD_IN_NAME.search(lower)
    return f"{place}, {field[1]} x {field[2]}" if field else place


def _first_frame_laterality(header: Dataset) -> str:
    for group in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        for item in (header.get(group) or [])[:1]:
            for anatomy in item.get("FrameAnatomySequence") or []:
                if anatomy.get("FrameLaterality"):
                    return str(anatomy.FrameLaterality)
    return ""


def _pick_eye(sources: dict[str, str], notes: list[str]) -> tuple[Laterality | None, str]:
    said = {source: eye for source, text in sources.items() if (eye := eye_of(text)) is not None}
    if not said:
        notes.append("laterality_unknown")
        return None, "unknown"
    if len(set(said.values())) > 1:
        notes.append("laterality_disagrees")
    source, eye = next(iter(said.items()))
    return eye, source


def _pick_device(sources: list[str], maker: str, notes: list[str]) -> str:
    said = [device for text in sources if (device := device_of(text))]
    if len(set(said)) > 1:
        notes.append("device_disagrees")
    if said:
        return said[0]
    slug = re.sub(r"[^a-z0-9]+", "_", maker.lower()).strip("_")
    return slug or "unknown"


def _header_person(header: Dataset) -> str:
    person = clean_person_id(_text(header, "PatientID"))
    name = _text(header, "PatientName")
    if person and name and person.lower() == name.lower():
        # Some exports repeat the name as the id; a name never enters the store.
        return "id-" + hashlib.sha256(person.encode()).hexdigest()[:12]
    return person


def identify(header: Dataset, path: Path, row: ManifestRow | None) -> Identity:
    """Person, eye, device, protocol and region. Priority: person and device manifest first; eye header first."""
    notes: list[str] = []
    name = _FILE_NAME.match(path.stem)
    folder_person = path.parent.name if re.fullmatch(r"\d{4}", path.parent.name) else ""
    device_folder = next((part for part in reversed(path.parts[:-1]) if part.lower() in DEVICES), "")

    people = [row.person_id if row else "", name["person"] if name else folder_person, _header_person(header)]
    said = [person for person in people if person]
    if len(set(said)) > 1:
        notes.append("person_disagrees")
    uid = _text(header, "SOPInstanceUID")
    if said:
        person = said[0]
    else:
        notes.append("person_unknown")
        person = "unknown-" + hashlib.sha256((uid or str(path)).encode()).hexdigest()[:12]

    eye, eye_source = _pick_eye(
        {
            "header": _text(header, "ImageLaterality") or _text(header, "Laterality"),
            "frame": _first_frame_laterality(header),
            "manifest": row.laterality if row else "",
            "name": name["eye"] if name else "",
        },
        notes,
    )
    maker = f"{_text(header, 'Manufacturer')} {_text(header, 'ManufacturerModelName')}".strip()
    protocol = _text(header, "ProtocolName").lower() or (name["protocol"].lower().replace("_", " ") if name else "")
    model = _text(header, "ManufacturerModelName")
    device = _pick_device(
        [
            f"{row.manufacturer} {row.model}" if row else "",
            model if device_of(model) else maker,
            device_folder,
            path.stem,
        ],
        maker,
        notes,
    )
    region = (row.region if row else "") or region_of(protocol) or region_of(name["protocol"] if name else "")
    if str(header.get("BurnedInAnnotation", "")).strip().upper() == "YES":
        notes.append("burned_in_text")
    return Identity(person, eye, eye_source, device, protocol, region, uid, tuple(notes))
