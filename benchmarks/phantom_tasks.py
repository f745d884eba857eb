"""Look-alikes and surfaces in phantoms, by frozen features: tasks of the exam on fewer people.

`python -m benchmarks.phantom_tasks --work WORK --keep KEEP --out benchmarks/records/phantom_tasks.json` measures what
is missing in the folder KEEP, one row after the other, and writes all of it to a record. Rows that only the record has
stay. Rows, folders and differences are those of `benchmarks.phantom_tokens`, cohorts and truth those of
`benchmarks.exam`. The exam has 1,000 test people; this is what an hour of one core allows.

- `look_alikes`: a lesion against its look-alike of nearly equal intensity (`benchmarks.exam.decoys`). Of each of four
  kinds 40 people to learn from, 30 of them labelled, and 40 test people; AUROC of whole eyes and its mean.
- `surfaces`: depth of four surfaces in scans that were not flattened, from 30 of 40 labelled eyes; mean absolute error
  in um in 60 test eyes. `outline` is which patches hold tissue, which the readout knows of every row. Tokens are those
  of `benchmarks.surface_tokens`. `segmenter` is the segmentation network's own boundaries, without a readout.

Each value is the mean over draws of the labelled eyes. Its 95 % interval resamples test eyes and draws. Every row has
the same resamples, so differences between rows are paired.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.exam.cohorts import UNFLATTENED, Cohort, make_cohorts
from benchmarks.exam.decoys import DECOYS
from benchmarks.exam.measured import REFERENCE
from benchmarks.exam.measurement_tasks import projection_of
from benchmarks.exam.readings import choose_strength, draw_labelled, logistic_scores
from benchmarks.exam.results import EYES
from benchmarks.exam.surface_head import FOLDS, LabelledEye, SurfaceHead, TokenEye, token_eye
from benchmarks.exam.tokens import Featurise, TokenTable
from benchmarks.exam.truth import BOUNDARIES, OF_EIGHT, boundary_depths
from benchmarks.phantom_tokens import (
    DRAWS,
    LABELLED,
    RESAMPLES,
    RetainedRows,
    Samples,
    auroc,
    merged,
    packaged_rows,
    pooled_eyes,
    resampled,
    small_exam,
    value_of,
    values_and_differences,
)
from benchmarks.surface_tokens import Tokens, fine_unet, surface_tokens, tokens_of
from jaxtyping import Bool, Float, Int

from octjepa import keys
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.files import write_json
from octjepa.recipe import Recipe

DECOY_PEOPLE = 40  # to learn from, and as many to test
SURFACE_EYES = 60  # to test
WITHOUT_LOOK_ALIKES = ("position",)


def volume_tokens(featurise: Featurise, cohort: Cohort, indices: Int[np.ndarray, " n"]) -> list[TokenFeatures]:
    """The tokens of some volumes of a cohort, one volume after the other."""
    return [featurise([cohort.store.read(cohort.ids[index])])[0] for index in indices]


# --- tasks


def read_look_alikes(featurise: Featurise, cohorts: Mapping[str, Cohort], draws: int) -> Samples:
    """AUROC of each kind of look-alike, and their mean."""
    samples: Samples = {}
    for name, cohort in cohorts.items():
        train, test = cohort.indices("train"), cohort.indices("test")
        x = pooled_eyes(volume_tokens(featurise, cohort, np.concatenate([train, test])), EYES, len(train))
        member = cohort.column("decoy_member") == 1
        samples[name] = look_alike_samples(x, member[train], member[test], name, draws)
    return {**samples, "mean": np.mean(list(samples.values()), axis=0)}


def look_alike_samples(
    x: Float[np.ndarray, "n f"], train: Bool[np.ndarray, " k"], test: Bool[np.ndarray, " m"], name: str, draws: int
) -> Float[np.ndarray, " r"]:
    """AUROC of one kind; the first eyes of `x` are those to learn from. The penalty is chosen on the first draw."""
    scores: list[np.ndarray] = []
    strength = None
    for draw in range(draws):
        eyes = draw_labelled(np.arange(len(train)), train, LABELLED, "look-alikes", name, draw)
        if eyes is None:
            raise ValueError(f"{name}: fewer than {LABELLED} eyes to label, or too few of one kind")
        strength = strength or choose_strength(x[eyes], train[eyes])
        scores.append(logistic_scores(x[eyes], train[eyes], x[len(train) :], strength))
    return resampled([test] * draws, scores, auroc)


def read_surfaces(tokens: Tokens, cohort: Cohort, draws: int) -> Samples:
    """Mean absolute error in um of each surface, and their mean."""
    train, test = cohort.indices("train"), cohort.indices("test")[:SURFACE_EYES]
    order = np.concatenate([train, test])
    table = _table(volume_tokens(tokens.featurise, cohort, order), tokens.recipe)
    project = projection_of(table, range(len(train)), limited=True)
    eyes = [token_eye(table, number, project(table.features[table.of(number)])) for number in range(len(order))]
    depths = [boundary_depths(cohort, int(index)) for index in order]
    um = cohort.store.preprocessing.target_spacing_mm[1] * 1000
    return _samples([_surface_errors(eyes, depths, len(train), draw) * um for draw in range(draws)])


def read_own_surfaces(tokens: Tokens, cohort: Cohort, draws: int) -> Samples:
    """As `read_surfaces`, of the segmentation network's own boundaries, which need no labels."""
    um = cohort.store.preprocessing.target_spacing_mm[1] * 1000
    errors = []
    for index in cohort.indices("test")[:SURFACE_EYES]:
        (eye,) = volume_tokens(tokens.featurise, cohort, np.array([index]))
        found = own_depths(eye, tokens.recipe)
        errors.append(np.nanmean(np.abs(found - boundary_depths(cohort, int(index))), axis=(1, 2)))
    return _samples([np.stack(errors) * um] * draws)


