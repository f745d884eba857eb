"""Headers that are incomplete, contradict the pixels or belong to another kind of object, and scans that do not say
whose eye they are, say it twice differently, or are there twice."""

from __future__ import annotations

from typing import Final

import numpy as np

from octjepa.phantom.broken import Apply, Defect, Files, ScanFile, accepted, refused
from octjepa.phantom.dicom import SOP_CLASS, derived_uid

from .files import dataset_offset

PATIENT_NAME: Final = "Zoo^Phantom"  # nobody's; a reader must never repeat it
_BYTE_CAPTURE = "1.2.840.10008.5.1.4.1.1.7.2"
_WORD_CAPTURE = "1.2.840.10008.5.1.4.1.1.7.3"
_PHOTOGRAPH = "1.2.840.10008.5.1.4.1.1.77.1.5.1"
_EN_FACE = "1.2.840.10008.5.1.4.1.1.77.1.5.7"
_PLACEHOLDER = b"1.2.840.10008.5.1.4.xxxxx.1"
_OTHER_EYE = {"R": "L", "L": "R"}


def _count_no_number(scan: ScanFile) -> Files:
    tag = b"\x28\x00\x08\x00"
    return scan.replaced(tag + b"IS\x02\x00%d" % len(scan.pixels), tag + b"IS\x02\x00x?")


def _palette(scan: ScanFile) -> None:
    scan.store(PhotometricInterpretation="PALETTE COLOR")
    for name in ("Red", "Green", "Blue"):
        setattr(scan.data, f"{name}PaletteColorLookupTableDescriptor", [256, 0, 8])
        setattr(scan.data, f"{name}PaletteColorLookupTableData", bytes(range(256)))


def _groups_missing(scan: ScanFile) -> None:
    scan.set_elements(SharedFunctionalGroupsSequence=None, PerFrameFunctionalGroupsSequence=None)
    scan.silence_manifest()


