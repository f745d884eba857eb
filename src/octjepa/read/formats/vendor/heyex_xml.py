"""HEYEX' XML export: one .xml that lists the B-scan images next to it, with scale and position of each.

Read here because eyepy 0.21 needs every patient field and the localizer picture: it crashes on an anonymised export.
The images come in the order of the list, never of their names. Names are compared without case, because a copy by
Windows may change it; a name may not lead out of the folder.

Anonymisers take out more than the patient: the root (BODY is then the outermost element), ImageType and ExamURL. A
B-scan without ImageType is distinguished from a localizer by its ScaleY, which is that of OCT depth. If no picture
is named, or none of the names is there, the pictures of the B-scans' size are taken in the natural order of their
names, if there are exactly as many as B-scans and their content does not contradict that order. HEYEX itself names
pictures by hexadecimal numbers that are in no order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, fromstring

import numpy as np

from octjepa.read.devices import named_model
from octjepa.read.formats.neighbour_order import contradicts_order
from octjepa.read.formats.sequence import IMAGE_SUFFIXES, PICTURE_FORMATS, natural_key
from octjepa.read.formats.vendor import (
    check_shape,
    date_text,
    file_size,
    filled_fields,
    line_geometry,
    member_names,
    more_scans,
)
from octjepa.read.geometry import is_plausible
from octjepa.read.links import check_inside
from octjepa.read.raw_scan import HeaderFields, RawScan
from octjepa.reasons import error_origin, rejection

MAX_XML_BYTES = 256 << 20  # 512 B-scans with 18 layer lines of 1536 points each are 170 MB
# Of tags and attributes: 512 B-scans with 18 layer lines have fewer than 100,000. A tag takes 4 bytes in the file and
# over 100 in memory.
_MAX_XML_MARKS = 2_000_000
_MAX_PICTURES = 10_000
_PICTURE_SUFFIX = re.compile(rb"[.](?:png|tiff?|jpe?g|bmp)(?=[<\"\s])", re.IGNORECASE)
MAKE = "Heidelberg Engineering"
_DEVICE_TAG = re.compile(r"device|equipment|instrument|manufacturer|model", re.IGNORECASE)
_CONTEXT = "OphthalmicAcquisitionContext"


def _root(path: Path) -> Element:
    """The root element of an export. Raises VolumeRejected: size_implausible, broken_header, truncated."""
    if file_size(path) > MAX_XML_BYTES:
        raise rejection("size_implausible", f"an XML of more than {MAX_XML_BYTES >> 20} MiB")
    raw = path.read_bytes()
    if b"<!ENTITY" in raw.replace(b"\0", b""):  # UTF-16 puts a zero next to every letter
        raise rejection("broken_header", "the XML declares entities; no HEYEX export does")
    if raw.count(b"<") + raw.count(b"=") > _MAX_XML_MARKS:
        raise rejection("size_implausible", f"an XML of more than {_MAX_XML_MARKS:,} tags and attributes")
    try:
        root = fromstring(_decodable(raw))
    except (ParseError, ValueError, LookupError) as error:
        end = raw[-128:].replace(b"\0", b"").rstrip()
        whole = end.endswith(b">") and any(mark in end for mark in (b"</HEDX", b"</BODY"))
        raise rejection("broken_header" if whole else "truncated", f"the XML: {error_origin(error)}") from None
    if root.find(".//Series") is None:
        raise rejection("broken_header", "the XML holds no Series: no export of HEYEX")
    return root


_DECLARED = re.compile(rb"\s*<\?xml[^>]*encoding\s*=\s*[\"']([A-Za-z0-9._-]+)")


def _decodable(raw: bytes) -> bytes | str:
    """An XML that says UTF-8, or nothing, and is written in the code page of Windows in Western Europe, as a text."""
    declared = _DECLARED.match(raw)
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or (declared and declared[1].lower() not in (b"utf-8", b"utf8")):
        return raw
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return re.sub(r"^\s*<\?xml[^>]*\?>", "", raw.decode("cp1252", "replace"))
    return raw


def _is_b_scan(image: Element) -> bool:
    """By ImageType; without it, by a ScaleY that is one of depth, or by a scan line of its own."""
    kind = image.findtext("ImageType/Type", "").strip() or image.findtext("ImageType", "").strip()
    if kind:
        return kind.upper() == "OCT"
    scale = _number(image, f"{_CONTEXT}/ScaleY")
    if np.isfinite(scale):
        return is_plausible("depth", scale)
    start, end = (_line_ends([image], name) for name in ("Start", "End"))
    return bool(np.isfinite(start).all() and np.isfinite(end).all() and (start != end).any())


def _images(series: Element) -> list[Element]:
    return [image for image in series.iter("Image") if _is_b_scan(image)]


def _scans(root: Element) -> list[Element]:
    """The Series that hold B-scans. Raises VolumeRejected not_structural_oct."""
    series = [element for element in root.iter("Series") if _images(element)]
    if not series:
        raise rejection("not_structural_oct", "the XML lists no OCT image")
    return series


def members(path: Path) -> tuple[str, ...]:
    """The scans in the file, "1", "2", ..., in its order. Raises VolumeRejected."""
    return member_names(len(_scans(_root(path))))


def _number(element: Element, xpath: str) -> float:
    try:
        return float(element.findtext(xpath, "").strip().replace(",", "."))
    except ValueError:
        return float("nan")


def _date(element: Element | None, xpath: str) -> str:
    date = None if element is None else element.find(xpath)
    if date is None:
        return ""
    parts = [_number(date, part) for part in ("Year", "Month", "Day")]
    return date_text(*(int(part) for part in parts)) if np.isfinite(parts).all() else ""


def _around(root: Element, tag: str, series: Element) -> list[Element]:
    """The elements called `tag` that hold `series`; all of them if none does, as some anonymisers leave it."""
    elements = list(root.iter(tag))
    return [element for element in elements if any(part is series for part in element.iter("Series"))] or elements


def _device_texts(root: Element, series: Element) -> Iterator[str]:
    """The texts of elements that are called after a device or its maker: of `series` first, then of all."""
    for part in (series, root):
        for element in part.iter():
            if _DEVICE_TAG.search(str(element.tag)) and (text := (element.text or "").strip()):
                yield text


def _named_picture(image: Element) -> str:
    """The file name of a B-scan's picture, from ExamURL or whatever else ImageData calls it; "" for none."""
    texts = [image.findtext("ImageData/ExamURL", ""), *(part.text or "" for part in image.iterfind("ImageData/*"))]
    names = [re.split(r"[\\/]", text.strip())[-1] for text in texts]
    return next((name for name in names if name.lower().endswith(IMAGE_SUFFIXES)), "")


