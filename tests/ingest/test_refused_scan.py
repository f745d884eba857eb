"""What one scan raises becomes an entry of the refused scans, and other errors are raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from octjepa.errors import VolumeRejected
from octjepa.ingest.refused_scan import RefusedScan, collect_refusals
from octjepa.ingest.results_record import OutputExists
from octjepa.ingest.search import LINK_OUT
from octjepa.ingest.source_file import how_to_expand
from octjepa.reasons import REASONS


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


@pytest.mark.parametrize(
    ("reason", "detail", "is_complete"),
    [
        ("unknown_format", "its first bytes and its suffix are those of no format", False),
        (
            "unknown_format",
            "a picture: if it is a B-scan, name only pictures and add --images to `octjepa ingest`",
            True,
        ),
        ("archive_not_expanded", how_to_expand("a.zip"), True),
        ("archive_not_expanded", how_to_expand("a.7z"), True),
        ("path_escapes", LINK_OUT, True),
        ("truncated", "the copy ends after 20 bytes", False),
    ],
)
def test_the_advice_of_a_reason_is_left_out_if_the_detail_holds_advice(
    reason: str, detail: str, is_complete: bool
) -> None:
    refusal = RefusedScan.of("a", reason, detail)
    assert refusal.to_do == ("" if is_complete else REASONS[reason].action)
    assert refusal.text == f"a: {reason}: {detail}" + ("" if is_complete else f"; {REASONS[reason].action}")


def test_a_fault_of_octjepa_is_raised() -> None:
    refused: list[RefusedScan] = []
    with pytest.raises(RuntimeError, match="shapes"), collect_refusals(refused, str):
        raise RuntimeError("shapes do not match")
    assert not refused
