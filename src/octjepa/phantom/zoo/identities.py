"""Scans that do not say whose eye they are, say it twice differently, or are there twice."""

from __future__ import annotations

from typing import Final

from octjepa.phantom.dicom import derived_uid
from octjepa.phantom.zoo.specimen import Files, Kind, Specimen, accepted, refused

NAME: Final = "Zoo^Phantom"  # nobody's; a reader must never repeat it
_OTHER_EYE = {"R": "L", "L": "R"}


def _eye_missing(s: Specimen) -> None:
    del s.data.ImageLaterality
    s.shared.FrameAnatomySequence[0].FrameLaterality = ""


def _eye_both(s: Specimen) -> None:
    s.data.ImageLaterality = "B"


def _eye_contradicts(s: Specimen) -> None:
    s.data.ImageLaterality = _OTHER_EYE[s.data.ImageLaterality]


def _person_missing(s: Specimen) -> None:
    s.data.PatientID = ""


def _person_contradicts(s: Specimen) -> None:
    s.data.PatientID = "9876"


def _name_as_id(s: Specimen) -> None:
    s.data.PatientName = s.data.PatientID = NAME
    s.data.PatientBirthDate = "19010203"


def _device_contradicts(s: Specimen) -> None:
    topcon = "Topcon" in s.data.Manufacturer
    s.data.Manufacturer = "Heidelberg Engineering" if topcon else "Topcon"
    s.data.ManufacturerModelName = "Spectralis" if topcon else "Triton"


def _burned_in(s: Specimen) -> None:
    s.data.BurnedInAnnotation = "YES"


def _same_pixels(s: Specimen) -> Files:
    first = s.content()
    s.data.SOPInstanceUID = s.data.file_meta.MediaStorageSOPInstanceUID = derived_uid("zoo", s.data.SOPInstanceUID)
    return {s.path: first, s.path.with_name(f"{s.path.stem}_copy.dcm"): s.content()}


def _same_uid(s: Specimen) -> Files:
    first = s.content()
    s.store(s.eye.pixels[:, :, ::-1].copy())
    return {s.path: first, s.path.with_name(f"{s.path.stem}_edited.dcm"): s.content()}


def _no_file(s: Specimen) -> Files:
    return {}


def _no_row(s: Specimen) -> None:
    s.row = None


def _strange_name(s: Specimen) -> Files:
    s.row = None
    return {s.path.parent.parent / "neuer Ordner (2)" / f"Bild {s.eye.person.index}.dcm": s.content()}


KINDS: Final[tuple[Kind, ...]] = (
    accepted("eye_missing", "no laterality in the header", _eye_missing),
    accepted("eye_both", 'laterality "B"', _eye_both),
    accepted("eye_contradicts", "header and frames name different eyes", _eye_contradicts, "laterality_disagrees"),
    accepted("person_missing", "no person in the header", _person_missing),
    accepted("person_contradicts", "another person in the header than in the manifest", _person_contradicts,
             "person_disagrees"),
    accepted("name_as_id", "the person's name as id", _name_as_id, "person_id_pseudonymised"),
    accepted("device_contradicts", "another device in the header than in the manifest", _device_contradicts,
             "device_disagrees"),
    accepted("burned_in", "text burned into the pixels, as the header says", _burned_in, "burned_in_text"),
    refused("same_pixels", "the same pixels under another name and UID", _same_pixels, "duplicate_content"),
    refused("same_uid", "other pixels under the same SOP instance UID", _same_uid, "duplicate_sop_uid"),
    refused("no_file", "a line of the manifest without its file", _no_file, "manifest_row_without_file"),
    accepted("no_row", "a file that the manifest does not list", _no_row),
    accepted("strange_name", "a name and a folder that say nothing", _strange_name),
)  # fmt: skip
