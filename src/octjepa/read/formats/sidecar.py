"""A JSON file next to a scan that gives what its format cannot: spacing, person, eye, device, labels.

    {"spacing_mm": [0.047, 0.0026, 0.0117], "laterality": "OD", "person_id": "P017", "device": "Topcon Maestro2"}

Next to a file: `scan.json` for `scan.npy`. Next to or in a folder of images: `<folder>.json`, in it `spacing.json` or
`geometry.json`. Other keys are counted and ignored: exports put files of such names there as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from octjepa.parsing import parse_json
from octjepa.read.formats.axes import axes_word
from octjepa.read.links import check_beside
from octjepa.read.raw_scan import RawScan
from octjepa.reasons import rejection
from octjepa.volume import Pattern

_LIMIT_BYTES = 1 << 20


class Sidecar(BaseModel):
    """Every key may be absent. `spacing_mm` is (slice, depth, column); `visit` any text that is the same within one.

    `axes` is the order in which an array is stored, "slice,depth,column" or another. `uncertain` names the axes whose
    spacing may be wrong. `converted` is what `octjepa convert` states of the source; it is not used.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    spacing_mm: tuple[float, float, float] | None = None
    laterality: str = ""
    person_id: str = ""
    device: str = ""
    protocol: str = ""
    region: str = ""
    site: str = ""
    visit: str = ""
    pattern: Pattern | None = None
    axes: str = ""
    labels: Mapping[str, float | str] = {}
    uncertain: tuple[Literal["slice", "depth", "column"], ...] = ()
    converted: Mapping[str, object] = {}


def sidecar_path(path: Path) -> Path | None:
    """The JSON file of a scan, or None. Of several, the one nearest to the images."""
    if path.is_dir():
        names = (path / "spacing.json", path / "geometry.json", path / f"{path.name}.json")
        candidates: tuple[Path, ...] = (*names, path.parent / f"{path.name}.json")
    else:
        stem = path.name[: -len(".nii.gz")] if path.name.lower().endswith(".nii.gz") else path.stem
        candidates = (path.parent / f"{stem}.json",)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def with_sidecar(scan: RawScan, path: Path) -> RawScan:
    """`scan` with the values of its JSON file, which take precedence.

    Raises VolumeRejected: broken_header, path_escapes.
    """
    json_path = sidecar_path(path)
    if json_path is None:
        return scan
    check_beside(json_path, path)
    try:
        with json_path.open("rb") as file:
            content = parse_json(file.read(_LIMIT_BYTES))
        sidecar = Sidecar.model_validate(content)
    except ValidationError as error:
        wrong = sorted({str(fault["loc"][0]) if fault["loc"] else "no object" for fault in error.errors()})
        expected = "expected spacing_mm as three numbers (slice, depth, column in mm), labels as an object, else texts"
        raise rejection("broken_header", f"its JSON file: {', '.join(wrong)} of a wrong type; {expected}") from None
    except (OSError, ValueError):
        raise rejection("broken_header", "its JSON file cannot be read as JSON") from None
    stated = axes_word(sidecar.axes)
    if sidecar.axes and not stated:
        raise rejection("broken_header", "`axes` in its JSON file is not an order of slice, depth and column")
    if not set(content) & set(Sidecar.model_fields):
        return scan
    texts = sidecar.model_dump(include={"laterality", "person_id", "protocol", "region", "site", "visit"})
    texts["model"] = sidecar.device
    notes = scan.notes
    if others := len(set(content) - set(Sidecar.model_fields)):
        notes = (*notes, f"sidecar_keys_left={others}")
    if sidecar.spacing_mm is not None:
        notes = (*notes, "spacing_from_sidecar")
    return replace(
        scan,
        header=replace(scan.header, **{key: text for key, text in texts.items() if text}),
        spacing_mm=sidecar.spacing_mm or scan.spacing_mm,
        spacing_from="sidecar" if sidecar.spacing_mm else scan.spacing_from,
        pattern=sidecar.pattern or scan.pattern,
        uncertain=sidecar.uncertain if sidecar.spacing_mm else scan.uncertain,
        labels={**scan.labels, **sidecar.labels},
        axes=replace(scan.axes, stated=stated) if scan.axes and stated else scan.axes,
        notes=notes,
    )
