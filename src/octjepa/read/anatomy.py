"""The content of an image according to its header: the retina, another part of the eye, an animal's eye, blood flow, a
localizer.

Codes of DICOM PS3.16 context groups 4209 and 4211 (ophthalmic structures imaged), in SNOMED CT and in the older SRT
form; codes that are not among them are recognised by the words of their meaning. A header that names nothing is
taken to show a retina: content is examined later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octjepa.errors import VolumeRejected
from octjepa.read.devices import check_images_retina, stated_device
from octjepa.reasons import rejection

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_OTHER_PARTS = {
    "28726007": "cornea",
    "T-AA200": "cornea",
    "65431007": "corneal endothelium",
    "T-AA260": "corneal endothelium",
    "15775008": "corneal epithelium",
    "T-AA220": "corneal epithelium",
    "31636006": "anterior chamber",
    "T-AA050": "anterior chamber",
    "41296002": "iris",
    "T-AA500": "iris",
    "78076003": "lens",
    "T-AA700": "lens",
    "29534007": "ciliary body",
    "T-AA400": "ciliary body",
    "29445007": "conjunctiva",
    "T-AA860": "conjunctiva",
    "18619003": "sclera",
    "T-AA110": "sclera",
    "80243003": "eyelid",
    "T-AA810": "eyelid",
    "62736007": "lower eyelid",
    "T-AA830": "lower eyelid",
    "38934000": "upper eyelid",
    "T-AA820": "upper eyelid",
}
_OTHER_WORDS = re.compile(
    r"\b(anterior[ _-]?(segment|chamber)|cornea\w*|kerat\w+|iris|crystalline lens|ciliary body|conjunctiva\w*"
    r"|as[ _-]?oct|gonio\w*|iridocorneal)\b",
    re.IGNORECASE,
)
_POSTERIOR_WORDS = re.compile(
    r"\b(retina\w*|macula\w*|fovea\w*|choroid\w*|optic|disc|disk|vitreous|fundus|posterior)\b", re.I
)
# Components of ImageType and FrameType that name another kind of image than a structural B-scan.
_OTHER_IMAGES = {
    "ANGIO": "OCT angiography",
    "ANGIOGRAPHY": "OCT angiography",
    "OCTA": "OCT angiography",
    "FLOW": "blood flow",
    "DECORRELATION": "blood flow",
    "ENFACE": "an en face image",
    "EN_FACE": "an en face image",
    "EN FACE": "an en face image",
    "THICKNESS": "a map of thickness",
    "LOCALIZER": "a localizer",
    "SLO": "a localizer",
    "FUNDUS": "a fundus image",
}
_WHOLE_EYE = {"81745001", "T-AA000"}  # decides nothing: the structure may be named next to it
_HUMAN = re.compile(r"\b(human|homo|h\. sapiens|man)\b", re.IGNORECASE)
_HUMAN_CODES = {"337915000", "L-85B00"}


def other_image(image_type: Iterable[str]) -> str:
    """The kind of image, other than a B-scan, that the components of an ImageType or FrameType name; "" for none."""
    return next((what for part in image_type if (what := _OTHER_IMAGES.get(str(part).strip().upper(), ""))), "")


def other_part(text: str) -> str:
    """The part of the eye other than the retina that a text names ("Anterior Segment Cube"); "" for none."""
    match = _OTHER_WORDS.search(text.replace("_", " "))
    return match[0].lower() if match and not _POSTERIOR_WORDS.search(text.replace("_", " ")) else ""


def _parts_shown(header: Dataset) -> list[str]:
    """For every anatomic region and structure of a header and its shared groups: another part of the eye, or ""."""
    datasets = [header]
    for group in (header.get("SharedFunctionalGroupsSequence") or [])[:1]:
        datasets += list(group.get("FrameAnatomySequence") or [])
    parts_shown = []
    for dataset in datasets:
        for name in ("AnatomicRegionSequence", "PrimaryAnatomicStructureSequence"):
            for region in dataset.get(name) or []:
                code, meaning = (str(region.get(key) or "").strip() for key in ("CodeValue", "CodeMeaning"))
                if code not in _WHOLE_EYE:
                    parts_shown.append(_OTHER_PARTS.get(code) or other_part(meaning))
    return parts_shown


def _species(header: Dataset) -> str:
    """The species of an animal that a header names; "" for a human and for none."""
    texts = [str(header.get("PatientSpeciesDescription") or "").strip()]
    for item in header.get("PatientSpeciesCodeSequence") or []:
        if str(item.get("CodeValue", "")).strip() in _HUMAN_CODES:
            return ""
        texts.append(str(item.get("CodeMeaning") or "").strip())
    named = [text for text in texts if text]
    return "" if any(_HUMAN.search(text) for text in named) else next(iter(named), "")


def check_anatomy(header: Dataset) -> None:
    """Checks what a DICOM header says is shown; an element that cannot be parsed is passed over.

    Raises VolumeRejected: not_structural_oct, not_retina.
    """
    try:
        _check(header)
    except (VolumeRejected, MemoryError):
        raise
    except Exception:  # pydicom raises what the broken element made of its parser; the image may still be whole
        return


def _check(header: Dataset) -> None:
    """Raises VolumeRejected: not_structural_oct, not_retina."""
    kind = header.get("ImageType") or ()
    if what := other_image([kind] if isinstance(kind, str) else kind):
        raise rejection("not_structural_oct", f"ImageType says {what}; expected structural B-scans")
    parts = _parts_shown(header)
    if parts and all(parts):
        raise rejection("not_retina", f"AnatomicRegionSequence says {parts[0]}; expected the retina")
    make, model = (str(header.get(name) or "") for name in ("Manufacturer", "ManufacturerModelName"))
    check_images_retina(stated_device(make, model)[0])
    if _species(header):
        raise rejection("not_retina", "PatientSpecies names an animal; expected a human eye")
    texts = " ".join(str(header.get(name) or "") for name in ("BodyPartExamined", "ProtocolName", "SeriesDescription"))
    if part := other_part(texts):
        raise rejection("not_retina", f"body part, protocol or series description says {part}; expected the retina")
