"""What is wrong with the material or the figures, for the top of the page: nobody reads a figure before its fault."""

from __future__ import annotations

from collections import Counter

from octjepa.metrics.findings import FAULT_KINDS as FAULT_KINDS
from octjepa.report.cohort import Cohort
from octjepa.report.gather import Contents
from octjepa.store import Store


def faults(contents: Contents, cohort: Cohort | None) -> list[dict[str, str]]:
    """{kind, what} of the store, of the embeddings, and of what the probe named; counts alone, nobody's name."""
    found: list[dict[str, str]] = []
    for where, count in (
        ("store", 0 if cohort is None else cohort.people_in_two_splits),
        ("embeddings", 0 if contents.embeddings is None else contents.embeddings.two_sides),
    ):
        if count:
            what = f"people in more than one split of the {where}: {count}. What is measured on test people is too good"
            found.append(_fault("leaked_person", f"{what}, and probes refuse it"))
    if contents.embeddings is not None and contents.embeddings.leaked:
        found.append(
            _fault(
                "leaked_person",
                f"people of val or test whose eyes the encoder was pretrained on: {contents.embeddings.leaked}. Probes "
                "refuse these embeddings",
            )
        )
    if contents.store is not None:
        found += [_fault("lost_group", text) for text in _lost_sites(contents.store)]
    return found + (contents.probe.faults if contents.probe is not None else [])


def _lost_sites(store: Store) -> list[str]:
    """Clinical sites of the participants' table of which nobody has a volume."""
    people = store.participants
    if "clinical_site" not in people:
        return []
    known = people[people["clinical_site"].astype(str).str.strip() != ""].dropna(subset=["clinical_site"])
    here = set(known.loc[known["person_id"].isin(store.table["person_id"]), "clinical_site"])
    counts = Counter(str(site) for site in known["clinical_site"] if site not in here)
    return [
        f"clinical site {site} is lost: none of its {count} people in participants.tsv has a volume in the store"
        for site, count in sorted(counts.items())
    ]


def _fault(kind: str, what: str) -> dict[str, str]:
    return {"kind": kind, "what": what}
