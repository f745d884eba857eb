"""Measurements: depth of retinal surfaces, severity of disease, and the same eye on another scanner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from octjepa import keys
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.intervals import Scale
from octjepa.metrics.test_set_ledger import fingerprint

from .cohorts import Cohort
from .questions import open_eyes, open_people
from .readings import Projection, ridge_values
from .results import Finding, LeftOut, left_out_mean
from .settings import BOUNDARY_EYES, DRAWS, LABELLED_PEOPLE, MIN_POSITIVES
from .surface_head import FOLDS, LabelledEye, SurfaceHead, token_eye
from .tokens import TokenTable
from .truth import BOUNDARIES, boundary_depths

_SEVERITY = {
    "fluid_mm3": ("intraretinal_fluid_mm3", "subretinal_fluid_mm3"),
    "atrophy_mm2": ("atrophy_mm2",),
    "central_thickness_um": ("central_thickness_um",),
}
_MEASURES = {"r2": "r2", "mae": "mean_absolute_error"}


def surfaces(cohort: Cohort, table: TokenTable) -> Iterator[Finding | LeftOut]:
    """Mean absolute error in um of four surfaces, read by `SurfaceHead` from a few eyes.

    Left out where there are fewer eyes than are to be labelled: of fewer it would be another figure.
    """
    train, test = cohort.indices("train"), cohort.indices("test")
    counts = [count for count in BOUNDARY_EYES if len(train) >= count and len(test)]
    for count in sorted(set(BOUNDARY_EYES) - set(counts)):
        reason = f"there are {len(train)} training and {len(test)} test eyes; {count} are to be labelled"
        yield LeftOut("surfaces", "error_um", count, reason)
    if not counts:
        return
    depths = {int(volume): boundary_depths(cohort, int(volume)) for volume in (*train, *test)}
    project = projection_of(table, train)
    eyes = {volume: token_eye(table, volume, project(table.features[table.of(volume)])) for volume in depths}
    um = cohort.store.preprocessing.target_spacing_mm[1] * 1000
    people = cohort.people[test].tolist()
    draws = open_people(cohort, "surfaces", test, [fingerprint(table.features, "surfaces")]).draws
    columns = table.grid[0] * table.grid[2]
    for count in counts:
        errors = np.zeros((DRAWS, len(BOUNDARIES), len(test)))
        for draw in range(DRAWS):
            chosen = [int(one) for one in keys.generator("exam boundaries", count, draw).permutation(train)[:count]]
            head = SurfaceHead(
                [
                    LabelledEye(eyes[one], depths[one], np.full(columns, number % FOLDS))
                    for number, one in enumerate(chosen)
                ]
            )
            for number, volume in enumerate(map(int, test)):
                off = np.abs(head.depths(eyes[volume]) - depths[volume])
                errors[draw, :, number] = np.nanmean(off, axis=(1, 2)) * um
        of_eye = errors.mean(axis=0)  # [boundaries, test]
        for number, name in enumerate(BOUNDARIES):
            yield Finding("surfaces", f"error_um_{name}", count, mean_of_known(of_eye[number], draws, people, "error"))
        yield Finding("surfaces", "error_um", count, mean_of_known(of_eye.mean(axis=0), draws, people, "error"))


def projection_of(
    table: TokenTable, volumes: Iterable[int], limited: bool = False
) -> Callable[[Float[np.ndarray, "n dim"]], Float[np.ndarray, "n f"]]:
    """Principal components of the tokens of `volumes`, `limited` to their range there; nothing of tokens without
    features."""
    if not table.features.shape[1]:
        return lambda features: features.astype(np.float32)
    return Projection(np.concatenate([table.features[table.of(int(one))] for one in volumes]), limited=limited)


def severity(cohort: Cohort, x: Float[np.ndarray, "V f"]) -> Iterator[Finding | LeftOut]:
    """R2 and mean absolute error of what is measured in diseased eyes; left out where too few have it."""
    for count in LABELLED_PEOPLE[1:]:
        for kind, columns in _SEVERITY.items():
            values = np.sum([cohort.column(name) for name in columns], axis=0)
            diseased = np.asarray(cohort.lesions.any(axis=1) if kind == "central_thickness_um" else values > 0)
            train, test = (cohort.indices(split)[diseased[cohort.indices(split)]] for split in ("train", "test"))
            if len(train) < count or len(test) < MIN_POSITIVES:
                reason = (
                    f"{len(train)} training and {len(test)} test people have it; {count} are to be labelled and "
                    f"{MIN_POSITIVES} tested"
                )
                yield from (LeftOut("severity", f"{measure}_{kind}", count, reason) for measure in _MEASURES)
                continue
            truth, measured = np.where(diseased, values, np.nan), [fingerprint(x, f"ridge {count}")]
            opened, fits = open_eyes(cohort, "severity", {kind: truth}, "regression", measured), []
            for draw in range(DRAWS):
                chosen = keys.generator("exam severity", kind, draw).permutation(train)[:count]
                fits.append(ridge_values(x[chosen], values[chosen], x[test]))
            for measure, metric in _MEASURES.items():
                yield Finding("severity", f"{measure}_{kind}", count, opened.regression(kind, metric, fits))


def mean_of_known(values: Float[np.ndarray, " n"], draws: Draws, people: list[str], scale: Scale) -> Estimate:
    """The mean of what is known, with its resamples."""
    known = np.isfinite(values)
    return draws.estimate(
        lambda weights: values[known] @ weights / weights.sum(axis=0),
        [person for person, one in zip(people, known, strict=True) if one],
        scale,
        scale=scale,
    )


def same_eye(
    first: Cohort, x: Float[np.ndarray, "V f"], second: Cohort, y: Float[np.ndarray, "U f"]
) -> Iterator[Finding | LeftOut]:
    """The eye of the first visit that is nearest by cosine to each eye of the second, on another scanner.

    `x` and `y` are whitened on training people. Only people of the test split take part.
    """
    test = {str(first.people[volume]): volume for volume in first.indices("test")}
    pairs = [(test[str(person)], volume) for volume, person in enumerate(second.people) if str(person) in test]
    if len(pairs) < MIN_POSITIVES:
        reason = f"{len(pairs)} test people have come back; {MIN_POSITIVES} are needed"
        yield LeftOut("same_eye", "top_1", 0, reason)
        return
    ours, theirs = np.array(pairs).T
    draws = open_people(first, "same_eye", ours, [fingerprint(values, "cosine") for values in (x, y)]).draws
    a, b = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (x[ours], y[theirs]))
    similarity = b @ a.T  # [queries, gallery]
    rank = (similarity > np.diag(similarity)[:, None]).sum(axis=1) + 1
    people = first.people[ours].tolist()
    for name, values in {"top_1": (rank == 1).astype(float), "mean_reciprocal_rank": 1 / rank}.items():
        yield Finding("same_eye", name, 0, mean_of_known(values, draws, people, "share"))


def macro(
    findings: Iterable[Finding], task: str, figure: str, count: int | None, metrics: Sequence[str]
) -> Finding | LeftOut:
    """The mean over the questions `metrics`; left out where one of them has no figure among `findings`.

    Resamples are averaged one by one. Questions about the same people share their draws; kinds of decoys have people of
    their own, and where they are as many, resamples that draw alike by position, which moves an interval by 0.001.
    """
    known = {one.metric: one.estimate for one in findings}
    missing = [metric for metric in metrics if metric not in known]
    if missing:
        return left_out_mean(task, figure, count, missing)
    parts = [known[metric] for metric in metrics]
    samples = np.mean([one.samples for one in parts], axis=0)
    n = sum(one.n for one in parts)
    value = float(np.mean([one.value for one in parts]))
    draws = {one.draws_id for one in parts}
    people = parts[0].n_people if len(draws) == 1 else sum(one.n_people for one in parts)
    merged = Estimate(value, samples, n, people, figure, draws.pop() if len(draws) == 1 else "", parts[0].scale)
    return Finding(task, figure, count, merged)