def own_depths(eye: TokenFeatures, recipe: Recipe) -> Float[np.ndarray, "4 D W"]:
    """Depths in voxels of four boundaries, in each column of tokens, from the features of `DenseEncoder`.

    The last eight features of a token are its distances from boundaries, in tokens. Those of the nearest token count:
    farther distances are limited. NaN where a column has no token.
    """
    (d, h, w), height = recipe.grid, recipe.tokens.patch_size[1]
    distance = np.full((d, h, w, len(BOUNDARIES)), np.nan)
    distance.reshape(d * h * w, -1)[eye.grid_index] = eye.features[:, -8:][:, OF_EIGHT]
    rows = (np.arange(h) + 0.5)[None, :, None, None]
    nearest = np.where(np.isnan(distance), np.inf, np.abs(distance)).argmin(axis=1)[:, None]
    depths = np.take_along_axis((rows - distance) * height - 0.5, nearest, axis=1)
    return depths[:, 0].transpose(2, 0, 1)


def _samples(errors: Sequence[Float[np.ndarray, "test boundaries"]]) -> Samples:
    """Resamples of the error of each surface, and their mean; an array of errors for each draw of labelled eyes."""
    samples = {
        name: resampled([one[:, number] for one in errors], [one[:, number] for one in errors], _mean)
        for number, name in enumerate(BOUNDARIES)
    }
    return {**samples, "mean": np.mean(list(samples.values()), axis=0)}


def _mean(values: np.ndarray, _: np.ndarray) -> float:
    return float(np.nanmean(values))


def _table(tokens: Sequence[TokenFeatures], recipe: Recipe) -> TokenTable:
    counts = [len(one.grid_index) for one in tokens]
    return TokenTable(
        np.concatenate([one.features for one in tokens]).astype(np.float32),
        np.concatenate([one.grid_index for one in tokens]),
        np.cumsum([0, *counts]),
        recipe.grid,
        recipe.tokens.patch_size,
    )


