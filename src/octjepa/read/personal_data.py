"""The fields of personal data that a source holds: named and counted, never quoted.

Fields after DICOM PS3.15 Annex E, Table E.1-1 (Basic Application Level Confidentiality Profile), those that ophthalmic
exports fill. `direct` ones name a person; `indirect` ones narrow a person down together with others (dates, places,
serial numbers, demographics). Nothing here changes a file: who passes scans on has to clean them first.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from octjepa.read.dicom_file import read_header

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

DIRECT: Mapping[str, tuple[str, ...]] = {
    "name": (
        "PatientName",
        "OtherPatientNames",
        "PatientBirthName",
        "PatientMotherBirthName",
        "ResponsiblePerson",
        "ReferringPhysicianName",
        "PerformingPhysicianName",
        "NameOfPhysiciansReadingStudy",
        "PhysiciansOfRecord",
        "RequestingPhysician",
        "OperatorsName",
        "ContentCreatorName",
    ),
    "birth": ("PatientBirthDate", "PatientBirthTime"),
    "number": (
        "OtherPatientIDs",
        "AccessionNumber",
        "AdmissionID",
        "MedicalRecordLocator",
        "IssuerOfPatientID",
        "OtherPatientIDsSequence",
    ),
    "address": ("PatientAddress", "PatientTelephoneNumbers", "CountryOfResidence", "RegionOfResidence"),
    "free_text": (
        "PatientComments",
        "ImageComments",
        "StudyComments",
        "AdditionalPatientHistory",
        "Allergies",
        "MedicalAlerts",
        "RequestAttributesSequence",
        "Occupation",
    ),
}
INDIRECT: Mapping[str, tuple[str, ...]] = {
    "date": (
        "StudyDate",
        "SeriesDate",
        "AcquisitionDate",
        "ContentDate",
        "AcquisitionDateTime",
        "InstanceCreationDate",
    ),
    "place": ("InstitutionName", "InstitutionAddress", "InstitutionalDepartmentName", "StationName"),
    "device": ("DeviceSerialNumber",),
    "demographic": (
        "PatientAge",
        "PatientSex",
        "EthnicGroup",
        "PatientReligiousPreference",
        "PatientWeight",
        "PatientSize",
    ),
}
UNKNOWN_PERSON = "unknown-"  # the beginning of the id of a scan that names no person
_LAST_PERSONAL_TAG = 0x00100040  # PatientSex
PRIVATE = "private elements"
BURNED_IN = "text in the image"
FIELD_KINDS = {field: kind for table in (DIRECT, INDIRECT) for kind, fields in table.items() for field in fields}
FIELD_KINDS |= {PRIVATE: "private", BURNED_IN: "image"}
DIRECT_KINDS = (*DIRECT, "private", "image")  # the content of a private element is unknown
_NO_VALUE = {"#n/a", "<na>", "?", "-", ".", "missing", "not reported", "not available"}  # in cells of tables
_BLANK = {
    "",
    "0",
    "none",
    "null",
    "nan",
    "na",
    "n/a",
    "unknown",
    "anon",
    "anonym",
    "anonymous",
    "anonymized",
    "anonymised",
    "removed",
    "redacted",
    "deidentified",
    "de-identified",
    "patient",
    "test",
    "xxx",
}


class StatedPerson(NamedTuple):
    """The person that a file states, verbatim, "" if it states nothing. Kept in memory and written nowhere."""

    name: str = ""
    birth_date: str = ""
    sex: str = ""


@cache
def _tag_to_field() -> dict[int, str]:
    from pydicom.datadict import tag_for_keyword

    return {tag: field for field in FIELD_KINDS if (tag := tag_for_keyword(field)) is not None}


def _is_filled(header: Dataset, tag: int) -> bool:
    """Whether an element holds more than a blank or a placeholder. Values that cannot be parsed say something."""
    try:
        value = header[tag].value
    except Exception:  # pydicom raises what the value made of its parser; a damaged name is still a name
        return True
    if value is None:
        return False
    if hasattr(value, "__len__") and not len(value):
        return False
    return not is_placeholder(str(value))


def personal_fields(header: Dataset) -> tuple[str, ...]:
    """The fields of `FIELD_KINDS` that a DICOM header fills, in that order; PatientID is the study's own key."""
    fields = {field for tag, field in _tag_to_field().items() if tag in header and _is_filled(header, tag)}
    if any(tag.is_private and tag.element > 0xFF for tag in header.keys()):  # noqa: SIM118 -- a Dataset iterates elements
        fields.add(PRIVATE)
    if str(header.get("BurnedInAnnotation", "")).strip().upper() == "YES":
        fields.add(BURNED_IN)
    return tuple(field for field in FIELD_KINDS if field in fields)


