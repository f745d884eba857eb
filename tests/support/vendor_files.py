"""Small proprietary scans, built by the layouts that eyepy, oct-converter and Bioptigen's own script read.

No vendor publishes a writer; what these files share with real ones is what those readers know of the formats.
"""

from __future__ import annotations

import re
import struct
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BORN, VISIT = datetime(1950, 2, 3), datetime(2020, 5, 6)
PATTERN_VOLUME, PATTERN_CIRCLE, PATTERN_STAR = 3, 2, 5


# Heidelberg


def lines(frames: int, pitch_mm: float = 0.12, wide_mm: float = 6.0) -> list[tuple[float, float, float, float]]:
    """Start and end (x, y) of a raster's lines, the lowest first, as HEYEX stores them."""
    return [(1.0, 8.0 - index * pitch_mm, 1.0 + wide_mm, 8.0 - index * pitch_mm) for index in range(frames)]


def vol_bytes(raw: np.ndarray, positions: list[tuple[float, ...]], **header: Any) -> bytes:
    """A .vol by eyepy's layout; `raw` [F, H, W] float32 linear intensities."""
    import construct
    from eyepy.io.he.vol_reader import vol_format

    # eyepy 0.21 encodes this one date as a float, which its own integer field refuses.
    exam_time = "exam_time" / construct.Int64ul
    layout = construct.Struct(*(exam_time if part.name == "exam_time" else part for part in vol_format.subcons))
    frames, rows, columns = raw.shape
    fields = {
        "version": "HSF-OCT-103",
        "size_x": columns,
        "n_bscans": frames,
        "size_y": rows,
        "scale_x": 0.0114,
        "distance": 0.12,
        "scale_y": 0.003872,
        "size_x_slo": 5,
        "size_y_slo": 4,
        "scale_x_slo": 0.01,
        "scale_y_slo": 0.01,
        "scan_position": "OS",
        "scan_pattern": PATTERN_VOLUME,
        "bscan_hdr_size": 256 + 8 * columns,
        "id": "1",
        "reference_id": "",
        "patient_id": "P-77",
        "dob": BORN.isoformat(),
        "visit_date": VISIT.isoformat(),
        "exam_time": 132_331_968_000_000_000,
        "grid_type": 0,
        "grid_offset": 0,
        "grid_type1": 0,
        "grid_offset1": 0,
        "prog_id": "",
        "localizer": np.zeros((4, 5), np.uint8),
    }
    bscans = [
        {
            "bscan_hdr_size": 256 + 8 * columns,
            "start_x": location[0],
            "start_y": location[1],
            "end_x": location[2],
            "end_y": location[3],
            "num_seg": 1,
            "quality": 30.0,
            "shift": 0,
            "iv_transformation": [0.0] * 6,
            "layer_segmentations": np.full((1, columns), 3.0, np.float32),
            "data": image.astype(np.float32),
        }
        for image, location in zip(raw, positions, strict=True)
    ]
    built: bytes = layout.build({**fields, **header, "bscans": bscans})
    return built


def strip_heyex_xml(path: Path) -> None:
    """Takes out of a HEYEX XML what anonymisers take out: the root around BODY, ImageType and ImageData."""
    text = path.read_text(encoding="utf-8").replace("<HEDX>", "").replace("</HEDX>", "")
    for element in ("ImageType", "ImageData"):
        text = re.sub(f"<{element}>.*?</{element}>", "", text)
    path.write_text(text, encoding="utf-8")


