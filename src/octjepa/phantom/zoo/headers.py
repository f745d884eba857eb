"""Headers that are incomplete, contradict the pixels, or belong to another kind of object."""

from __future__ import annotations

from typing import Final

import numpy as np

from octjepa.phantom.dicom import SOP_CLASS
from octjepa.phantom.zoo.specimen import Files, Kind, Specimen, accepted, refused

_GREY_BYTE = "1.2.840.10008.5.1.4.1.1.7.2"
_GREY_WORD = "1.2.840.10008.5.1.4.1.1.7.3"
_PHOTOGRAPH = "1.2.840.10008.5.1.4.1.1.77.1.5.1"
_EN_FACE = "1.2.840.10008.5.1.4.1.1.77.1.5.7"
_PLACEHOLDER = b"1.2.840.10008.5.1.4.xxxxx.1"


def _no_pixel_data(s: Specimen) -> None:
    del s.data.PixelData


def _empty_pixel_data(s: Specimen) -> None:
    s.store(s.eye.pixels)
    s.data.PixelData = b""


def _count_missing(s: Specimen) -> None:
    del s.data.NumberOfFrames


def _count_zero(s: Specimen) -> None:
    s.data.NumberOfFrames = 0


def _count_small(s: Specimen) -> None:
    s.data.NumberOfFrames = len(s.eye.pixels) // 2


def _count_large(s: Specimen) -> None:
    s.data.NumberOfFrames = len(s.eye.pixels) + 5


def _count_no_number(s: Specimen) -> Files:
    number = b"IS\x02\x00%d" % len(s.eye.pixels)
    return {s.path: s.content().replace(b"\x28\x00\x08\x00" + number, b"\x28\x00\x08\x00IS\x02\x00x?", 1)}


def _sides_swapped(s: Specimen) -> None:
    s.store(s.eye.pixels)
    s.data.Rows, s.data.Columns = s.data.Columns, s.data.Rows


def _rows_off_by_one(s: Specimen) -> None:
    s.store(s.eye.pixels)
    s.data.Rows -= 1


def _rows_halved(s: Specimen) -> None:
    s.store(s.eye.pixels)
    s.data.Rows //= 2


def _rows_zero(s: Specimen) -> None:
    s.data.Rows = 0


def _columns_missing(s: Specimen) -> None:
    del s.data.Columns


def _allocated_wrong(s: Specimen) -> None:
    s.store(s.eye.pixels)
    s.data.BitsAllocated = s.data.BitsStored = 16
    s.data.HighBit = 15


def _stored_wrong(s: Specimen) -> None:
    s.data.BitsStored, s.data.HighBit = 12, 11


def _samples_wrong(s: Specimen) -> None:
    s.store(s.eye.pixels)
    s.data.SamplesPerPixel, s.data.PhotometricInterpretation, s.data.PlanarConfiguration = 3, "RGB", 0


def _palette(s: Specimen) -> None:
    s.store(s.eye.pixels)
    s.data.PhotometricInterpretation = "PALETTE COLOR"
    for name in ("Red", "Green", "Blue"):
        setattr(s.data, f"{name}PaletteColorLookupTableDescriptor", [256, 0, 8])
        setattr(s.data, f"{name}PaletteColorLookupTableData", bytes(range(256)))


def _thirty_two_bits(s: Specimen) -> None:
    s.store(s.eye.pixels[:6].astype(np.uint32))


def _absurd_size(s: Specimen) -> None:
    s.data.Rows = s.data.Columns = 65535
    s.data.NumberOfFrames = 60000


def _groups_missing(s: Specimen) -> None:
    del s.data.SharedFunctionalGroupsSequence, s.data.PerFrameFunctionalGroupsSequence
    s.silence_manifest()


def _frame_groups_missing(s: Specimen) -> None:
    del s.data.PerFrameFunctionalGroupsSequence


