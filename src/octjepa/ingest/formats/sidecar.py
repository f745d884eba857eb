"""A JSON file beside a scan that says what its format cannot: spacing, person, eye, device, labels.

    {"spacing_mm": [0.047, 0.0026, 0.0117], "laterality": "OD", "person_id": "P017", "device": "Topcon Maestro2"}

Beside a file: `scan.json` for `scan.npy`. Beside or in a folder of images: `<folder>.json`, in it `spacing.json` or
`geometry.json`. Other keys are counted and left alone: exports put files of such names there, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from octjepa.ingest.raw_scan import RawScan
from octjepa.ingest.reasons import rejection
from octjepa.volume import Pattern

_LIMIT_BYTES = 1 << 20


class Sidecar(BaseModel):
    """Every key may be absent. `spacing_mm` is (slice, depth, column); `visit` any text that is the same within one."""

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
    labels: Mapping[str, float | str] = {}


def sidecar_path(path: Path) -> Path | None:
    """The JSON file of a scan, or None. Of several, the one nearest to the images."""
    if path.is_dir():
        names = (path / "spacing.json", path / "geometry.json", path / f"{path.name}.json")
        places: tuple[Path, ...] = (*names, path.parent / f"{path.name}.json")
    else:
        stem = path.name[: -len(".nii.gz")] if path.name.lower().endswith(".nii.gz") else path.stem
        places = (path.parent / f"{stem}.json",)
    return next((place for place in places if place.is_file()), None)


def with_sidecar(scan: RawScan, path: Path) -> RawScan:
    """`scan` with what its JSON file says, before what the format says. Raises VolumeRejected broken_header."""
    found = sidecar_path(path)
    if found is None:
        return scan
    try:
        with found.open("rb") as file:
            content = json.loads(file.read(_LIMIT_BYTES))
        said = Sidecar.model_validate(content)
    except ValidationError as error:
        wrong = sorted({str(fault["loc"][0]) if fault["loc"] else "no object" for fault in error.errors()})
        expected = "expected spacing_mm as three numbers (slice, depth, column in mm), labels as an object, else texts"
        raise rejection("broken_header", f"its JSON file: {', '.join(wrong)} of a wrong type; {expected}") from None
    except (OSError, ValueError, RecursionError):
        raise rejection("broken_header", "its JSON file cannot be read as JSON") from None
    words: dict[str, Any] = {
        "laterality": said.laterality, "person_id": said.person_id, "model": said.device, "protocol": said.protocol,
        "region": said.region, "site": said.site, "visit": said.visit,
    }  # fmt: skip
    notes = scan.notes
    if not any(key in Sidecar.model_fields for key in content):
        return scan
    if others := len(set(content) - set(Sidecar.model_fields)):
        notes = (*notes, f"sidecar_keys_left={others}")
    if said.spacing_mm is not None:
        notes = (*notes, "spacing_from_sidecar")
    return replace(
        scan,
        header=replace(scan.header, **{key: text for key, text in words.items() if text}),
        spacing_mm=said.spacing_mm or scan.spacing_mm,
        spacing_from="sidecar" if said.spacing_mm else scan.spacing_from,
        pattern=said.pattern or scan.pattern,
        labels={**scan.labels, **said.labels},
        notes=notes,
    )
