"""Public OCT data sets: their layout, split, labels, terms and known defects as data, and a check of a local copy."""

from __future__ import annotations