def count_fields(files: Iterable[Iterable[str]]) -> dict[str, dict[str, int | str | bool]]:
    """Files per field from the fields of each file: {field: {"files", "kind", "direct"}}, in the order of the table."""
    counts = dict.fromkeys(FIELD_KINDS, 0)
    for fields in files:
        for field in fields:
            counts[field] = counts.get(field, 0) + 1
    return {
        field: {
            "files": count,
            "kind": (kind := FIELD_KINDS.get(field, "private")),
            "direct": kind in DIRECT_KINDS,
        }
        for field, count in counts.items()
        if count
    }


def words(text: str) -> list[str]:
    """Runs of letters and runs of digits, lower case, without accents."""
    plain = "".join(char for char in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(char))
    return re.findall(r"[^\W\d_]+|\d+", plain)


def _spellings(birth_date: str) -> tuple[str, ...]:
    """Digits of a birth date YYYYMMDD as people write it; () for anything else."""
    born = re.sub(r"\D", "", birth_date)
    if len(born) != 8:
        return ()
    year, month, day = born[:4], born[4:6], born[6:]
    orders = (month + day, day + month)
    return tuple(text for y in (year, year[2:]) for order in orders for text in (y + order, order + y))


_BYTES = re.compile(r"[\udc80-\udcff]")  # bytes of a file name that are not UTF-8
_WRITTEN_OUT = {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "å": "aa", "ø": "oe", "æ": "ae", "ñ": "ny", "ł": "l"}


_IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")  # kana, Han, Hangul
_OTHER_ENCODINGS = ("utf-8", "gb18030", "shift_jis", "euc_kr", "big5")


def _spelled(name: str) -> list[str]:
    """`name`, and what its bytes are in other encodings: without SpecificCharacterSet they are decoded as Latin-1."""
    try:
        raw = name.encode("latin-1")
    except UnicodeEncodeError:
        return [name]
    names = [name]
    if not name.isascii():
        for encoding in _OTHER_ENCODINGS:
            try:
                names.append(raw.decode(encoding))
            except UnicodeDecodeError:
                continue
    return names


def _written_out(text: str) -> str:
    """Lower case, with letters written out: "Müller" gives "mueller"."""
    return "".join(_WRITTEN_OUT.get(char, char) for char in unicodedata.normalize("NFC", text.casefold()))


def _name_parts(name: str) -> tuple[set[str], set[str]]:
    """(words of a name, wholes made of several words), both without accents and with letters written out.

    "Müller" gives muller and mueller. Of "Li^Bo" the wholes are libo and boli, with the initial lbo, boli and so on. In
    Chinese, Japanese and Korean a word has one or two characters, so that only the wholes count there.
    """
    parts: set[str] = set()
    wholes: set[str] = set()
    for spelled in _spelled(name):
        for group in spelled.split("="):  # alphabetic, ideographic, phonetic
            for text in {group, _written_out(group)}:
                name_words = [word for word in words(text) if not word.isdigit()]
                parts |= {word for word in name_words if len(word) > 1 and not _IDEOGRAPHS.search(word)}
                parts |= {word for word in name_words if len(word) > 2}
                for first, second in pairwise(name_words):
                    wholes |= {first + second, second + first}
                    if len(first) > 1 and len(second) > 1 and not _IDEOGRAPHS.search(first + second):
                        wholes |= {first[0] + second, second + first[0], second[0] + first, first + second[0]}
                if len(name_words) == 1 and _IDEOGRAPHS.search(name_words[0]) and len(name_words[0]) > 1:
                    wholes.add(name_words[0])
    return parts, {whole for whole in wholes if len(whole) > 2 or _IDEOGRAPHS.search(whole)}


def is_placeholder(text: str) -> bool:
    """Whether an id or name is a placeholder such as "anonymous", and identifies no person."""
    return text.strip(" ^\0").lower() in _BLANK


def identifies_person(text: str, name: str, birth_date: str) -> bool:
    """Whether a text holds a part of the person's name, or the birth date in one of its usual spellings."""
    if _BYTES.search(text):  # a file name that is not UTF-8; Chinese systems write GB18030
        with suppress(UnicodeError):
            return identifies_person(os.fsencode(text).decode("gb18030"), name, birth_date)
    text_words = words(text)
    if not text.isascii():
        text_words += words(_written_out(text))
    compact = "".join(text_words)
    parts, wholes = _name_parts(name)
    # A short part counts as a whole word only: "li" is in many an id by chance.
    if any(part in text_words or (len(part) > 3 and part in compact) for part in parts):
        return True
    if any(whole in text_words or (_IDEOGRAPHS.search(whole) and whole in compact) for whole in wholes):
        return True
    digits = re.sub(r"\D", "", text)
    return any(spelling in digits for spelling in _spellings(birth_date))