def _frame_groups_short(s: Specimen) -> None:
    del s.frames[len(s.frames) // 2 :]


def _orientation_missing(s: Specimen) -> None:
    del s.shared.PlaneOrientationSequence


def _modality_missing(s: Specimen) -> None:
    del s.data.Modality


def _generic(s: Specimen, sop_class: str) -> None:
    data, measures = s.data, s.measures
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = sop_class
    data.PixelSpacing = measures.PixelSpacing
    data.SpacingBetweenSlices = f"{s.eye.spacing_mm[0]:.6f}"
    del data.SharedFunctionalGroupsSequence, data.PerFrameFunctionalGroupsSequence


def _grey_byte(s: Specimen) -> None:
    _generic(s, _GREY_BYTE)


def _grey_word(s: Specimen) -> None:
    s.store(s.eye.pixels.astype(np.uint16) << 8)
    _generic(s, _GREY_WORD)


def _other_class(s: Specimen, sop_class: str, modality: str) -> None:
    s.data.SOPClassUID = s.data.file_meta.MediaStorageSOPClassUID = sop_class
    s.data.Modality = modality


def _photograph(s: Specimen) -> None:
    _other_class(s, _PHOTOGRAPH, "OP")


def _en_face(s: Specimen) -> None:
    _other_class(s, _EN_FACE, "OPTENF")


def _placeholder_uid(s: Specimen) -> Files:
    old = SOP_CLASS.encode()
    old += b"\0" * (len(old) % 2)
    return {s.path: s.content().replace(old, _PLACEHOLDER.ljust(len(old), b"\0"))}


def _implicit(s: Specimen) -> Files:
    """The data set without value representations below a header that promises them."""
    s.store(s.eye.pixels)
    explicit = s.content()
    s.data.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2"
    s.data["PixelData"].VR = "OW"
    implicit = s.content()

    def start(content: bytes) -> int:
        return 132 + 12 + int.from_bytes(content[140:144], "little")

    return {s.path: explicit[: start(explicit)] + implicit[start(implicit) :]}


def _length_wrong(s: Specimen) -> Files:
    """The length of one element of the header reaches beyond the end of the file."""
    content = s.content()
    place = content.rindex(b"\x00\x52\x30\x92SQ\x00\x00") + 8
    return {s.path: content[:place] + (len(content) * 2).to_bytes(4, "little") + content[place + 4 :]}


def _charset_unknown(s: Specimen) -> Files:
    s.data.SpecificCharacterSet = "ISO_IR 100"
    s.data.PatientComments = "Zoo \xe9\xe8"
    return {s.path: s.content().replace(b"ISO_IR 100", b"ISO_IR 999", 1)}


NO_PIXEL_DATA: Final = refused("no_pixel_data", "a header alone", _no_pixel_data, "no_pixel_data")
KINDS: Final[tuple[Kind, ...]] = (
    refused("pixel_data_empty", "a pixel data element of length zero", _empty_pixel_data, "no_pixel_data"),
    accepted("count_missing", "NumberOfFrames is absent", _count_missing, "frame_count_corrected"),
    accepted("count_zero", "NumberOfFrames is 0", _count_zero, "frame_count_corrected"),
    accepted("count_small", "NumberOfFrames is half of the frames", _count_small, "frame_count_corrected"),
    refused("count_large", "NumberOfFrames is five too many", _count_large, "frames_missing"),
    accepted("count_no_number", "NumberOfFrames is no number", _count_no_number, "frame_count_corrected"),
    refused("sides_swapped", "rows and columns changed places", _sides_swapped, "header_contradicts_pixels"),
    refused("rows_off_by_one", "one row too few in the header", _rows_off_by_one, "header_contradicts_pixels"),
    refused("rows_halved", "half the rows in the header", _rows_halved, "header_contradicts_pixels"),
    refused("rows_zero", "zero rows", _rows_zero, "broken_header"),
    refused("columns_missing", "no columns", _columns_missing, "broken_header"),
    refused("bits_allocated_wrong", "8-bit pixels called 16-bit", _allocated_wrong,
            "frames_missing", "header_contradicts_pixels"),
    accepted("bits_stored_wrong", "BitsStored beyond BitsAllocated", _stored_wrong),
    refused("samples_wrong", "grey pixels called RGB", _samples_wrong, "frames_missing", "header_contradicts_pixels"),
    refused("palette", "colours of a palette", _palette, "unsupported_pixels"),
    refused("thirty_two_bits", "32 bits a pixel", _thirty_two_bits, "unsupported_pixels"),
    refused("absurd_size", "60,000 frames of 65,535 x 65,535", _absurd_size, "size_implausible"),
    refused("groups_missing", "no functional groups, and a manifest without spacing", _groups_missing,
            "spacing_unknown"),
    accepted("frame_groups_missing", "no per-frame functional groups", _frame_groups_missing, "positions_missing"),
    accepted("frame_groups_short", "functional groups for half of the frames", _frame_groups_short,
             "positions_missing"),
    accepted("orientation_missing", "no plane orientation", _orientation_missing, same_pixels=False),
    accepted("modality_missing", "no modality", _modality_missing),
    accepted("grey_byte", "multi-frame grey byte secondary capture", _grey_byte, "positions_missing"),
    accepted("grey_word", "multi-frame grey word secondary capture", _grey_word, "scaled_from_16_bit"),
    refused("photograph", "a fundus photograph", _photograph, "not_structural_oct"),
    refused("en_face", "an en face image", _en_face, "not_structural_oct"),
    refused("placeholder_uid", "the illegal SOP class 1.2.840.10008.5.1.4.xxxxx.1", _placeholder_uid,
            "not_structural_oct"),
    accepted("implicit", "implicit VR below a header that says explicit", _implicit),
    refused("length_wrong", "an element that reaches beyond the end of the file", _length_wrong,
            "truncated", "broken_header"),
    accepted("charset_unknown", "a character set that does not exist", _charset_unknown),
)  # fmt: skip
