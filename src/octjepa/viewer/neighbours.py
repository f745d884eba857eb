"""The nearest neighbours of an eye among the eyes of other people, by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from octjepa.embed.table import Embeddings, read_embeddings
from octjepa.record import Record

NEAREST = 8  # that are listed


@dataclass(frozen=True)
class Neighbour(Record):
    """A volume and its cosine with the requested volume. `shown`: the store that is shown has it.

    `person` is the number of its person in that store; 0 of a volume that is not shown.

    `nearer` is the number of other people who have a volume of greater cosine; only of the same person's volumes.
    """

    OMITTED: ClassVar[tuple[str, ...]] = ("nearer",)
    id: str
    person: int
    eye: str
    device: str
    cosine: float
    shown: bool
    nearer: int | None = None


@dataclass(frozen=True)
class NearestVolumes(Record):
    """The neighbours of a volume of eye `eye`: `others` of the other `people`, and those of the same person."""

    ALIASES: ClassVar[Mapping[str, str]] = {"own": "same_person"}
    encoder: str
    pool: str
    people: int
    eye: str
    others: list[Neighbour]
    same_person: list[Neighbour]


class Neighbours:
    """The volumes of an embedding table; a person's own volumes are never neighbours, and are listed apart."""

    def __init__(self, path: Path | None, people: Mapping[str, int] | None = None) -> None:
        """`people`: volume id -> number of the person, of the store that is shown. Raises UsageError: no such table."""
        self.table: Embeddings | None = None if path is None else read_embeddings(path)
        self._people = people or {}

    @cached_property
    def _unit(self) -> Float[np.ndarray, "volumes features"]:
        assert self.table is not None
        features = self.table.features("vector", self.table.pools[0])
        return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)

    def nearest(self, volume_id: str) -> NearestVolumes:
        """The `NEAREST` volumes of greatest cosine, each of another person, and the same person's other volumes.

        Raises KeyError: the table is not there or lacks the volume.
        """
        if self.table is None:
            raise KeyError(volume_id)
        frame = self.table.frame
        names, people = frame["volume_id"].to_numpy(dtype=str), frame["person_id"].to_numpy(dtype=str)
        (at,) = np.flatnonzero(names == volume_id)[:1].tolist() or [-1]
        if at < 0:
            raise KeyError(volume_id)
        cosine = self._unit @ self._unit[at]
        order = np.argsort(-cosine, kind="stable")
        _, first = np.unique(people[order], return_index=True)  # the nearest volume of each person
        best = order[np.sort(first)]
        best = best[people[best] != people[at]]

        def neighbour(position: int) -> Neighbour:
            entry, name = frame.iloc[position], str(names[position])
            rounded = round(float(cosine[position]), 4)
            person, is_shown = self._people.get(name, 0), name in self._people
            return Neighbour(name, person, str(entry["eye"]), str(entry["device"]), rounded, is_shown)

        same_person = [int(position) for position in order if people[position] == people[at] and position != at]
        return NearestVolumes(
            encoder=self.table.encoder,
            pool=self.table.pools[0],
            people=len(best),
            eye=str(frame.iloc[at]["eye"]),
            others=[neighbour(int(position)) for position in best[:NEAREST]],
            same_person=[
                replace(neighbour(position), nearer=int((cosine[best] > cosine[position]).sum()))
                for position in same_person
            ],
        )
