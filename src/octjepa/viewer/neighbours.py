"""The nearest neighbours of an eye among the eyes of other people, by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from octjepa.embed.table import Embeddings, read_embeddings

NEAREST = 8  # that are listed


class Neighbours:
    """The volumes of an embedding table; a person's own volumes are never neighbours, and are listed apart."""

    def __init__(self, path: Path | None, ids: Collection[str] = ()) -> None:
        """`ids` are the volumes of the store that is shown. Raises UsageError: no such table."""
        self.table: Embeddings | None = None if path is None else read_embeddings(path)
        self._ids = set(ids)

    @cached_property
    def _unit(self) -> Float[np.ndarray, "volumes features"]:
        assert self.table is not None
        features = self.table.features("vector", self.table.pools[0])
        return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)

    def nearest(self, volume_id: str) -> dict[str, Any]:
        """{encoder, pool, people, own, others} of a volume.

        others: the `NEAREST` volumes of greatest cosine, each of another person, {id, eye, device, cosine, shown}; own:
        the same person's other volumes, with `nearer`, the number of other people who have a volume of greater cosine.
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

        def facts(position: int) -> dict[str, Any]:
            entry = frame.iloc[position]
            return {
                "id": names[position],
                "eye": str(entry["eye"]),
                "device": str(entry["device"]),
                "cosine": round(float(cosine[position]), 4),
                "shown": names[position] in self._ids,
            }

        own = [int(position) for position in order if people[position] == people[at] and position != at]
        return {
            "encoder": self.table.encoder,
            "pool": self.table.pools[0],
            "people": len(best),
            "eye": str(frame.iloc[at]["eye"]),
            "others": [facts(int(position)) for position in best[:NEAREST]],
            "own": [{**facts(position), "nearer": int((cosine[best] > cosine[position]).sum())} for position in own],
        }