def pictures_in(export: bytes) -> list[str]:
    """The file names of pictures in the bytes of an export, whole or not. The XML is not parsed."""
    if export.startswith((b"\xff\xfe", b"\xfe\xff")):
        export = export.decode("utf-16", "ignore").encode()
    ends = ((suffix.start(), suffix[0]) for suffix in islice(_PICTURE_SUFFIX.finditer(export), _MAX_PICTURES))
    names = [re.split(rb"[\\/<>\"\r\n]", export[max(0, end - 255) : end])[-1] + suffix for end, suffix in ends]
    try:
        return [name.decode("utf-8") for name in names]
    except UnicodeDecodeError:
        return [name.decode("cp1252", "replace") for name in names]


def _picture_files(folder: Path, scans: list[Element], images: list[Element]) -> tuple[list[Path], tuple[str, ...]]:
    """(the picture of each B-scan of `images`, notes); `scans`: all of the XML, whose pictures share a folder.

    Raises VolumeRejected frames_missing.
    """
    named = [_named_picture(image) for image in images]
    by_name = {path.name.lower(): path for path in sorted(folder.iterdir(), reverse=True) if path.is_file()}
    exact = {path.name: path for path in by_name.values()}
    found = [exact.get(name) or by_name.get(name.lower()) for name in named]
    there = [path is not None for path in found]
    if all(there):
        return [path for path in found if path is not None], ()
    missing = there.index(False) + 1
    if any(there):
        raise rejection("frames_missing", f"the picture of B-scan {missing} of {len(images)} is not next to the XML")
    every = [image for series in scans for image in _images(series)]
    size = {(_number(image, f"{_CONTEXT}/Width"), _number(image, f"{_CONTEXT}/Height")) for image in every}
    beside = (path for path in by_name.values() if path.suffix.lower() in IMAGE_SUFFIXES)
    pictures = [path for path in beside if len(size) != 1 or _picture_size(path) in size]
    pictures.sort(key=lambda path: natural_key(path.name))
    why = "none of the pictures that the XML names is next to it" if any(named) else "the XML names no pictures"
    if len(pictures) != len(every):
        raise rejection(
            "frames_missing",
            f"{why}, and there are {len(pictures)} of the B-scans' size for {len(every)} B-scans; put the pictures of "
            "this export, and no others, next to the XML",
        )
    first = next(index for index, image in enumerate(every) if image is images[0])
    return pictures[first : first + len(images)], ("pictures_by_order",)


def _are_hexadecimal(files: list[Path]) -> bool:
    """Whether all names are hexadecimal numbers, and not all of them decimal ones."""
    stems = [file.stem for file in files]
    return all(re.fullmatch(r"[0-9A-Fa-f]{4,8}", stem) for stem in stems) and not all(map(str.isdecimal, stems))


