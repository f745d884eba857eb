"""Frozen features and lesions in phantoms, on two cohorts: a small one of the exam's kind, and `shifted`.

`python -m benchmarks.phantom_tokens --work WORK --keep KEEP --out benchmarks/records/phantom_tokens.json
[NAME=ENCODER ...]` measures what is missing in the folder KEEP, one row after the other, and writes all of it to a
record, in which other rows stay. Rows are the packaged encoders, the networks of both architectures with random weights
(`random_unet`, `random_init`), hand-made features, and on `exam` the segmentation network on native B-scans
(`segmenter`). The files in KEEP hold samples of one version of the weights: take another folder for other weights.

`exam` is the cohort `main` of the exam with 40 training and 150 test people and a seed of its own. `shifted` has
contrast of every layer, reflectivity of fluid, looks and resolution redrawn for each eye
(`octjepa.phantom.random_scene.SHIFTED`). Its seeds are used nowhere else; its ranges overlap those of the objective
`truth` and of the segmentation network and are those of the validation of `truth`, so it favours these encoders.

`--fresh` draws both cohorts with other seeds: eyes that nobody had seen when the encoders and the readout were chosen.

Four readings:

- `linear`, average precision by token: a token is positive when a lesion fills at least 8 % of it. A logistic
  regression on 128 principal components of the features, with the token's position, learns from 30 eyes.
- `mlp`: the same with a network of one hidden layer.
- `eyes`: whole eyes by the default pooling, AUROC of each lesion that an eye has in at least one token, learned from
  all training eyes.
- `measures`, on `exam` only: R2 of the area of atrophy, the volume of fluid and the central thickness by whole eyes.
  Each draw labels 30 of the eyes that have it and tests the others. No feature leaves its range in the training eyes.

Each value is the mean over draws of the labelled eyes. Its 95 % interval resamples test eyes and draws; that of `eyes`,
which has no draws, resamples test eyes. Every row has the same resamples, so differences between rows are paired.
`with_drusen` is the mean over all lesions of a cohort, `without_drusen` leaves drusen out, because they hide in a mean.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.exam.cohorts import Cohort, make_cohorts
from benchmarks.exam.measured import OWN_RANDOM, REFERENCE
from benchmarks.exam.readings import Projection, draw_labelled, interleave, logistic_scores, ridge_values
from benchmarks.exam.results import CENTERED
from benchmarks.exam.settings import EXAM, TOKEN_SHARE, Settings
from benchmarks.exam.tokens import (
    Featurise,
    of_context,
    of_encoder,
    of_intensity,
    of_position,
    patches_of,
    positions_in_view,
)
from benchmarks.exam.truth import lesion_shares
from benchmarks.segmenter_features import patch_features, selected_features
from jaxtyping import Bool, Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import average_precision_score, roc_auc_score

from octjepa import keys
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.locate import open_encoder
from octjepa.encoders.pooling import DEFAULT_POOL, TokenFeatures, pool_tokens
from octjepa.files import write_json
from octjepa.phantom import LESIONS
from octjepa.phantom.random_scene import SHIFTED
from octjepa.read.reader import read_volume
from octjepa.tasks.segmenter.inference import load_segmenter, with_calibration
from octjepa.tasks.truth.volumes import LAYERS, draw_volume
from octjepa.volume import CanonicalVolume

LABELLED = 30
DRAWS = 15
SEED = 9777  # of the small exam
BASELINES = ("context", "intensity", "position", "outline")
_STRENGTH = 1e-2
RESAMPLES = 200
_SHIFTED_SEED = 910_001  # no seed of training or validation
FRESH_SEEDS = 77_001, 977_001  # of both cohorts, for eyes with which nothing was decided
_SHIFTED_LESIONS = ("intraretinal_fluid", "subretinal_fluid", "drusen")


@dataclass(frozen=True, eq=False)
class PhantomCohort:
    """Volumes, the share of each lesion in every token of a volume's grid, and how many volumes are for training."""

    name: str
    lesions: tuple[str, ...]
    volumes: list[CanonicalVolume]
    shares: Callable[[int, Int[np.ndarray, " k"]], Float[np.ndarray, "k lesions"]]
    train: int
    native: Cohort | None = None  # whose scans the segmentation network reads; `shifted` has none