def repeats_personal_text(text: str, name: str, birth_date: str, others: Iterable[str] = ()) -> bool:
    """Whether a text that is to be stored repeats the person's name or birth date, or one of `others`.

    `others` are further texts of the file that identify a person: ids, numbers, names of physicians and operators.
    """
    if identifies_person(text, name, birth_date):
        return True
    plain, word_set = "".join(words(text)), set(words(text))
    for other in others:
        joined = "".join(words(other))
        if len(joined) > 3 and not joined.isdigit() and joined in plain:
            return True
        if any((len(word) > 3 or not word.isdigit()) and len(word) > 2 and word in word_set for word in words(other)):
            return True
    return False


def repeats_birth_date(uid: str, birth_date: str) -> bool:
    """Whether a component of a UID holds the birth date; a date of two-digit years only as the whole component."""
    return any(
        spelling in component if len(spelling) == 8 else spelling == component
        for component in uid.split(".")
        for spelling in _spellings(birth_date)
    )


def clean_person_id(text: str) -> str:
    """ "AIREADI-1001", " 1001 " and a spreadsheet's "1001.0" -> "1001"; other ids are kept as they are.

    Accents are composed (NFC): macOS takes them apart, and one person would be two.
    """
    text = re.sub(r"^AI-?READI[-_ ]*", "", unicodedata.normalize("NFC", text.strip()), flags=re.IGNORECASE)
    return text[:-2] if re.fullmatch(r"\d+\.0", text) else text


def names_nobody(text: str) -> bool:
    """Whether a person id, or another text, of a table stands for no value; unlike in a header, 0 is an id."""
    return text.strip().lower() in (_BLANK | _NO_VALUE) - {"0"}


def storable_labels(
    labels: Mapping[str, float | str], name: str, birth_date: str, person_id: str
) -> dict[str, float | str]:
    """`labels` without texts that hold the person's name, birth date or id."""
    return {
        key: value
        for key, value in labels.items()
        if not isinstance(value, str) or not repeats_personal_text(value, name, birth_date, (person_id,))
    }


def pseudonym(person_id: str) -> str:
    """The pseudonym of an id that holds a name or birth date; the same for the same id."""
    return "p-" + hashlib.sha256(person_id.encode()).hexdigest()[:12]


def identifies_person_in_path(part: str, name: str, birth_date: str) -> bool:
    """`identifies_person` for one folder or file name, without the digits of UIDs, which hold any date by chance."""
    if identifies_person(part, name, ""):
        return True
    without_uid = re.sub(r"\d+(?:\.\d+){3,}", "", part)
    runs = [re.sub(r"\D", "", run) for run in re.findall(r"\d+(?:[-_]\d+)*", without_uid)]
    return any(
        spelling == run if len(spelling) < 8 else spelling in run
        for spelling in _spellings(birth_date)
        for run in runs
        if len(run) <= 14
    )


def mask_part(part: str, people: Iterable[tuple[str, str]]) -> str:
    """`part`, a folder or file name, as "***"; its suffix stays if it tells of none of `people` (name, birth)."""
    suffix = PurePosixPath(part).suffix
    tells = len(suffix) > 6 or any(identifies_person_in_path(suffix, *person) for person in people)
    return "***" + ("" if tells else suffix)


def mask_path(path: str, name: str, birth_date: str) -> str:
    """`path` with every folder or file name that tells who the person is replaced by "***"; the suffix stays.

    Labs name folders after people; index and quarantine must not. The number of parts stays.
    """
    person = (name, birth_date)
    return "/".join(
        mask_part(part, [person]) if identifies_person_in_path(part, *person) else part for part in path.split("/")
    )


def first_stated(people: Iterable[StatedPerson]) -> StatedPerson:
    """The first name, birth date and sex that `people` state, without placeholders.

    Iteration ends as soon as the name and the birth date are known.
    """
    stated = StatedPerson()
    for person in people:
        texts = ("" if is_placeholder(text) else text for text in person)
        stated = StatedPerson(*(first or text for first, text in zip(stated, texts, strict=True)))
        if stated.name and stated.birth_date:
            break
    return stated


def read_stated_person(path: Path) -> StatedPerson:
    """The person that the DICOM header at `path` states; empty texts for none, and for what is not DICOM."""
    fields = ("PatientName", "PatientBirthDate", "PatientSex")
    try:
        header = read_header(path, ("SpecificCharacterSet", *fields), _LAST_PERSONAL_TAG)
        return StatedPerson(*(str(header.get(field, "")) for field in fields))
    except Exception:  # refused files are often no DICOM, or damaged; pydicom raises what they made of its parser
        return StatedPerson()
