"""What one scan raises becomes an entry of the refused scans, and other errors are raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from octjepa.errors import VolumeRejected
from octjepa.ingest.refused_scan import RefusedScan, collect_refusals
from octjepa.ingest.results_record import OutputExists


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (VolumeRejected("blank", "40 of 41 B-scans are constant"), "blank"),
        (OutputExists(Path("out"), "holds eye.png"), "output_exists"),
        (MemoryError(), "size_implausible"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "size_implausible"),
    ],
)
def test_the_next_scan_is_read_after_a_refused_one(error: Exception, reason: str) -> None:
    refused: list[RefusedScan] = []
    for scan in ("a", "b"):
        with collect_refusals(refused, lambda scan=scan: scan):  # type: ignore[misc]
            if scan == "a":
                raise error
    assert [(entry.scan, entry.reason) for entry in refused] == [("a", reason)]
    assert refused[0].to_do


def test_a_fault_of_octjepa_is_raised() -> None:
    refused: list[RefusedScan] = []
    with pytest.raises(RuntimeError, match="shapes"), collect_refusals(refused, str):
        raise RuntimeError("shapes do not match")
    assert not refused
