"""The results that stand large at the top of the page, each as a figure and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octjepa.report import segmentation, tuning, wording
from octjepa.report.cohort import Cohort
from octjepa.report.gather import Contents, TuningContents


def findings(contents: Contents, cohort: Cohort | None, paired: Mapping[str, Any] | None) -> list[wording.Finding]:
    """Files read, then what was trained against what knows less. `paired`: trained minus untrained, of a probe."""
    found = [] if cohort is None else [_volumes(cohort)]
    if contents.kind in ("run", "demo"):
        run = contents.run
        pretext = wording.pretext(run.validations[-1] if run and run.validations else None)
        found += [pretext, wording.paired(paired)]
    if contents.tuning is not None:
        found.append(_tuning(contents.tuning))
    if contents.segmentation is not None:
        minus = {name: segmentation.minus(contents.segmentation, name) for name in ("place_prior", "untrained")}
        found += [wording.head_over_prior(minus["place_prior"]), wording.head_over_untrained(minus["untrained"])]
    return found


def _tuning(tuned: TuningContents) -> wording.Finding:
    from octjepa.metrics.intervals import LOWER_IS_BETTER

    first = next(iter(tuning.against_frozen(tuned.paired)), None)
    return wording.tuned(first, first is not None and first["metric"] in LOWER_IS_BETTER)


def _volumes(cohort: Cohort) -> wording.Finding:
    read, found, lost = cohort.volumes, cohort.files, cohort.refused
    told = f"{read} of {found} files were read and accepted"
    told += f"; {lost} were refused, each with its reason below. " if lost else "; none was refused. "
    if cohort.uncertain:
        told += f"In {cohort.uncertain} of them a spacing is uncertain, and marked so. "
    leaks = cohort.people_in_two_splits
    told += f"{leaks} people are in more than one split." if leaks else "No person is in two splits."
    return wording.Finding("Files read", f"{read} of {found}", "bad" if leaks else "good", told)
