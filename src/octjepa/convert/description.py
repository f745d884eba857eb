"""The content of the JSON file of a converted scan: all facts about the scan that its format cannot hold.

`octjepa.read.formats.sidecar` reads these keys. No key holds
personal data: a store would hold the same person id, and texts that repeat a name or a birth date were
dropped when the scan was read.
"""

from __future__ import annotations

from importlib.metadata import version

from octjepa.convert.arrays import AXES_OF_ARRAYS
from octjepa.ingest.refused_scan import RefusedScan, WithoutResult
from octjepa.read.orientation import has_slice_direction
from octjepa.volume import AXES, OCTVolume

NOT_PRESERVED = "not_preserved"  # the reason of a scan that the format cannot hold


class NotPreserved(WithoutResult):
    """The format cannot hold the scan without a loss."""

    def refusal(self, scan: str) -> RefusedScan:
        to_do = "choose another format with --to, or another folder with --out if the path of this one names an eye"
        return RefusedScan(scan, NOT_PRESERVED, str(self), to_do)


def describe(volume: OCTVolume) -> dict[str, object]:
    """The content of the JSON file. It is the same for every format, because files of several formats share it."""
    texts = {
        "person_id": volume.person_id if "person_unknown" not in volume.notes else "",
        "laterality": volume.laterality or "",
        "device": volume.device if volume.device != "unknown" else "",
        "protocol": volume.protocol,
        "region": volume.region,
        "site": volume.site,
        "visit": volume.visit,
        "pattern": volume.pattern,
        "axes": AXES_OF_ARRAYS,
    }
    stated: dict[str, object] = {key: text for key, text in texts.items() if text}
    if volume.labels:
        stated["labels"] = dict(volume.labels)
    return {
        **stated,
        "spacing_mm": list(volume.spacing_mm),
        "uncertain": list(volume.uncertain),
        "converted": {
            "by": f"octjepa {version('octjepa')}",
            "from_format": volume.format,
            "pixels_sha256": volume.content_hash,
            "spacing_from": {axis: volume.provenance[axis] for axis in AXES},
            "slice_direction_known": has_slice_direction(volume),
            "slice_positions_mm": None
            if volume.slice_positions_mm is None
            else [round(float(mm), 6) for mm in volume.slice_positions_mm],
            "notes": list(volume.notes),
        },
    }