def write_heyex_xml(folder: Path, scans: list[np.ndarray], anonymised: bool = False) -> Path:
    """One Series of `scans` each [F, H, W]; names of images that sort wrongly as text; B-scans listed upwards."""
    folder.mkdir(parents=True, exist_ok=True)
    series = []
    for number, pixels in enumerate(scans):
        entries = [_localizer(folder)]
        for index, location in enumerate(lines(len(pixels))):
            name = f"scan{number}_{index}.png"
            Image.fromarray(pixels[index]).save(folder / name)
            entries.append(_xml_image(name, pixels.shape[1:], location))
        eye = "" if anonymised else f"<Laterality>{'RL'[number % 2]}</Laterality>"
        series.append(f"<Series><ID>{number}</ID>{eye}{''.join(entries)}</Series>")
    patient = (
        "<ID></ID><PatientID></PatientID><LastName></LastName><FirstNames></FirstNames><Birthdate/>"
        if anonymised
        else "<ID>12</ID><PatientID>P-77</PatientID><LastName>M&#252;ller</LastName><FirstNames>Ada</FirstNames>"
        "<Birthdate><Date><Year>1950</Year><Month>2</Month><Day>3</Day></Date></Birthdate><Sex>F</Sex>"
    )
    date = "" if anonymised else "<StudyDate><Date><Year>2020</Year><Month>5</Month><Day>6</Day></Date></StudyDate>"
    path = folder / "export.xml"
    path.write_text(
        f'<?xml version="1.0" encoding="UTF-8"?>\n<HEDX><BODY><SWVersion><Version>6</Version></SWVersion>'
        f"<Patient>{patient}<Study>{date}{''.join(series)}</Study></Patient></BODY></HEDX>\n",
        encoding="utf-8",
    )
    return path


def _localizer(folder: Path) -> str:
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(folder / "localizer.png")
    return _xml_image("localizer.png", (4, 5), (0, 0, 0, 0), "LOCALIZER", 0.0114)


def _xml_image(
    name: str, shape: tuple[int, ...], location: tuple[float, ...], kind: str = "OCT", row_mm: float = 0.003872
) -> str:
    x, y, end_x, end_y = location
    return (
        f"<Image><ImageType><Type>{kind}</Type></ImageType><OphthalmicAcquisitionContext>"
        f"<Width>{shape[1]}</Width><Height>{shape[0]}</Height><ScaleX>0.0114</ScaleX><ScaleY>{row_mm}</ScaleY>"
        f"<Angle>30</Angle><Focus>0</Focus><ImageQuality>30</ImageQuality>"
        f"<Start><Coord><X>{x}</X><Y>{y}</Y></Coord></Start><End><Coord><X>{end_x}</X><Y>{end_y}</Y></Coord></End>"
        f"</OphthalmicAcquisitionContext><ImageData><ExamURL>\\\\disk\\export\\{name}</ExamURL></ImageData></Image>"
    )


def e2e_codes(raw: np.ndarray) -> np.ndarray:
    """Linear intensities to .e2e's 16-bit floats (no sign, 6 bits of exponent, 10 of mantissa), rounded down."""
    exponent = np.floor(np.log2(raw)).astype(int)
    return ((exponent + 63) << 10 | ((raw / 2.0**exponent - 1) * 1024).astype(int)).astype(np.uint16)


