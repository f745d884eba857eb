"""Records and their one JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest

from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing
from octjepa.record import Record, plain, to_json


@dataclass(frozen=True)
class Axis(Record):
    ALIASES: ClassVar[Mapping[str, str]] = {"from": "provenance"}
    name: str
    provenance: str
    extent_mm: float


@dataclass(frozen=True)
class Scan(Record):
    OMITTED: ClassVar[tuple[str, ...]] = ("note",)
    axes: list[Axis]
    shape: tuple[int, int]
    by_name: dict[str, Axis]
    preprocessing: Preprocessing
    note: str | None = None


AXIS = Axis("slice", "header", 6.0)
SCAN = Scan([AXIS], (2, 3), {"first": AXIS}, Preprocessing(image_size=(16, 64, 64)))


def test_an_alias_alone_names_the_key_and_leaves_the_others() -> None:
    assert AXIS.to_json() == {"name": "slice", "from": "header", "extent_mm": 6.0}
    assert Axis.from_json(AXIS.to_json()) == AXIS


def test_nested_records_and_recipes_come_back_and_none_is_left_out() -> None:
    data = SCAN.to_json()
    assert data["shape"] == [2, 3]
    assert data["preprocessing"]["image_size"] == [16, 64, 64]
    assert "note" not in data
    assert Scan.from_json(data) == SCAN
    assert plain({"scans": (SCAN,)}) == {"scans": to_json([SCAN])}


def test_a_record_without_a_field_is_refused() -> None:
    with pytest.raises(UsageError, match="lacks provenance"):
        Axis.from_json({"name": "slice", "extent_mm": 6.0})
