"""Codes of notes about a volume that several packages read."""

from __future__ import annotations

HALVES_NOTE = "halves"  # the volume is stored with `half_difference`
SPARSE_NOTE = "sparse_slices"  # with the number of stored slices that have a B-scan near
