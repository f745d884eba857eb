"""An archive of named arrays (.npz, .mat): which one is the scan, and what the small ones say.

The scan is the array of a known name, or the only one with three axes. Single numbers and texts become labels, or say
person, eye, device and spacing where they are called so. What names a person is told by field and kept out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octjepa.ingest.raw_scan import AxisSpacing, HeaderFields
from octjepa.ingest.reasons import rejection

# FairVision keeps 200 x 200 x 200 `oct_bscans`, Duke's DME set `images` of height x width x B-scan.
SCAN_NAMES = ("oct_bscans", "bscans", "oct", "volume", "images", "image", "pixels", "data", "img", "vol")
SHORT = 8  # a vector of this many values at most becomes labels, one per value
_SAID = {
    "person_id": ("person_id", "patient_id", "patientid", "subject_id", "participant_id", "pid"),
    "laterality": ("laterality", "eye", "image_laterality"),
    "model": ("device", "scanner", "manufacturers_model_name"),
    "manufacturer": ("manufacturer",),
    "visit": ("visit", "study_uid", "study_date", "scan_date", "visit_date"),
}
_PERSONAL = {
    "PatientName": ("name", "patient_name", "patientname", "first_name", "last_name", "surname"),
    "PatientBirthDate": ("dob", "birth_date", "birthdate", "date_of_birth", "birth_day", "birthday"),
    "OtherPatientIDs": ("mrn", "ssn", "medical_record_number", "accession", "accession_number"),
    "PatientAddress": ("address", "street", "zip", "zipcode", "city"),
    "PatientTelephoneNumbers": ("phone", "telephone", "email"),
}
_WHO = {"PatientName": "person_name", "PatientBirthDate": "birth_date"}
_DEMOGRAPHIC = {
    "PatientAge": ("age",),
    "PatientSex": ("sex", "gender", "male", "female"),
    "EthnicGroup": ("race", "ethnicity", "hispanic"),
}
_SPACING = ("spacing_mm", "voxel_spacing_mm")
_NO_LABEL = re.compile(r"[\\/^]|\.\w{2,5}$|\d{4}-?\d\d-?\d\d")  # a path, a file name, a person's name, a date
_LABEL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclass
class Small:
    """What the small members of an archive say."""

    header: HeaderFields = field(default_factory=HeaderFields)
    spacing_mm: AxisSpacing = (None, None, None)
    labels: dict[str, float | str] = field(default_factory=dict)
    personal: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def scan_member(shapes: Mapping[str, Sequence[int]]) -> str:
    """The name of the array that is the scan. Raises VolumeRejected: no_pixel_data, unsupported_pixels."""
    volumes = {name: shape for name, shape in shapes.items() if len(_squeezed(shape)) == 3}
    by_name = [name for known in SCAN_NAMES for name in volumes if name.lower() == known]
    if by_name:
        return by_name[0]
    if len(volumes) == 1:
        return next(iter(volumes))
    said = ", ".join(sorted(" x ".join(map(str, shape)) for shape in volumes.values())[:4])
    if volumes:
        raise rejection(
            "unsupported_pixels", f"{len(volumes)} arrays of three axes ({said}); name the scan one of {SCAN_NAMES}"
        )
    raise rejection("no_pixel_data", f"{len(shapes)} arrays, none of three axes")


def left_out(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """The note of how many arrays of three axes lie beside the scan and are not read, if any."""
    others = sum(len(_squeezed(shape)) == 3 for shape in shapes.values()) - 1
    return [f"arrays_left_out={others}"] if others > 0 else []


def is_small(shape: Sequence[int]) -> bool:
    return len(_squeezed(shape)) <= 1 and int(np.prod(shape, dtype=np.int64)) <= SHORT


def _plain(value: object) -> float | str | None:
    """A number or a short text; None for what is neither."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        text = value.strip()
        return text if 0 < len(text) <= 64 and text.isprintable() else None
    if isinstance(value, bool | int | float | np.number | np.bool_) and not isinstance(value, np.complexfloating):
        number = float(value)
        return number if np.isfinite(number) else None
    return None


def _text(values: list[object]) -> str:
    plain = _plain(values[0]) if len(values) == 1 else None
    return f"{plain:g}" if isinstance(plain, float) else plain or ""


def small_members(members: Mapping[str, np.ndarray]) -> Small:
    """`members` are those that `is_small` admits. Raises VolumeRejected broken_header: a spacing of another shape."""
    small = Small()
    words: dict[str, Any] = {}
    personal: list[str] = []
    for name, array in members.items():
        key, values = name.lower(), np.asarray(array).ravel().tolist()
        role = next((role for role, names in _SAID.items() if key in names), "")
        who = next((field for field, names in _PERSONAL.items() if key in names), "")
        if key in _SPACING:
            if len(values) != 3 or not all(isinstance(value, int | float) for value in values):
                raise rejection("broken_header", "its spacing_mm is not three numbers (slice, depth, column)")
            small.spacing_mm = (float(values[0]), float(values[1]), float(values[2]))
        elif who:
            personal.append(who)
            if who in _WHO:  # only to see whether the id repeats it
                words[_WHO[who]] = f"{words.get(_WHO[who], '')} {_text(values)}".strip()
        elif role:
            words[role] = _text(values)
        elif _LABEL_NAME.fullmatch(name) and array.dtype.kind in "biufSU":
            personal.extend(field for field, names in _DEMOGRAPHIC.items() if key in names)
            for index, value in enumerate(values):
                plain = _plain(value)
                if isinstance(plain, str) and _NO_LABEL.search(plain):
                    continue  # it may name the person, and is no class of anything
                if plain is not None:
                    small.labels[name if len(values) == 1 else f"{name}_{index}"] = plain
    small.header = HeaderFields(**words)
    small.personal = tuple(dict.fromkeys(personal))
    return small