@dataclass(frozen=True)
class Value:
    """Mean over draws of labelled eyes, and its 95 % interval."""

    value: float
    low: float
    high: float


def small_exam(test: int = 150, seed: int = SEED) -> Settings:
    """The exam with fewer people."""
    return replace(EXAM, train=40, val=10, test=test, seed=seed)


def exam_cohort(work: Path, encoder: PretrainedEncoder, test: int = 150, seed: int = SEED) -> PhantomCohort:
    """A small cohort of the exam's kind, made once in `work`."""
    settings = small_exam(test, seed)
    cohort = Cohort.open(make_cohorts(work, settings, ("main",), workers=1), "main")
    order = [*cohort.indices("train"), *cohort.indices("test")]
    volumes = [cohort.store.read(cohort.ids[number]) for number in order]

    def shares(number: int, index: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k lesions"]:
        return lesion_shares(cohort, int(order[number]), encoder.recipe.tokens.patch_size, index)

    return PhantomCohort("exam", tuple(LESIONS), volumes, shares, len(cohort.indices("train")), cohort)


def of_segmenter(cohort: Cohort, encoder: PretrainedEncoder) -> Featurise:
    """Features of the segmentation network, which reads the DICOM files of `cohort`."""
    segmenter = with_calibration(load_segmenter(), flip=False)
    number_of = {volume_id: number for number, volume_id in enumerate(cohort.ids)}

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        found = []
        for volume in volumes:
            row = cohort.rows[number_of[volume.volume_id]]
            scan = read_volume(cohort.truth_folder.parent / row["filepath"].lstrip("/"))
            native = cohort.store.native_map(volume.volume_id)
            features = patch_features(segmenter, scan.pixels, scan.spacing_mm, native, encoder.recipe)
            found.append(selected_features(encoder, volume, features))
        return found

    return featurise


def shifted_cohort(
    encoder: PretrainedEncoder, train: int = 40, test: int = 100, seed: int = _SHIFTED_SEED
) -> PhantomCohort:
    """Volumes whose contrast, fluid, looks and resolution are redrawn for each eye."""
    recipe = encoder.recipe
    drawn = [draw_volume(seed, number, SHIFTED, recipe.preprocessing) for number in range(train + test)]
    view = tuple(
        slice(skip, skip + size)
        for skip, size in zip(recipe.preprocessing.margin, recipe.preprocessing.image_size, strict=True)
    )

    def shares(number: int, index: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k lesions"]:
        labels = patches_of(drawn[number].labels[view], recipe.grid, recipe.tokens.patch_size)[index]
        return np.stack([(labels == LAYERS + k).mean(axis=1) for k in range(len(_SHIFTED_LESIONS))], axis=1)

    return PhantomCohort("shifted", _SHIFTED_LESIONS, [one.volume for one in drawn], shares, train)


MEASURES = {
    "fluid_mm3": ("intraretinal_fluid_mm3", "subretinal_fluid_mm3"),
    "atrophy_mm2": ("atrophy_mm2",),
    "central_thickness_um": ("central_thickness_um",),
}
Statistic = Callable[[np.ndarray, np.ndarray], float]  # of truth and prediction of some test eyes
Readout = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # (x, y, x of test) -> scores of the test


def _linear(x: np.ndarray, y: np.ndarray, x_test: np.ndarray) -> np.ndarray:
    return logistic_scores(x, y, x_test, _STRENGTH)


def _mlp(x: np.ndarray, y: np.ndarray, x_test: np.ndarray) -> np.ndarray:
    """One hidden layer of 64 units, ten passes; positives weigh as much as all negatives, as in the linear readout."""
    from sklearn.neural_network import MLPClassifier

    weight = np.where(y, (~y).sum() / max(y.sum(), 1), 1.0)
    model = MLPClassifier((64,), alpha=1e-2, batch_size=256, max_iter=10, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y, sample_weight=weight)
    return np.asarray(model.predict_proba(x_test)[:, 1])


READOUTS: dict[str, Readout] = {"linear": _linear, "mlp": _mlp}


@dataclass(frozen=True, eq=False)
class EyeTokens:
    """The tokens of one eye: features, positions, and whether each holds each lesion of the cohort."""

    tokens: TokenFeatures
    positions: Float[np.ndarray, "k 5"]
    positive: Bool[np.ndarray, "k lesions"]


def eye_tokens(featurise: Featurise, cohort: PhantomCohort) -> list[EyeTokens]:
    """The tokens of every eye of a cohort."""
    found = []
    for number, volume in enumerate(cohort.volumes):
        one = featurise([volume])[0]
        positive = cohort.shares(number, one.grid_index) >= TOKEN_SHARE
        found.append(EyeTokens(one, positions_in_view(one.grid_index, one.grid), positive))
    return found


Samples = dict[str, np.ndarray]  # by lesion and mean: the value, then its resamples, the same ones for every row


def read_tokens(eyes: Sequence[EyeTokens], cohort: PhantomCohort, draws: int, readout: Readout = _linear) -> Samples:
    """Average precision by token for every lesion that two training eyes and test eyes have, and the means."""
    sample = np.concatenate([eye.tokens.features.astype(np.float32) for eye in eyes[: cohort.train]])
    project = Projection(sample[np.random.default_rng(0).permutation(len(sample))[:20_000]])
    inputs = [interleave([project(eye.tokens.features), eye.positions]) for eye in eyes]
    tests = range(cohort.train, len(inputs))
    x_test = np.concatenate([inputs[k] for k in tests])
    eye_of = np.repeat(np.arange(len(tests)), [len(inputs[k]) for k in tests])
    samples: Samples = {}
    for lesion, name in enumerate(cohort.lesions):
        has = np.array([eyes[k].positive[:, lesion].any() for k in range(cohort.train)])
        y_test = np.concatenate([eyes[k].positive[:, lesion] for k in tests])
        scores = []
        for draw in range(draws):
            labelled = draw_labelled(
                np.arange(cohort.train), has, LABELLED, "phantom tokens", cohort.name, lesion, draw
            )
            if labelled is None:
                break
            x = np.concatenate([inputs[k] for k in labelled])
            y = np.concatenate([eyes[k].positive[:, lesion] for k in labelled])
            scores.append(readout(x, y, x_test))
        if scores and y_test.any():
            samples[name] = _resampled(y_test, np.stack(scores), eye_of)
    without = [values for name, values in samples.items() if name != "drusen"]
    return {
        **samples,
        "with_drusen": np.mean(list(samples.values()), axis=0),
        "without_drusen": np.mean(without, axis=0),
    }


def pooled_eyes(
    tokens: Sequence[TokenFeatures], pool: str, train: int, limited: bool = False
) -> Float[np.ndarray, "n f"]:
    """A vector of every eye, on the principal components of the first `train` eyes; `limited`: to their range there."""
    x = np.stack([pool_tokens(one, np.zeros(0, np.int64), (pool,)) for one in tokens])
    return Projection(x[:train], LABELLED, limited)(x)


def read_whole_eyes(eyes: Sequence[EyeTokens], cohort: PhantomCohort) -> Samples:
    """AUROC of every lesion by pooled tokens, and their mean; intervals resample test eyes."""
    x = pooled_eyes([eye.tokens for eye in eyes], DEFAULT_POOL, cohort.train)
    y = np.stack([eye.positive.any(axis=0) for eye in eyes])
    count = len(x) - cohort.train
    rng = np.random.default_rng(0)
    picks = [np.arange(count), *rng.integers(count, size=(RESAMPLES, count))]
    samples: Samples = {}
    for lesion, name in enumerate(cohort.lesions):
        truth = y[: cohort.train, lesion]
        if min(truth.sum(), (~truth).sum()) < 2:
            continue
        scores = logistic_scores(x[: cohort.train], truth, x[cohort.train :], _STRENGTH)
        samples[name] = np.array([auroc(y[cohort.train :, lesion][pick], scores[pick]) for pick in picks])
    return {**samples, "with_drusen": np.mean(list(samples.values()), axis=0)}


def resampled(
    truths: Sequence[np.ndarray], predictions: Sequence[np.ndarray], statistic: Statistic
) -> Float[np.ndarray, " n"]:
    """The mean over draws first, then resamples of the test eyes of one random draw.

    truths, predictions: of the test eyes of each draw.
    """
    rng = np.random.default_rng(0)
    values = [float(np.mean([statistic(*pair) for pair in zip(truths, predictions, strict=True)]))]
    for _ in range(RESAMPLES):
        draw = int(rng.integers(len(truths)))
        pick = rng.integers(len(truths[draw]), size=len(truths[draw]))
        values.append(statistic(truths[draw][pick], predictions[draw][pick]))
    return np.array(values)


def r2(truth: Float[np.ndarray, " n"], predicted: Float[np.ndarray, " n"]) -> float:
    """Share of the variance that is explained; NaN of equal values."""
    spread = float(((truth - truth.mean()) ** 2).sum())
    return 1 - float(((truth - predicted) ** 2).sum()) / spread if spread else np.nan


def auroc(truth: Bool[np.ndarray, " n"], scores: Float[np.ndarray, " n"]) -> float:
    return float(roc_auc_score(truth, scores)) if truth.any() and not truth.all() else np.nan


def read_measures(eyes: Sequence[EyeTokens], cohort: PhantomCohort, draws: int) -> Samples:
    """R2 of each of `MEASURES` in the eyes of the exam's cohort that have it; other cohorts do not know them."""
    assert cohort.native is not None
    truth = cohort.native
    order = np.concatenate([truth.indices("train"), truth.indices("test")])
    x = pooled_eyes([eye.tokens for eye in eyes], CENTERED, cohort.train, limited=True)
    samples: Samples = {}
    for kind, columns in MEASURES.items():
        values = np.sum([truth.column(name) for name in columns], axis=0)[order]
        diseased = truth.lesions[order].any(axis=1) if kind == "central_thickness_um" else values > 0
        samples[kind] = measure_samples(x, values, np.flatnonzero(diseased), kind, draws)
    return samples


def measure_samples(
    x: Float[np.ndarray, "n f"], values: Float[np.ndarray, " n"], eyes: Int[np.ndarray, " k"], kind: str, draws: int
) -> Float[np.ndarray, " r"]:
    """R2 of one measure in the `eyes` that have it."""
    if len(eyes) < LABELLED + 10:
        raise ValueError(f"{kind}: {len(eyes)} eyes have it; {LABELLED} are labelled and at least 10 tested")
    truths, predictions = [], []
    for draw in range(draws):
        mixed = keys.generator("phantom measures", kind, draw).permutation(eyes)
        labelled, tested = mixed[:LABELLED], mixed[LABELLED:]
        truths.append(values[tested])
        predictions.append(ridge_values(x[labelled], values[labelled], x[tested]))
    return resampled(truths, predictions, r2)


def _resampled(
    truth: Bool[np.ndarray, " k"], scores: Float[np.ndarray, "draws k"], eye_of: Int[np.ndarray, " k"]
) -> Float[np.ndarray, " n"]:
    """The mean over draws first, then resamples of test eyes, each with one random draw of the labelled eyes."""
    rng = np.random.default_rng(0)
    count = int(eye_of.max()) + 1
    values = [float(np.mean([average_precision_score(truth, one) for one in scores]))]
    orders = [np.argsort(-one, kind="stable") for one in scores]
    for _ in range(RESAMPLES):
        weight = np.bincount(rng.integers(count, size=count), minlength=count)[eye_of]
        order = orders[int(rng.integers(len(orders)))]
        values.append(_weighted_precision(truth[order], weight[order]))
    return np.array(values)


def _weighted_precision(truth: Bool[np.ndarray, " k"], weight: Int[np.ndarray, " k"]) -> float:
    """Average precision of samples in the order of their scores; NaN without a positive sample.

    As `average_precision_score` of scores without ties, which would sort every resample once more.
    """
    hits = np.cumsum(truth * weight)
    if not hits[-1]:
        return np.nan
    return float((truth * weight * hits / np.maximum(np.cumsum(weight), 1)).sum() / hits[-1])


def value_of(samples: Float[np.ndarray, " n"]) -> Value:
    """The first sample with the percentiles of the others."""
    low, high = np.nanpercentile(samples[1:], [2.5, 97.5])
    return Value(*(round(float(v), 3) for v in (samples[0], low, high)))


def values_of(samples: Samples) -> dict[str, Value]:
    """A value with its interval for each lesion and mean."""
    return {name: value_of(values) for name, values in samples.items()}


def differences(rows: Mapping[str, Samples]) -> dict[str, dict[str, Value]]:
    """Each packaged encoder less each baseline, its own network with random weights and each row that is none of these.

    Those other rows are also compared with each other. Paired by resample.
    """
    others = [row for row in rows if row not in (*OWN_RANDOM, *OWN_RANDOM.values(), *BASELINES, REFERENCE)]
    pairs = [(name, baseline) for name, own in OWN_RANDOM.items() for baseline in (*BASELINES, own, *others)]
    found = {}
    for name, baseline in (*pairs, *combinations(others, 2)):
        if name in rows and baseline in rows:
            one, other = rows[name], rows[baseline]
            found[f"{name} less {baseline}"] = values_of({key: one[key] - other[key] for key in one if key in other})
    return found


READINGS: dict[str, Callable[[Sequence[EyeTokens], PhantomCohort, int], Samples]] = {
    "linear": read_tokens,
    "mlp": partial(read_tokens, readout=_mlp),
    "eyes": lambda eyes, cohort, _draws: read_whole_eyes(eyes, cohort),
    "measures": read_measures,
}


@dataclass(frozen=True)
class RetainedRows:
    """The folder of all samples: a file for each cohort, row, reading and number of draws."""

    folder: Path

    def file(self, cohort: str, row: str, reading: str, draws: int) -> Path:
        """Where the samples of a row are."""
        return self.folder / f"{cohort}.{row}.{reading}.{draws}.json"

    def write(self, file: Path, samples: Samples) -> None:
        """Keeps the samples of a row."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {name: np.round(values, 6).tolist() for name, values in samples.items()})

    def rows(self, cohort: str, reading: str, draws: int) -> dict[str, Samples]:
        """The samples of every row that was measured."""
        found = {}
        for file in sorted(self.folder.glob(f"{cohort}.*.{reading}.{draws}.json")):
            row = file.name.removeprefix(f"{cohort}.").removesuffix(f".{reading}.{draws}.json")
            samples = json.loads(file.read_text(encoding="utf-8"))
            found[row] = {name: np.array(values, float) for name, values in samples.items()}
        return found


Recorded = dict[str, dict[str, dict[str, float]]]  # row or difference -> lesion or mean -> value and interval


def record(retained: RetainedRows, draws: int, earlier: Mapping[str, Any] | None = None) -> dict[str, object]:
    """Everything in `retained`: by reading and cohort, the values of each row and the differences.

    Rows and differences of the record `earlier` stay if `retained` has no samples of them. A difference goes if a row
    of it has another value now.
    """
    out: dict[str, object] = {
        "command": "python -m benchmarks.phantom_tokens --work WORK --keep KEEP --out RECORD",
        "draws": draws,
        "labelled_eyes": LABELLED,
        "resamples": RESAMPLES,
    }
    for reading in READINGS:
        found = {cohort: retained.rows(cohort, reading, draws) for cohort in COHORTS}
        of_reading = (earlier or {}).get(reading, {})
        out[reading] = {
            cohort: merged(of_reading.get(cohort, {}), values_and_differences(rows))
            for cohort, rows in found.items()
            if rows or cohort in of_reading
        }
    return out


def merged(earlier: Mapping[str, Recorded], measured: Mapping[str, Recorded]) -> dict[str, Recorded]:
    """The values and differences of both; `measured` wins."""
    values = earlier.get("values", {}) | measured["values"]
    changed = {name for name, row in earlier.get("values", {}).items() if row != values[name]}
    unchanged = {
        name: row for name, row in earlier.get("differences", {}).items() if changed.isdisjoint(name.split(" less "))
    }
    return {"values": values, "differences": unchanged | measured["differences"]}


def values_and_differences(rows: Mapping[str, Samples]) -> dict[str, Recorded]:
    """The values of every row and the paired differences, for JSON."""
    return {
        "values": {name: jsonable(values_of(samples)) for name, samples in rows.items()},
        "differences": {name: jsonable(values) for name, values in differences(rows).items()},
    }


def jsonable(values: Mapping[str, Value]) -> dict[str, dict[str, float]]:
    return {name: asdict(value) for name, value in values.items()}


COHORTS = ("exam", "shifted")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is missing and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoders", nargs="*", metavar="NAME=ENCODER", help="more rows")
    parser.add_argument("--work", type=Path, required=True, help="folder of the exam's cohort")
    parser.add_argument("--keep", type=Path, required=True, help="folder that keeps the samples of every row")
    parser.add_argument("--out", type=Path, help="the record; default: print it")
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws of the labelled eyes")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--fresh", action="store_true", help="other eyes of the same kinds; take another KEEP")
    parser.add_argument("--cohorts", nargs="*", default=list(COHORTS), choices=COHORTS)
    parser.add_argument("--readings", nargs="*", default=["linear", "eyes", "measures"], choices=sorted(READINGS))
    options = parser.parse_args(arguments)
    packaged = load_encoder("phantom-tiny")
    makers = packaged_rows(packaged)
    for argument in options.encoders:
        name, _, path = argument.partition("=")
        makers[name] = lambda path=path: of_encoder(open_encoder(path, packaged.preprocessing))  # type: ignore[misc]
    exam_seed, shifted_seed = FRESH_SEEDS if options.fresh else (SEED, _SHIFTED_SEED)
    cohorts = {
        "exam": lambda: exam_cohort(options.work, packaged, seed=exam_seed),
        "shifted": lambda: shifted_cohort(packaged, seed=shifted_seed),
    }
    retained = RetainedRows(options.keep)
    for name in options.cohorts:
        _measure(name, cohorts[name], makers, packaged, retained, options)
    earlier = json.loads(options.out.read_text(encoding="utf-8")) if options.out and options.out.is_file() else None
    found = record(retained, options.draws, earlier)
    if options.out is None:
        print(json.dumps(found, indent=1))
    else:
        write_json(options.out, found)


def packaged_rows(packaged: PretrainedEncoder) -> dict[str, Callable[[], Featurise]]:
    """The makers of the features of each row; patches are those of `packaged`. Cheap rows come first."""
    unet = open_encoder("phantom-unet", packaged.preprocessing)
    return {
        "intensity": lambda: of_intensity(packaged),
        "context": lambda: of_context(packaged),
        "position": lambda: of_position(packaged),
        "phantom-truth": lambda: of_encoder(load_encoder("phantom-truth")),
        "phantom-tiny": lambda: of_encoder(packaged),
        "random_init": lambda: of_encoder(packaged.untrained()),
        "phantom-unet": lambda: of_encoder(unet),
        "random_unet": lambda: of_encoder(unet.untrained()),
    }


def _measure(
    name: str,
    make_cohort: Callable[[], PhantomCohort],
    makers: Mapping[str, Callable[[], Featurise]],
    packaged: PretrainedEncoder,
    retained: RetainedRows,
    options: argparse.Namespace,
) -> None:
    """Measures the rows of one cohort that are not kept yet; a cohort without such rows is not made."""
    names = [*makers, *(["segmenter"] if name == "exam" else [])]
    missing = {
        row: [
            one
            for one in options.readings
            if not (one == "measures" and name != "exam") and not retained.file(name, row, one, options.draws).is_file()
        ]
        for row in names
        if not options.only or row in options.only
    }
    missing = {row: readings for row, readings in missing.items() if readings}
    if not missing:
        return
    cohort = make_cohort()
    rows = dict(makers)
    if cohort.native is not None:
        rows["segmenter"] = partial(of_segmenter, cohort.native, packaged)
    for row, readings in missing.items():
        eyes = eye_tokens(rows[row](), cohort)
        for reading in readings:
            samples = READINGS[reading](eyes, cohort, options.draws)
            retained.write(retained.file(name, row, reading, options.draws), samples)
            print(
                f"{name} {row} {reading}: { {key: one.value for key, one in values_of(samples).items()} }", flush=True
            )


if __name__ == "__main__":
    main()
