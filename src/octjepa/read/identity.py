"""Identity of a scan: person, eye, device, protocol and region, each from several sources that are cross-checked.

File names are parsed leniently: the three AI-READI generations differ in how often "oct" is repeated
(`1001_spectralis_ppol_mac_hr_oct_l_1.3.6...`, `1001_spectralis_ppol_mac_hr_oct_oct_l_1.3.6...`).
Name and birth date are read only to see whether the id repeats them; they are stored nowhere.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from octjepa.read.devices import is_listed, parse_device, pick_device, stated_device
from octjepa.read.manifest import ManifestRow
from octjepa.read.personal_data import (
    UNKNOWN_PERSON,
    clean_person_id,
    identifies_person,
    is_placeholder,
    pseudonym,
    repeats_birth_date,
    repeats_personal_text,
)
from octjepa.read.protocols import field_in_text
from octjepa.read.raw_scan import HeaderFields
from octjepa.recipe import DEVICES
from octjepa.volume import Laterality, OCTVolume

_RIGHT, _LEFT = ("R", "RIGHT", "OD", "RE", "RECHTS"), ("L", "LEFT", "OS", "LE", "LINKS")
_EYES: dict[str, Laterality] = {**dict.fromkeys(_RIGHT, "OD"), **dict.fromkeys(_LEFT, "OS")}
_FOUR = re.compile(r"\d{4}")
_NO_YEAR = re.compile(r"(?!19|20)\d{4}")
_PREFIX = re.compile(r"\s*AI-?READI", re.IGNORECASE)
_FILE_NAME = re.compile(
    r"^(?P<person>\d{4})_(?P<protocol>[a-z0-9_]+?)(?:_oct)?_(?P<eye>l|r)_(?P<uid>[\d.]+)$", re.IGNORECASE
)
_UID = re.compile(r"[\d.]{1,64}")
_SITES = {"1": "UW", "4": "UCSD", "7": "UAB"}  # first digit of an AI-READI id
_EYE_WORDS = {"od", "os", "right", "left", "rechts", "links"}
_EYE_ENDS = {"r", "l", "re", "le"}


@dataclass(frozen=True)
class Identity:
    """Whose scan it is and what it shows, with the source of the laterality."""

    person_id: str
    laterality: Laterality | None
    laterality_source: str
    device: str
    protocol: str
    region: str
    sop_instance_uid: str
    visit: str
    site: str
    notes: tuple[str, ...]


def parse_laterality(text: str) -> Laterality | None:
    """ "R", "Right", "OD" -> "OD"; "B", "U" and "" -> None."""
    return _EYES.get(text.strip().upper())


def parse_region(text: str) -> str:
    """AI-READI's region words from a protocol text: "macula 6x6" -> "Macula, 6 x 6"; "" if it names none."""
    lower = text.lower().replace("_", " ")
    if re.search(r"\b(disc|onh|optic)", lower):
        area = "Optic Disc"
    elif "wide" in lower:
        return "Wide Field"
    elif "mac" in lower:
        area = "Macula"
    else:
        return ""
    field = field_in_text(lower)
    return f"{area}, {field[0]:g} x {field[1]:g}" if field else area


def _pick_eye(sources: dict[str, str], notes: list[str]) -> tuple[Laterality | None, str]:
    """(eye, the source that states it) from texts by source; disagreement and absence are noted."""
    stated = {source: eye for source, text in sources.items() if (eye := parse_laterality(text)) is not None}
    if not stated:
        notes.append("laterality_unknown")
        return None, "unknown"
    if len(set(stated.values())) > 1:
        notes.append("laterality_disagrees")
    votes = list(stated.values())
    # The value that most of them state; where as many say the one as the other, the first in order.
    source, eye = max(stated.items(), key=lambda pair: votes.count(pair[1]))
    return eye, source


def _eye_in_names(names: Sequence[str]) -> str:
    """ "OD" from the names in a path such as `P7/OD/b001.png`, `P7_OD.nii.gz` or `P7/L/scan.dcm`; "" for both eyes.

    Single letters and two-letter words of other meaning count as a whole name or at its end only, and not in front of
    a number (`scan_r1` is a repeat).
    """
    eyes = set()
    for part in names:
        # Accents belong to their letters: "niños" does not end in an eye. A capital İ becomes two characters.
        name = unicodedata.normalize("NFC", part.lower()).replace("\u0307", "").partition(".")[0]
        eyes |= {parse_laterality(word) for word in re.findall(r"[^\W\d_]+", name) if word in _EYE_WORDS}
        last = re.search(r"([^\W\d_]+)(?!\d)[\W\d_]*$", name)
        if last and last[1] in _EYE_ENDS:
            eyes.add(parse_laterality(last[1]))
    return str(eyes.pop()) if len(eyes) == 1 else ""


def _site(header: HeaderFields, person_ids: list[str], proven: bool) -> str:
    """That of an AI-READI id where the tree, name or prefix shows it to be one, else the one a source names."""
    if person_ids and proven and re.fullmatch(r"[147]\d{3}", person_ids[0]):
        return _SITES[person_ids[0][0]]
    return header.site


def _header_person(header: HeaderFields, notes: list[str]) -> str:
    """The person id of the header, pseudonymised if it holds a name; "" for none and for a placeholder."""
    person = clean_person_id(header.person_id)
    if person and is_placeholder(person):
        notes.append("person_id_placeholder")  # every file of an export may carry it: it is nobody's
        return ""
    if person and identifies_person(person, header.person_name, header.birth_date):
        # Some exports repeat the name as the id; a name never enters the store.
        notes.append("person_id_pseudonymised")
        return pseudonym(person)
    return person