def _picture_size(path: Path) -> tuple[int, int] | None:
    """(width, height) of an image file from its header; None for what is not an image. Raises VolumeRejected."""
    from PIL import Image

    check_inside(path, path.parent)
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as picture:
            return picture.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _picture(file: Path, number: int) -> np.ndarray:
    """The B-scan's pixels [H, W]. Raises VolumeRejected frames_broken."""
    from PIL import Image

    check_inside(file, file.parent)
    try:
        with Image.open(file, formats=PICTURE_FORMATS) as picture:
            check_shape(1, picture.height, picture.width)
            return np.asarray(picture.convert("L"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise rejection("frames_broken", f"B-scan {number}: {error_origin(error)}") from None


def _pixels(files: list[Path]) -> np.ndarray:
    """[D, H, W]. Raises VolumeRejected: frames_broken, unsupported_pixels."""
    first = _picture(files[0], 1)
    check_shape(len(files), *first.shape)
    pixels = np.empty((len(files), *first.shape), np.uint8)
    for index, file in enumerate(files):
        picture = first if index == 0 else _picture(file, index + 1)
        if picture.shape != first.shape:
            raise rejection("unsupported_pixels", f"B-scan {index + 1} is of another size than the first")
        pixels[index] = picture
    return pixels


def _median_scale(images: list[Element], field: str) -> float | None:
    """The B-scans' scale in mm a pixel, or None."""
    values = np.array([_number(image, f"{_CONTEXT}/{field}") for image in images])
    values = values[np.isfinite(values) & (values > 0)]
    return float(np.median(values)) if len(values) else None


def _line_ends(images: list[Element], end: str) -> np.ndarray:
    """[D, 2] x and y of every line's `end` ("Start", "End") on the localizer, mm."""
    return np.array([[_number(image, f"{_CONTEXT}/{end}/Coord/{axis}") for axis in "XY"] for image in images])


def read_lines(path: Path, member: str = "") -> tuple[list[dict[str, np.ndarray]], int]:
    """(for each B-scan in the order of the XML the rows of its layer lines by name, number of columns).

    A line that is there and not drawn, and points that are not, are NaN; HEYEX writes 3e38. Raises VolumeRejected as
    `read_xml` does.
    """
    images = _images(_scans(_root(path))[int(member or 1) - 1])
    lines: list[dict[str, np.ndarray]] = []
    for number, image in enumerate(images, 1):
        stated = {}
        for line in image.iter("SegLine"):
            try:
                rows = np.array(line.findtext("Array", "").replace(",", ".").split(), np.float32)
            except ValueError:
                raise rejection("broken_header", f"a SegLine of B-scan {number} holds words, not rows") from None
            stated[line.findtext("Name", "").strip()] = np.where(np.abs(rows) < 1e6, rows, np.float32("nan"))
        lines.append(stated)
    width = _number(images[0], f"{_CONTEXT}/Width")
    lengths = [len(rows) for bscan in lines for rows in bscan.values()]
    return lines, int(width) if np.isfinite(width) else max(lengths, default=0)


def read_xml(path: Path, member: str = "") -> RawScan:
    """One scan of a HEYEX export; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: broken_header, truncated, not_structural_oct, too_few_frames, frames_missing, frames_broken,
    frames_unrelated, unsupported_pixels, size_implausible, path_escapes.
    """
    root = _root(path)
    scans = _scans(root)
    series = scans[int(member or 1) - 1]
    images = _images(series)
    if len(images) < 2:
        raise rejection("too_few_frames", "a line or circle scan: one B-scan, no volume")
    patient = next(iter(_around(root, "Patient", series)), None)
    person_id, number, last, first, sex = (
        "" if patient is None else patient.findtext(name, "").strip()
        for name in ("PatientID", "ID", "LastName", "FirstNames", "Sex")
    )
    person_name = f"{last} {first}".strip()
    birth_date = _date(patient, "Birthdate/Date")
    studies = _around(root, "Study", series)
    visit = next((date for study in studies if (date := _date(study, "StudyDate/Date"))), "")
    files, notes = _picture_files(path.parent, scans, images)
    pixels = _pixels(files)
    if "pictures_by_order" in notes:
        contradiction = contradicts_order(pixels)
        if not contradiction and _are_hexadecimal(files):
            contradiction = "nothing is certain: HEYEX counts in hexadecimal numbers, in no order"
        if contradiction:
            raise rejection(
                "frames_unrelated",
                "the pictures lack the names that the XML gives them, and in the order of the names that they have "
                f"{contradiction}; copy them again with their names",
            )
    eyes = {eye for image in images if (eye := image.findtext("Laterality", "").strip())}
    if len(eyes) > 1:
        notes = (*notes, "laterality_disagrees")
    return RawScan(
        format="heyex_xml",
        pixels=pixels,
        frame_geometry=line_geometry(_line_ends(images, "Start"), _line_ends(images, "End")),
        header=HeaderFields(
            person_id=person_id or (f"heyex-{number}" if number else ""),
            person_name=person_name,
            birth_date=birth_date,
            sex=sex,
            laterality=series.findtext("Laterality", "").strip(),
            frame_laterality=eyes.pop() if len(eyes) == 1 else "",
            manufacturer=MAKE,
            model=named_model(_device_texts(root, series), MAKE, "Spectralis"),
            visit=visit,
        ),
        spacing_mm=(None, _median_scale(images, "ScaleY"), _median_scale(images, "ScaleX")),
        notes=(*more_scans(member, len(scans)), *notes),
        personal=filled_fields(
            {"PatientName": person_name, "PatientBirthDate": birth_date, "StudyDate": visit, "PatientSex": sex}
        ),
    )
