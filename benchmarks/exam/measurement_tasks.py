"""Tasks 4 to 6: depth of retinal surfaces, severity of disease, and the same eye on another scanner."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Int

from octjepa import keys
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.intervals import Scale
from octjepa.metrics.scores import Predictions, measure
from octjepa.tasks.segment.linear import Ridge, with_intercept

from .cohorts import Cohort
from .readings import Projection, interleave, ridge_values
from .results import Finding
from .settings import BOUNDARY_EYES, DRAWS, LABELLED_PEOPLE, RESAMPLES
from .tokens import TokenTable
from .truth import BOUNDARIES, COLUMNS, boundary_depths

_PENALTY = 1e-2  # of the ridge head of boundaries, the same for every row
_SEVERITY = {
    "fluid_mm3": ("intraretinal_fluid_mm3", "subretinal_fluid_mm3"),
    "atrophy_mm2": ("atrophy_mm2",),
    "central_thickness_um": ("central_thickness_um",),
}


def surfaces(cohort: Cohort, table: TokenTable) -> Iterator[Finding]:
    """Task 4: mean absolute error in um of four surfaces, by a linear head from each token to its own patch.

    The head predicts which share of each A-scan of the patch lies above a surface. Shares added up over depth are the
    surface's depth; a position without a token counts as above it where it lies above the tissue, else as below.
    """
    train, test = cohort.indices("train"), cohort.indices("test")
    depths = {int(volume): boundary_depths(cohort, int(volume)) for volume in (*train, *test)}
    sample = np.concatenate([np.arange(table.of(volume).start, table.of(volume).stop) for volume in train])
    project = Projection(table.features[sample])
    features = {
        int(volume): interleave([project(table.features[table.of(volume)]), depth_features(table, volume)])
        for volume in (*train, *test)
    }
    um = cohort.store.preprocessing.target_spacing_mm[1] * 1000
    people = cohort.people[test].tolist()
    draws = Draws(people, RESAMPLES, 0)
    for count in BOUNDARY_EYES:
        errors = np.zeros((DRAWS, len(BOUNDARIES), len(test)))
        for draw in range(DRAWS):
            chosen = keys.generator("exam boundaries", count, draw).permutation(train)[:count]
            head = _fit_shares(table, features, depths, chosen)
            for number, volume in enumerate(test):
                found = depths_from_shares(table, int(volume), features[int(volume)], head)
                errors[draw, :, number] = np.nanmean(np.abs(found - depths[int(volume)]), axis=(1, 2)) * um
        of_eye = errors.mean(axis=0)  # [boundaries, test]
        for number, name in enumerate(BOUNDARIES):
            yield Finding("surfaces", f"error_um_{name}", count, mean_of_known(of_eye[number], draws, people, "error"))
        yield Finding("surfaces", "error_um", count, mean_of_known(of_eye.mean(axis=0), draws, people, "error"))


def depth_features(table: TokenTable, volume: int) -> Float[np.ndarray, "k 2"]:
    """Depth of each token of a volume, from -1 to 1, and its square."""
    depth = np.unravel_index(table.index[table.of(volume)], table.grid)[1]
    at = (2 * depth + 1) / table.grid[1] - 1
    return np.stack([at, at**2], axis=1).astype(np.float32)


def _fit_shares(
    table: TokenTable,
    features: dict[int, Float[np.ndarray, "k f"]],
    depths: dict[int, Float[np.ndarray, "boundaries D C"]],
    volumes: Int[np.ndarray, " n"],
) -> Float[np.ndarray, "features outputs"]:
    parts = [share_samples(table, int(one), features[int(one)], depths[int(one)])[:2] for one in volumes]
    head = Ridge(parts[0][0].shape[1], parts[0][1].shape[1])
    for x, shares in parts:
        head.add(x, shares)
    return head.weights(_PENALTY)


def share_samples(
    table: TokenTable, volume: int, features: Float[np.ndarray, "k f"], depths: Float[np.ndarray, "boundaries D C"]
) -> tuple[Float[np.ndarray, "n f"], Float[np.ndarray, "n outputs"], Bool[np.ndarray, " k"]]:
    """(features, share of each A-scan above each surface) of the patches where surfaces are known; which."""
    p, q, r = table.patch
    columns = r // COLUMNS
    i, j, k = np.unravel_index(table.index[table.of(volume)], table.grid)
    d, c = depths.shape[1] // p, depths.shape[2] // columns
    tiles = depths.reshape(len(depths), d, p, c, columns)[:, i, :, k, :]  # [k, boundaries, p, columns]
    share = np.clip((tiles - (j * q)[:, None, None, None]) / q, 0, 1)
    known = np.asarray(~np.isnan(share).any(axis=(1, 2, 3)))
    return features[known], share[known].reshape(int(known.sum()), -1), known


def depths_from_shares(
    table: TokenTable, volume: int, features: Float[np.ndarray, "k f"], head: np.ndarray
) -> Float[np.ndarray, "boundaries D C"]:
    """Depth index of each surface in every A-scan of a volume, from the shares that `head` gives its tokens."""
    (d, h, w), (p, q, r) = table.grid, table.patch
    columns, index = r // COLUMNS, table.index[table.of(volume)]
    share = np.clip(with_intercept(features) @ head, 0, 1).reshape(len(index), -1, p, columns)
    present = np.zeros((d, h, w), bool)
    present.reshape(-1)[index] = True
    middle = np.where(present.any(axis=1), _mean_depth(present), h / 2)  # [d, w]
    above = np.arange(h)[None, :, None] < middle[:, None, :]
    surfaces = share.shape[1]
    full = np.broadcast_to(above[..., None, None, None], (d, h, w, surfaces, p, columns)).astype(np.float32)
    full = full.copy()
    full.reshape(d * h * w, surfaces, p, columns)[index] = share
    total = full.sum(axis=1) * q  # [d, w, surfaces, p, columns]
    return np.asarray(total.transpose(2, 0, 3, 1, 4).reshape(surfaces, d * p, w * columns))


def _mean_depth(present: np.ndarray) -> np.ndarray:
    depth = np.arange(present.shape[1])[None, :, None]
    return (present * depth).sum(axis=1) / np.maximum(present.sum(axis=1), 1)


def severity(cohort: Cohort, x: Float[np.ndarray, "V f"]) -> Iterator[Finding]:
    """Task 5: R2 and mean absolute error of what is measured in diseased eyes."""
    for count in LABELLED_PEOPLE[1:]:
        for kind, columns in _SEVERITY.items():
            values = np.sum([cohort.column(name) for name in columns], axis=0)
            diseased = np.asarray(cohort.lesions.any(axis=1) if kind == "central_thickness_um" else values > 0)
            train, test = (cohort.indices(split)[diseased[cohort.indices(split)]] for split in ("train", "test"))
            if len(train) < count:
                continue
            fits = []
            for draw in range(DRAWS):
                chosen = keys.generator("exam severity", kind, draw).permutation(train)[:count]
                fits.append(ridge_values(x[chosen], values[chosen], x[test]))
            draws = Draws(cohort.people[test].tolist(), RESAMPLES, 0)
            people = cohort.people[test].tolist()
            predictions = [Predictions(values[test], fit[:, None], fit[:, None]) for fit in fits]
            r2 = draws.estimate(partial(_mean_r2, predictions), people, kind, scale="below_one")
            yield Finding("severity", f"r2_{kind}", count, r2)
            error = np.mean([np.abs(fit - values[test]) for fit in fits], axis=0)
            yield Finding("severity", f"mae_{kind}", count, mean_of_known(error, draws, people, "error"))


def _mean_r2(predictions: list[Predictions], weights: Float[np.ndarray, "n r"]) -> Float[np.ndarray, " r"]:
    return np.asarray(np.mean([measure("r2", one, weights) for one in predictions], axis=0))


def mean_of_known(values: Float[np.ndarray, " n"], draws: Draws, people: list[str], scale: Scale) -> Estimate:
    """The mean of what is known, with its resamples."""
    known = np.isfinite(values)
    return draws.estimate(
        lambda weights: values[known] @ weights / weights.sum(axis=0),
        [person for person, one in zip(people, known, strict=True) if one], scale, scale=scale,
    )  # fmt: skip


def same_eye(
    first: Cohort, x: Float[np.ndarray, "V f"], second: Cohort, y: Float[np.ndarray, "U f"]
) -> Iterator[Finding]:
    """Task 6: the eye of the first visit that is nearest by cosine to each eye of the second, on another scanner.

    `x` and `y` are whitened on training people. Only people of the test split take part.
    """
    test = {str(first.people[volume]): volume for volume in first.indices("test")}
    pairs = [(test[str(person)], volume) for volume, person in enumerate(second.people) if str(person) in test]
    ours, theirs = np.array(pairs).T
    a, b = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (x[ours], y[theirs]))
    similarity = b @ a.T  # [queries, gallery]
    rank = (similarity > np.diag(similarity)[:, None]).sum(axis=1) + 1
    people = first.people[ours].tolist()
    draws = Draws(people, RESAMPLES, 0)
    for name, values in {"top_1": (rank == 1).astype(float), "mean_reciprocal_rank": 1 / rank}.items():
        yield Finding("same_eye", name, 0, mean_of_known(values, draws, people, "share"))


def macro(findings: list[Finding], task: str, figure: str, count: int | None) -> Finding | None:
    """The mean over several questions; None where there is none.

    Resamples are averaged one by one. Questions about the same people share their draws; kinds of decoys have people of
    their own, and where they are as many, resamples that draw alike by position, which moves an interval by 0.001.
    """
    parts = [one.estimate for one in findings]
    if not parts:
        return None
    samples = np.mean([one.samples for one in parts], axis=0)
    n = sum(one.n for one in parts)
    value = float(np.mean([one.value for one in parts]))
    draws = {one.draws_id for one in parts}
    people = parts[0].n_people if len(draws) == 1 else sum(one.n_people for one in parts)
    merged = Estimate(value, samples, n, people, figure, draws.pop() if len(draws) == 1 else "", parts[0].scale)
    return Finding(task, figure, count, merged)