def _person_ids(header: HeaderFields, path: PurePath, row: ManifestRow | None, notes: list[str]) -> list[str]:
    """Ids, the most trusted first. A folder of four digits may be a year: it outranks the header only below a device's
    folder, as in an AI-READI tree, and so does a name that begins with four digits only if it names a device."""
    name = _FILE_NAME.match(path.stem)
    below_device = path.parent.parent.name.lower() in DEVICES
    # Elsewhere four digits may be a year.
    folder = path.parent.name if (_FOUR if below_device else _NO_YEAR).fullmatch(path.parent.name) else ""
    named_by_device = bool(name and parse_device(name["protocol"]))
    by_name = name["person"] if name and (named_by_device or _NO_YEAR.fullmatch(name["person"])) else ""
    in_header = _header_person(header, notes)
    manifest = row.person_id if row else ""
    proven = [
        by_name if named_by_device else "",
        folder if below_device else "",
    ]
    person_ids = [person for person in (manifest, *proven, in_header, by_name, folder) if person]
    if person_ids and not any((manifest, *proven, in_header)):
        notes.append("person_from_folder")
    return person_ids


def _without_personal_texts(header: HeaderFields, notes: list[str]) -> HeaderFields:
    """The header without stored texts that repeat the person's name, birth date, ids or other people's names.

    A UID that holds the birth date is replaced by a UID made from its hash, so that two copies are still recognised.
    """
    dropped = {
        field: ""
        for field in ("protocol", "manufacturer", "model", "region")
        if (text := getattr(header, field))
        and not (field in ("manufacturer", "model") and is_listed(stated_device(header.manufacturer, header.model)[0]))
        and repeats_personal_text(text, header.person_name, header.birth_date, header.also_personal)
    }
    if header.uid and (
        not _UID.fullmatch(header.uid)
        or repeats_birth_date(header.uid, header.birth_date)
        or identifies_person(header.uid, header.person_name, "")
    ):
        dropped["uid"] = f"2.25.{int(hashlib.sha256(header.uid.encode()).hexdigest()[:32], 16)}"
    if not dropped:
        return header
    notes.append(f"personal_text_dropped={len(dropped)}")
    return replace(header, **dropped)  # type: ignore[arg-type] # every name in it is a text field


def visit_pseudonym(person_id: str, visit: str) -> str:
    """The pseudonym of a visit; `visit` is the text that the file states: a study UID, a date or a name."""
    return "v-" + hashlib.sha256(f"{person_id} {visit}".encode()).hexdigest()[:12]


def _unknown_person(scan: str) -> str:
    """The person id of a scan that names no person; `scan` tells it from others wherever its file lies."""
    return UNKNOWN_PERSON + hashlib.sha256(scan.encode()).hexdigest()[:12]


def with_person(volume: OCTVolume, header: HeaderFields) -> OCTVolume:
    """`volume`, which `identify` gave no person id, as that of an unknown person, by its pixels."""
    if volume.person_id:
        return volume
    person = _unknown_person(volume.content_hash)
    return replace(volume, person_id=person, visit=visit_pseudonym(person, header.visit) if header.visit else "")


def identify(header: HeaderFields, path: PurePath, row: ManifestRow | None) -> Identity:
    """Person (`_person_ids`), eye (as most sources say), device (manifest first), protocol and region.

    The person id is "" if only the pixels tell the scan from others: `with_person` fills it in.
    """
    notes: list[str] = []
    header = _without_personal_texts(header, notes)
    name = _FILE_NAME.match(path.stem)
    device_folder = next((part for part in reversed(path.parts[:-1]) if is_listed(part.lower())), "")

    person_ids = _person_ids(header, path, row, notes)
    if len(set(person_ids)) > 1:
        notes.append("person_disagrees")
    uid = header.uid
    if person_ids:
        person = person_ids[0]
    else:
        notes.append("person_unknown")
        person = _unknown_person(uid) if uid else ""

    eye, eye_source = _pick_eye(
        {
            "header": header.laterality,
            "frame": header.frame_laterality,
            "manifest": row.laterality if row else "",
            "name": name["eye"] if name else "",
            # The last four names; a file name that counts as `name` has no second vote here.
            "path": _eye_in_names(path.parts[-4:-1] if name else path.parts[-4:]),
        },
        notes,
    )
    protocol = header.protocol or (name["protocol"].lower().replace("_", " ") if name else "")
    stated = [stated_device(row.manufacturer, row.model)] if row else []
    stated.append(stated_device(header.manufacturer, header.model))
    device = pick_device(stated, [parse_device(device_folder), parse_device(path.stem)], notes)
    named_region = parse_region(protocol) or parse_region(name["protocol"] if name else "")
    region = (row.region if row else "") or header.region or named_region
    if header.burned_in:
        notes.append("burned_in_text")
    visit = visit_pseudonym(person, header.visit) if header.visit else ""
    of_ai_readi = (
        device_folder != "" or bool(name and parse_device(name["protocol"])) or _PREFIX.match(header.person_id)
    )
    site = _site(header, person_ids, bool(of_ai_readi))
    return Identity(person, eye, eye_source, device, protocol, region, uid, visit, site, tuple(notes))
