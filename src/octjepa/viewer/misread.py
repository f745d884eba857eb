"""Misread people: the test cases of a finished probe or fine-tuning, the most confident mistakes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from octjepa.errors import UsageError
from octjepa.parsing import read_parquet
from octjepa.record import Record

if TYPE_CHECKING:
    import pandas as pd

MOST = 100  # cases of a target
_COLUMNS = ["level", "target", "split", "eye", "volume_id", "truth", "predicted", "classes", "scores"]


@dataclass(frozen=True)
class MisreadCase(Record):
    """A test case to look at. `shown`: the store that is shown has its volume, `person` is the number of its person.

    `score` is the score of the predicted class; of a quantity the error.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"true": "truth"}
    id: str
    person: int
    eye: str
    truth: str
    predicted: str
    score: float
    shown: bool


@dataclass(frozen=True)
class MisreadCases(Record):
    """Of one target: whether it has classes, its test cases, its misread cases, and at most `MOST` of those."""

    ALIASES: ClassVar[Mapping[str, str]] = {"classes": "has_classes"}
    has_classes: bool
    cases: int
    misread: int
    volumes: list[MisreadCase]


class CasePredictions:
    """The predictions.parquet of `octjepa finetune`, or the file of `octjepa probe --predictions`."""

    def __init__(self, path: Path | None, people: Mapping[str, int] | None = None) -> None:
        """`people`: volume id -> number of the person in the store that is shown. Raises UsageError: a bad file."""
        self._frame = None if path is None else _read(path)
        self._people = people or {}

    @property
    def targets(self) -> list[str]:
        """The targets that have test predictions, in the order of the file."""
        return [] if self._frame is None else list(dict.fromkeys(self._frame["target"]))

    def misread(self, target: str) -> MisreadCases:
        """The misread test cases of `target`, the most confident mistakes first.

        Of classes the cases with another prediction, by the score of the predicted class; of a quantity all cases, by
        the size of the error. Raises KeyError: no such target.
        """
        if self._frame is None or target not in self.targets:
            raise KeyError(target)
        rows = self._frame[self._frame["target"] == target]
        has_classes = bool(len(rows["classes"].iloc[0]))
        cases = []
        for row in rows.to_dict("records"):
            if has_classes:
                if row["truth"] == row["predicted"]:
                    continue
                score = float(row["scores"][list(row["classes"]).index(row["predicted"])])
            else:
                score = float(row["predicted"]) - float(row["truth"])
            truth, predicted = (
                str(row[column]) if has_classes else f"{float(row[column]):.3g}" for column in ("truth", "predicted")
            )
            name = str(row["volume_id"])
            person, is_shown = self._people.get(name, 0), name in self._people
            cases.append(MisreadCase(name, person, str(row["eye"]), truth, predicted, round(score, 3), is_shown))
        cases.sort(key=lambda case: -abs(case.score))
        return MisreadCases(has_classes, len(rows), len(cases), cases[:MOST])


def _read(path: Path) -> pd.DataFrame:
    """The test cases with a truth, of volumes where the file has several levels."""
    try:
        frame = read_parquet(path, columns=_COLUMNS)
    except (OSError, ValueError) as error:
        raise UsageError(f"no table of predictions at {path} ({str(error).splitlines()[0]})") from None
    frame = frame[(frame["split"] == "test") & (frame["truth"] != "") & (frame["volume_id"] != "")]
    volumes = frame[frame["level"] == "volume"]
    return volumes if len(volumes) else frame