def e2e_bytes(
    scans: list[np.ndarray],
    pattern: int = PATTERN_VOLUME,
    layers: bool = False,
    device: tuple[str, ...] = (),
    structure: str = "",
    setup: str = "",
) -> bytes:
    """An .e2e of one patient with a series for each of `scans` ([F, H, W], linear intensities in (0, 1]).

    device: the texts of the study's device record; setup: that of application and camera; structure: the examined one
    of every series. Without them there is no such record.
    """
    folders: list[tuple[tuple[int, int, int, int], int, int, bytes]] = []  # ids, ind, kind, content
    patient = struct.pack("<31s66sI1s25s", b"Ada", "M\u00fcller".encode("latin-1"), 19500203, b"F", b"P-77").ljust(
        131, b"\0"
    )
    folders.append(((3, -1, -1, -1), 0, 9, patient))
    if device:
        folders.append(((3, 7, -1, -1), 0, 9001, _texts(*device)))
    if setup:
        folders.append(((3, 7, -1, -1), 0, 13, setup.encode("utf-16-le")))
    for number, raw in enumerate(scans):
        series = 100 + number
        folders.append(((3, 7, series, -1), 0, 11, bytes(14) + b"RL"[number % 2 : number % 2 + 1] + bytes(12)))
        folders.append(((3, 7, series, -1), 0, 9006, _texts("OCT ART Volume")))
        if structure:
            folders.append(((3, 7, series, -1), 0, 9005, _texts(structure)))
        frames, rows, columns = raw.shape
        for index in range(frames):
            y = 10.0 - 0.5 * index
            taken = int((VISIT - datetime(1601, 1, 1)).total_seconds() * 1e7)
            meta = struct.pack("<3I4fI3fI", 0, rows, columns, -10.0, y, 10.0, y, 0, 0.0, 0.003872, 0.0, 0)
            meta += struct.pack("<2f5I2fIQ", 0.0, 0.0, 0, columns, frames, index, pattern, 0.0, y, 0, taken)
            meta = meta.ljust(428, b"\0")
            image = struct.pack("<5I", rows * columns * 2, 35652097, rows * columns, rows, columns)
            folders.append(((3, 7, series, 2 * index), 1, 10004, meta))
            folders.append(((3, 7, series, 2 * index), 1, 1073741824, image + e2e_codes(raw[index]).tobytes()))
            if layers:
                content = struct.pack("<5I", 0, 1, 0, columns, 0) + np.full(columns, 3.0, "<f4").tobytes()
                folders.append(((3, 7, series, 2 * index), 1, 10019, content))
    version = struct.pack("<12sI20s", b"CMDb", 0x64, bytes(20))
    directory_at = 36 + 52
    data_at = directory_at + 52 + (len(folders) + 1) * 44
    entries, data = b"", b""
    for ids, ind, kind, content in folders:
        start = data_at + len(data)
        entries += struct.pack("<4I4iHHII", 0, start, len(content), 0, *ids, ind, 0, kind, 0)
        data += struct.pack("<12s5I4iHHII", b"MDbData", 0, 0, start, len(content), 0, *ids, ind, 0, kind, 0) + content
    entries += bytes(12) + struct.pack("<I4iHHII", 0, -1, -1, -1, -1, 0, 0, 0, 0)  # HEYEX fills up with empty entries
    top = struct.pack("<12sI20s4I", b"MDbMDir", 0x64, bytes(20), 512, directory_at, directory_at, 0)
    head = struct.pack("<12sI20s4I", b"MDbDir", 0x64, bytes(20), len(folders) + 1, directory_at, 0, 0)
    return version + top + head + entries + data


def _texts(*texts: str) -> bytes:
    return struct.pack("<2I", len(texts), 256) + b"".join(text.encode("utf-16-le").ljust(256, b"\0") for text in texts)


# Topcon


def _chunk(name: str, content: bytes) -> bytes:
    return bytes([len(name)]) + name.encode() + struct.pack("<I", len(content)) + content


def topcon_bytes(images: bytes, name: str, kind: str = "FDA", **extra: bytes) -> bytes:
    """A Topcon file with patient, capture, scan and hardware chunks; `images` is the content of chunk `name`."""
    patient = struct.pack("<32s32s32s8sB3H", b"P-77", b"Ada", b"Lovelace", b"", 2, 1950, 2, 3).ljust(615, b"\0")
    capture = struct.pack("<BBI100s6H", 1, 2, 1, b"", 2020, 5, 6, 10, 11, 12)
    scan = struct.pack("<3I3d", 0, 0, 0, 6.0, 1.0, 2.6).ljust(54, b"\0")
    hardware = struct.pack("<16s16s48s20s", b"3DOCT-1Maestro2", b"S123", b"", bytes(20))
    chunks = {
        "@PATIENT_INFO_02": patient,
        "@CAPTURE_INFO_02": capture,
        "@PARAM_SCAN_04": scan,
        "@HW_INFO_03": hardware,
        name: images,
    }
    chunks |= {f"@{key}": content for key, content in extra.items()}
    head = struct.pack("<4s3s2I", b"FOCT", kind.encode(), 2, 1000)
    return head + b"".join(_chunk(*entry) for entry in chunks.items()) + b"\0"