def _surface_errors(
    eyes: Sequence[TokenEye], depths: Sequence[np.ndarray], train: int, draw: int
) -> Float[np.ndarray, "test boundaries"]:
    """Error in voxels of every test eye, from the eyes that are labelled in a draw."""
    chosen = keys.generator("phantom surfaces", draw).permutation(train)[:LABELLED]
    columns = eyes[0].at.shape[0] * eyes[0].at.shape[2]
    head = SurfaceHead(
        [LabelledEye(eyes[one], depths[one], np.full(columns, number % FOLDS)) for number, one in enumerate(chosen)]
    )
    found = [np.nanmean(np.abs(head.depths(eyes[k]) - depths[k]), axis=(1, 2)) for k in range(train, len(eyes))]
    return np.stack(found)


# --- rows and record


def rows_of(task: str, packaged: PretrainedEncoder) -> dict[str, Callable[[], Any]]:
    """The makers of the rows of a task: `Tokens` for surfaces, else a `Featurise`."""
    if task == "surfaces":
        return {**surface_tokens(packaged), REFERENCE: lambda: tokens_of(fine_unet(packaged))}
    return {name: make for name, make in packaged_rows(packaged).items() if name not in WITHOUT_LOOK_ALIKES}


def reader(task: str, work: Path) -> Callable[[str, Any, int], Samples]:
    """What reads a row of a task, by its name; its cohorts are made in `work` where they are absent."""
    if task == "surfaces":
        folder = make_cohorts(work, small_exam(), ("main", UNFLATTENED), workers=1)
        tilted = Cohort.open(folder, UNFLATTENED)
        return lambda name, tokens, draws: (read_own_surfaces if name == REFERENCE else read_surfaces)(
            tokens, tilted, draws
        )
    few = replace(small_exam(), decoy_train=DECOY_PEOPLE, decoy_val=0, decoy_test=DECOY_PEOPLE)
    folder = make_cohorts(work, few, tuple(DECOYS), workers=1)
    cohorts = {name: Cohort.open(folder, name) for name in DECOYS}
    return lambda _name, featurise, draws: read_look_alikes(featurise, cohorts, draws)


TASKS = ("surfaces", "look_alikes")


def record(retained: RetainedRows, draws: int, earlier: Mapping[str, Any] | None = None) -> dict[str, object]:
    """Everything in `retained`: of each task the values of every row and the differences.

    Rows and differences of the record `earlier` stay as in `benchmarks.phantom_tokens`.
    """
    out: dict[str, object] = {
        "command": "python -m benchmarks.phantom_tasks --work WORK --keep KEEP --out RECORD",
        "draws": draws,
        "labelled_eyes": LABELLED,
        "resamples": RESAMPLES,
    }
    for task in TASKS:
        rows, before = retained.rows(task, "whole", draws), (earlier or {}).get(task, {})
        if rows or before:
            out[task] = merged(before, values_and_differences(rows))
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is missing and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the cohorts")
    parser.add_argument("--keep", type=Path, required=True, help="folder that keeps the samples of every row")
    parser.add_argument("--out", type=Path, help="the record; default: print it")
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws of the labelled eyes")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    options = parser.parse_args(arguments)
    packaged = load_encoder("phantom-tiny")
    retained = RetainedRows(options.keep)
    for task in options.tasks:
        missing = {
            name: make
            for name, make in rows_of(task, packaged).items()
            if not options.only or name in options.only
            if not retained.file(task, name, "whole", options.draws).is_file()
        }
        read = reader(task, options.work) if missing else None
        for name, make in missing.items():
            assert read is not None
            samples = read(name, make(), options.draws)
            retained.write(retained.file(task, name, "whole", options.draws), samples)
            print(f"{task} {name}: { {key: value_of(values) for key, values in samples.items()} }", flush=True)
    earlier = json.loads(options.out.read_text(encoding="utf-8")) if options.out and options.out.is_file() else None
    found = record(retained, options.draws, earlier)
    if options.out is None:
        print(json.dumps(found, indent=1))
    else:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