def _frame_groups_short(scan: ScanFile) -> None:
    del scan.frame_groups[len(scan.frame_groups) // 2 :]


def _secondary_capture(sop_class: str, sixteen_bits: bool) -> Apply:
    """A multi-frame image without functional groups, its spacing at the top."""

    def apply(scan: ScanFile) -> None:
        if sixteen_bits:
            scan.store(scan.pixels.astype(np.uint16) << 8)
        scan.set_class(
            sop_class,
            PixelSpacing=scan.measures.PixelSpacing,
            SpacingBetweenSlices=f"{scan.eye.spacing_mm[0]:.6f}",
            SharedFunctionalGroupsSequence=None,
            PerFrameFunctionalGroupsSequence=None,
        )

    return apply


def _placeholder_uid(scan: ScanFile) -> Files:
    old = SOP_CLASS.encode() + b"\0" * (len(SOP_CLASS) % 2)
    return scan.replaced(old, _PLACEHOLDER.ljust(len(old), b"\0"), -1)


def _implicit(scan: ScanFile) -> Files:
    """The data set without value representations below a header that promises them."""
    scan.store()
    explicit = scan.content()
    scan.data.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2"
    scan.data["PixelData"].VR = "OW"
    implicit = scan.content()
    return {scan.path: explicit[: dataset_offset(explicit)] + implicit[dataset_offset(implicit) :]}


def _length_wrong(scan: ScanFile) -> Files:
    content = scan.content()
    at = content.rindex(b"\x00\x52\x30\x92SQ\x00\x00") + 8
    return {scan.path: content[:at] + (len(content) * 2).to_bytes(4, "little") + content[at + 4 :]}


def _charset_unknown(scan: ScanFile) -> Files:
    scan.set_elements(SpecificCharacterSet="ISO_IR 100", PatientComments="Zoo \xe9\xe8")
    return scan.replaced(b"ISO_IR 100", b"ISO_IR 999")


DEFECTS: Final[tuple[Defect, ...]] = (
    refused(
        "pixel_data_empty",
        "a pixel data element of length zero",
        lambda scan: scan.store(PixelData=b""),
        "no_pixel_data",
    ),
    accepted(
        "count_missing",
        "NumberOfFrames is absent",
        lambda scan: scan.set_elements(NumberOfFrames=None),
        "frame_count_corrected",
    ),
    accepted(
        "count_zero", "NumberOfFrames is 0", lambda scan: scan.set_elements(NumberOfFrames=0), "frame_count_corrected"
    ),
    accepted(
        "count_small",
        "NumberOfFrames is half of the frames",
        lambda scan: scan.set_elements(NumberOfFrames=len(scan.pixels) // 2),
        "frame_count_corrected",
    ),
    refused(
        "count_large",
        "NumberOfFrames is five too many",
        lambda scan: scan.set_elements(NumberOfFrames=len(scan.pixels) + 5),
        "frames_missing",
    ),
    accepted("count_no_number", "NumberOfFrames is not a number", _count_no_number, "frame_count_corrected"),
    refused(
        "sides_swapped",
        "Rows and Columns swapped",
        lambda scan: scan.store(Rows=scan.data.Columns, Columns=scan.data.Rows),
        "header_contradicts_pixels",
    ),
    refused(
        "rows_off_by_one",
        "Rows is one too small",
        lambda scan: scan.store(Rows=scan.data.Rows - 1),
        "header_contradicts_pixels",
    ),
    refused(
        "rows_halved",
        "Rows is half of its true value",
        lambda scan: scan.store(Rows=scan.data.Rows // 2),
        "header_contradicts_pixels",
    ),
    refused("rows_zero", "Rows is 0", lambda scan: scan.set_elements(Rows=0), "broken_header"),
    refused("columns_missing", "Columns is absent", lambda scan: scan.set_elements(Columns=None), "broken_header"),
    refused(
        "bits_allocated_wrong",
        "8-bit pixels, BitsAllocated 16",
        lambda scan: scan.store(BitsAllocated=16, BitsStored=16, HighBit=15),
        "frames_missing",
        "header_contradicts_pixels",
    ),
    accepted(
        "bits_stored_wrong",
        "BitsStored exceeds BitsAllocated",
        lambda scan: scan.set_elements(BitsStored=12, HighBit=11),
    ),
    refused(
        "samples_wrong",
        "intensities, PhotometricInterpretation RGB",
        lambda scan: scan.store(SamplesPerPixel=3, PhotometricInterpretation="RGB", PlanarConfiguration=0),
        "frames_missing",
        "header_contradicts_pixels",
    ),
    refused("palette", "PALETTE COLOR", _palette, "unsupported_pixels"),
    refused(
        "thirty_two_bits",
        "32 bits per pixel",
        lambda scan: scan.store(scan.pixels[:6].astype(np.uint32)),
        "unsupported_pixels",
    ),
    refused(
        "absurd_size",
        "60,000 frames of 65,535 x 65,535",
        lambda scan: scan.set_elements(Rows=65535, Columns=65535, NumberOfFrames=60000),
        "size_implausible",
    ),
    refused(
        "groups_missing", "no functional groups, and no spacing in the manifest", _groups_missing, "spacing_unknown"
    ),
    accepted(
        "frame_groups_missing",
        "no per-frame functional groups",
        lambda scan: scan.set_elements(PerFrameFunctionalGroupsSequence=None),
        "positions_missing",
    ),
    accepted(
        "frame_groups_short",
        "per-frame functional groups for half of the frames",
        _frame_groups_short,
        "positions_missing",
    ),
    accepted(
        "orientation_missing",
        "no plane orientation",
        lambda scan: delattr(scan.shared, "PlaneOrientationSequence"),
        same_pixels=False,
    ),
    accepted("modality_missing", "no modality", lambda scan: scan.set_elements(Modality=None)),
    accepted(
        "grey_byte",
        "multi-frame grayscale byte secondary capture",
        _secondary_capture(_BYTE_CAPTURE, False),
        "positions_missing",
    ),
    accepted(
        "grey_word",
        "multi-frame grayscale word secondary capture",
        _secondary_capture(_WORD_CAPTURE, True),
        "scaled_from_16_bit",
    ),
    refused(
        "photograph",
        "a fundus photograph",
        lambda scan: scan.set_class(_PHOTOGRAPH, Modality="OP"),
        "not_structural_oct",
    ),
    refused(
        "en_face", "an en face image", lambda scan: scan.set_class(_EN_FACE, Modality="OPTENF"), "not_structural_oct"
    ),
    refused(
        "placeholder_uid", "the illegal SOP class 1.2.840.10008.5.1.4.xxxxx.1", _placeholder_uid, "not_structural_oct"
    ),
    accepted("implicit", "implicit VR, transfer syntax explicit VR", _implicit),
    refused("length_wrong", "an element whose length exceeds the file", _length_wrong, "truncated", "broken_header"),
    accepted("charset_unknown", "an undefined character set", _charset_unknown),
)


def _eye_missing(scan: ScanFile) -> None:
    del scan.data.ImageLaterality
    scan.shared.FrameAnatomySequence[0].FrameLaterality = ""


def _device_contradicts(scan: ScanFile) -> None:
    if "Topcon" in scan.data.Manufacturer:
        scan.set_elements(Manufacturer="Heidelberg Engineering", ManufacturerModelName="Spectralis")
    else:
        scan.set_elements(Manufacturer="Topcon", ManufacturerModelName="Triton")


def _same_pixels(scan: ScanFile) -> Files:
    first = scan.content()
    uid = derived_uid("zoo", scan.data.SOPInstanceUID)
    scan.data.SOPInstanceUID = scan.data.file_meta.MediaStorageSOPInstanceUID = uid
    return {scan.path: first, scan.path.with_name(f"{scan.path.stem}_copy.dcm"): scan.content()}


def _same_uid(scan: ScanFile) -> Files:
    first = scan.content()
    scan.store(scan.pixels[:, :, ::-1].copy())
    return {scan.path: first, scan.path.with_name(f"{scan.path.stem}_edited.dcm"): scan.content()}


IDENTITY_DEFECTS: Final[tuple[Defect, ...]] = (
    accepted("eye_missing", "no laterality in the header", _eye_missing),
    accepted("eye_both", 'laterality "B"', lambda scan: scan.set_elements(ImageLaterality="B")),
    accepted(
        "eye_contradicts",
        "header and frame laterality differ",
        lambda scan: scan.set_elements(ImageLaterality=_OTHER_EYE[scan.data.ImageLaterality]),
        "laterality_disagrees",
    ),
    accepted("person_missing", "no PatientID", lambda scan: scan.set_elements(PatientID="")),
    accepted(
        "person_contradicts",
        "PatientID differs from the manifest",
        lambda scan: scan.set_elements(PatientID="9876"),
        "person_disagrees",
    ),
    accepted(
        "name_as_id",
        "the person's name as PatientID",
        lambda scan: scan.set_elements(PatientName=PATIENT_NAME, PatientID=PATIENT_NAME, PatientBirthDate="19010203"),
        "person_id_pseudonymised",
    ),
    accepted("device_contradicts", "device differs from the manifest", _device_contradicts, "device_disagrees"),
    accepted(
        "burned_in",
        "BurnedInAnnotation YES",
        lambda scan: scan.set_elements(BurnedInAnnotation="YES"),
        "burned_in_text",
    ),
    refused("same_pixels", "the same pixels under another file name and UID", _same_pixels, "duplicate_content"),
    refused("same_uid", "other pixels under the same SOP instance UID", _same_uid, "duplicate_sop_uid"),
    refused("no_file", "a manifest row without its file", lambda scan: {}, "manifest_row_without_file"),
    accepted("no_row", "a file that the manifest does not list", ScanFile.unlist),
    accepted(
        "strange_name",
        "an uninformative file and folder name",
        lambda scan: scan.moved(scan.path.parent.parent / "neuer Ordner (2)" / f"Bild {scan.eye.person.index}.dcm"),
    ),
)
