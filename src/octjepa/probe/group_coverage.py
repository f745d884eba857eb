"""Whole groups that fell out between the scans and the figures: a site, a device, a side of the split.

One arbitrary id pattern once lost two of three sites and nobody saw it: a sum over everybody hides such a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from octjepa.probe.labels import LabelTable, Target

GROUPS = ("clinical_site", "device")
LOST, ONE_SIDED = "lost_group", "one_sided_group"


def lost_groups(
    frame: pd.DataFrame, labels: LabelTable, target: Target, groups: Sequence[str] = GROUPS
) -> Iterator[tuple[str, str]]:
    """Faults (kind, text): groups without a labelled scan, sites without any scan, groups on one side of the split.

    `frame` are the scans or cases that the rows of `target` count.
    """
    for kind, text in _lost(frame, labels, target, groups):
        yield kind, f"{target.name}: {text}"


def _lost(frame: pd.DataFrame, labels: LabelTable, target: Target, groups: Sequence[str]) -> Iterator[tuple[str, str]]:
    used = np.concatenate(list(target.rows.values()))
    for column in groups:
        names = frame[column]
        kept = set(names.iloc[used])
        for name, count in sorted(Counter(names).items()):
            if name and name not in kept:
                yield LOST, f"{column} {name} is lost: none of its {count} scans or cases has a label and a split"
        sides = {split: set(names.iloc[target.rows[split]]) - {""} for split in ("train", "test")}
        for name in sorted(sides["test"] - sides["train"]):
            yield ONE_SIDED, f"{column} {name} is tested and has nothing to train on"
        for name in sorted(sides["train"] - sides["test"]):
            yield ONE_SIDED, f"{column} {name} is trained on and never tested: the figures do not speak of it"
    scanned = set(frame["person_id"])
    labelled = {person for person, _ in labels.values[target.name]}
    by_site = Counter(labels.sites.get(person, "") for person in labelled)
    here = Counter(labels.sites.get(person, "") for person in labelled & scanned)
    for site, count in sorted(by_site.items()):
        if site and not here[site]:
            yield LOST, f"site {site} is lost: none of its {count} people with a label has an embedded scan"
