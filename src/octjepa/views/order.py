"""The volume at each position of the training stream: a function of (seed, position), without any state.

An epoch is as many draws as there are volumes. Without domains, epoch `e` is a keyed shuffle that shows every volume
once. With domains, each has a fixed number of draws an epoch (`quotas`), and walks through its own volumes in keyed
shuffles, one after the other: no volume is drawn again before all of its domain were drawn once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from octjepa import keys

_REPLACEMENT_EPOCHS = 1_000_000  # more epochs than any training has


def quotas(counts: Mapping[str, int], power: float) -> dict[str, int]:
    """Draws of each domain in an epoch of sum(counts) draws: in proportion to count**power, one at least.

    power 0 gives every domain the same (within one draw), 1 as many as it has volumes. What rounding leaves goes to
    the largest remainders, ties by name.
    """
    total = sum(counts.values())
    weights = {name: count**power for name, count in counts.items()}
    free = total - len(counts)  # each has one already
    exact = {name: max(0.0, total * weight / sum(weights.values()) - 1) for name, weight in weights.items()}
    scale = free / sum(exact.values()) if free else 0.0
    exact = {name: value * scale for name, value in exact.items()}
    draws = {name: int(value + 1e-9) for name, value in exact.items()}
    by_remainder = sorted(counts, key=lambda name: (round(draws[name] - exact[name], 9), name))
    for name in by_remainder[: free - sum(draws.values())]:
        draws[name] += 1
    return {name: 1 + draws[name] for name in sorted(counts)}


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    return keys.generator(seed, "order", epoch).permutation(count)


@lru_cache(maxsize=256)
def _domain_order(seed: int, domain: str, visit: int, count: int) -> np.ndarray:
    return keys.generator(seed, "domain order", domain, visit).permutation(count)


class VolumeOrder:
    """The endless order of `volume_ids`; `domains` maps each id to its domain, None puts all into one.

    `draws_per_epoch` maps a domain to its draws in an epoch.
    """

    def __init__(
        self, volume_ids: Sequence[str], seed: int, domains: Mapping[str, str] | None = None, power: float = 0.0
    ) -> None:
        self._seed, self._count = seed, len(volume_ids)
        self._members: dict[str, list[str]] = {}
        for volume_id in volume_ids:
            self._members.setdefault(domains[volume_id] if domains else "all", []).append(volume_id)
        self.draws_per_epoch = quotas({name: len(ids) for name, ids in self._members.items()}, power)
        self._names = list(self.draws_per_epoch)
        self._ends = np.cumsum(list(self.draws_per_epoch.values()))

    def volume_at(self, position: int, replaced: int = 0) -> tuple[int, str]:
        """(visit, volume id): `visit` counts how often this volume came before, which is the epoch without domains.

        replaced: volumes of this position that cannot be used. The next one has the same place in an epoch that no
        training reaches, so no other position has this visit of this volume.
        """
        epoch, slot = divmod(position, self._count)
        epoch += replaced * _REPLACEMENT_EPOCHS
        rank = int(_epoch_order(self._seed, epoch, self._count)[slot])
        if len(self._names) == 1:
            return epoch, self._members[self._names[0]][rank]
        domain = int(np.searchsorted(self._ends, rank, side="right"))
        name = self._names[domain]
        members, quota = self._members[name], self.draws_per_epoch[name]
        draw = epoch * quota + rank - (int(self._ends[domain]) - quota)
        visit, member = divmod(draw, len(members))
        return visit, members[_domain_order(self._seed, name, visit, len(members))[member]]