def topcon_jpegs(pixels: np.ndarray, mode: int = 2) -> bytes:
    """IMG_JPEG: every B-scan as lossless JPEG 2000."""
    frames, depth, columns = pixels.shape
    content = struct.pack("<B6I", mode, 0, 0, columns, depth, frames, 0)
    for image in pixels:
        buffer = BytesIO()
        Image.fromarray(image).save(buffer, "JPEG2000", irreversible=False)
        content += struct.pack("<i", buffer.tell()) + buffer.getvalue()
    return content


def topcon_deep(values: np.ndarray, mode: int = 2) -> bytes:
    """IMG_MOT_COMP_03 and IMG_SCAN_03: 16-bit values, the columns fastest."""
    frames, depth, columns = values.shape
    head = struct.pack("<B4IBI", mode, columns, depth, 16, frames, 0, values.size * 2)
    return head + values.astype("<u2").tobytes()


# Bioptigen, Optovue, Zeiss


def bioptigen_bytes(values: np.ndarray, volumes: int = 1, scan_type: int = 1) -> bytes:
    """`values` [T * F, H, W] uint16, `volumes` T."""
    total, depth, columns = values.shape

    def keyed(key: str, value: int | float | bytes) -> bytes:
        kind = {int: "<I", float: "<d"}.get(type(value))
        content = struct.pack(kind, value) if kind else value
        return struct.pack("<I", len(key)) + key.encode() + struct.pack("<I", len(content)) + content

    def entries(values: dict[str, int | float | bytes]) -> bytes:
        return b"".join(keyed(key, value) for key, value in values.items())

    content = struct.pack("<IH", 0x1234, 0x104)
    content += entries(
        {
            "FRAMEHEADER": b"",
            "FRAMECOUNT": total,
            "LINECOUNT": columns,
            "LINELENGTH": depth,
            "SAMPLEFORMAT": 16,
            "DESCRIPTION": b"none",
            "XMIN": 0.0,
            "XMAX": 6.0,
            "XCAPTION": b"mm",
            "YMIN": 0.0,
            "YMAX": 6.0,
            "YCAPTION": b"mm",
            "SCANTYPE": scan_type,
            "SCANDEPTH": 0.003 * depth,
            "SCANLENGTH": 6.0,
            "AZSCANLENGTH": 0.01 * columns,
            "ELSCANLENGTH": 0.1 * (total // volumes),
            "OBJECTDISTANCE": 0.0,
            "SCANANGLE": 0.0,
            "SCANS": total // volumes,
            "FRAMES": volumes,
            "DOPPLERFLAG": 0,
            "CONFIG": bytes(3),
        }
    )
    content += bytes(4)
    for image in values:
        date = struct.pack("<8H", 2020, 5, 3, 6, 10, 11, 12, 0)
        content += entries({"FRAMEDATA": b"", "FRAMEDATETIME": date, "FRAMETIMESTAMP": 0.0, "FRAMELINES": columns})
        content += keyed("FRAMESAMPLES", image.T.astype("<u2").tobytes()) + bytes(4)
    return content


def write_optovue(path: Path, scans: list[np.ndarray]) -> Path:
    """`scans` [F, H, W] float32 each: the values, and the text file next to them."""
    text = ["Eye Scanned = OS", "Physical video width = 8 mm", "Video Width = 640"]
    content = b""
    for values in scans:
        frames, rows, columns = values.shape
        text += [f"Window Height = {rows}", f"Scan Length = {columns}", f"Scan Usage = {frames}"]
        content += values[:, ::-1].transpose(0, 2, 1).astype("<f4").tobytes()
    path.write_bytes(content)
    path.with_suffix(".txt").write_text("\n".join(text), encoding="latin-1")
    return path


def zeiss_bytes(pixels: np.ndarray) -> bytes:
    return np.ascontiguousarray(pixels[:, ::-1, ::-1]).tobytes()
