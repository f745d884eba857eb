"""The catalogue of public data sets: typed facts from `catalogue.yaml`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from octjepa.errors import UsageError
from octjepa.yaml_text import parse_yaml


class Anchor(BaseModel):
    """A published result that a run of octjepa can be compared with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    value: float
    setting: str
    source: str


class ExpectedFiles(BaseModel):
    """A kind of files of a data set.

    `pattern` is matched against the path below the folder, in lower case, with "/". Its groups `split`, `label`,
    `device`, `eye` and `person` are counted; `part` is what a person's number is unique in. `members` are arrays in
    each file, `columns` name columns of a table; `scans` marks the files that `octjepa ingest` reads, with `--images`
    if they are single B-scans. With `one_scan_per_folder` the files of a folder are the B-scans of one volume.
    `people` names two columns of a table, the file of each scan (without suffix) and its person. `count` is the
    documented number of files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    pattern: str
    example: str
    count: int | None = None
    needed: bool = True
    members: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    scans: bool = False
    one_scan_per_folder: bool = False
    people: tuple[str, str] | None = None

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, text: str) -> str:
        re.compile(text)
        return text


class DataSet(BaseModel):
    """One public data set. Texts are for people; "" and "not stated" say that the documentation is silent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    page: str
    content: Literal["volumes", "B-scans"]
    device: str
    spacing: str
    people: str
    split: str
    labels: str
    terms: str
    defects: tuple[str, ...]
    anchors: tuple[Anchor, ...]
    not_confirmed: str
    guide: str = ""
    files: tuple[ExpectedFiles, ...]


@cache
def catalogue() -> tuple[DataSet, ...]:
    """All data sets, in the order of the file."""
    text = Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    return tuple(DataSet.model_validate(entry) for entry in parse_yaml(text))


def find_data_set(name: str) -> DataSet:
    """The data set called `name`. Raises UsageError: there is none."""
    for data_set in catalogue():
        if data_set.name == name.strip().lower().replace("-", "_"):
            return data_set
    raise UsageError(f"no data set {name!r}: choose one of {', '.join(entry.name for entry in catalogue())}")
