"""What frozen tokens know of lesions in phantoms, on two cohorts: a small one of the exam's kind, and `shifted`.

`python -m benchmarks.phantom_tokens --work WORK [NAME=ENCODER ...]` prints a JSON object for each cohort. Rows are the
packaged encoders `packaged` (phantom-tiny) and `phantom-unet`, each with random weights too, and hand-made features.

`exam` is the cohort `main` of the exam with 40 training and 150 test people and a seed of its own. `shifted` has
contrast of every layer, reflectivity of fluid, looks and resolution redrawn for each eye
(`octjepa.phantom.random_scene.SHIFTED`). Its seeds are used nowhere else; its ranges overlap those of the objective
`truth` and of the segmentation network and are those of the validation of `truth`, so it favours these encoders.

A token is positive when a lesion fills at least 8 % of it. A logistic regression on 128 principal components of the
features, with the token's position, learns from 30 eyes; with `--readout mlp` a network with one hidden layer does.

Each value is the mean over draws of the labelled eyes. Its 95 % interval resamples test eyes and draws. `with_drusen`
is the mean over all lesions of a cohort, `without_drusen` leaves drusen out, because they hide in a mean.

`--eyes` reads whole eyes instead: the default pooling of tokens, AUROC of each lesion that an eye has in at least one
token, learned from all training eyes.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.exam.cohorts import Cohort, make_cohorts
from benchmarks.exam.readings import Projection, draw_labelled, interleave, logistic_scores
from benchmarks.exam.settings import EXAM, TOKEN_SHARE
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

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.locate import open_encoder
from octjepa.encoders.pooling import DEFAULT_POOL, TokenFeatures, pool_tokens
from octjepa.phantom import LESIONS
from octjepa.phantom.random_scene import SHIFTED
from octjepa.read.reader import read_volume
from octjepa.tasks.segmenter.inference import load_segmenter, with_calibration
from octjepa.tasks.truth.volumes import LAYERS, draw_volume
from octjepa.volume import CanonicalVolume

LABELLED = 30
_STRENGTH = 1e-2
_RESAMPLES = 60
_SHIFTED_SEED = 910_001  # no seed of training or validation
_SHIFTED_LESIONS = ("intraretinal_fluid", "subretinal_fluid", "drusen")


@dataclass(frozen=True, eq=False)
class TestCohort:
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


def exam_cohort(work: Path, encoder: PretrainedEncoder, test: int = 150, seed: int = 9777) -> TestCohort:
    """A small cohort of the exam's kind, made once in `work`."""
    settings = replace(EXAM, train=40, val=10, test=test, seed=seed)
    cohort = Cohort.open(make_cohorts(work, settings, ("main",), workers=1), "main")
    order = [*cohort.indices("train"), *cohort.indices("test")]
    volumes = [cohort.store.read(cohort.ids[number]) for number in order]

    def shares(number: int, index: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k lesions"]:
        return lesion_shares(cohort, int(order[number]), encoder.recipe.tokens.patch_size, index)

    return TestCohort("exam", tuple(LESIONS), volumes, shares, len(cohort.indices("train")), cohort)


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
) -> TestCohort:
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

    return TestCohort("shifted", _SHIFTED_LESIONS, [one.volume for one in drawn], shares, train)


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


def read_row(featurise: Featurise, cohort: TestCohort, draws: int, readout: Readout = _linear) -> dict[str, Value]:
    """Average precision by token for every lesion that two training eyes and test eyes have, and the means."""
    features, positives = [], []
    for number, volume in enumerate(cohort.volumes):
        one = featurise([volume])[0]
        features.append((one.features.astype(np.float32), positions_in_view(one.grid_index, one.grid)))
        positives.append(cohort.shares(number, one.grid_index) >= TOKEN_SHARE)
    sample = np.concatenate([wide for wide, _ in features[: cohort.train]])
    project = Projection(sample[np.random.default_rng(0).permutation(len(sample))[:20_000]])
    inputs = [interleave([project(wide), position]) for wide, position in features]
    tests = range(cohort.train, len(inputs))
    x_test = np.concatenate([inputs[k] for k in tests])
    eye_of = np.repeat(np.arange(len(tests)), [len(inputs[k]) for k in tests])
    samples: dict[str, np.ndarray] = {}
    for lesion, name in enumerate(cohort.lesions):
        has = np.array([positives[k][:, lesion].any() for k in range(cohort.train)])
        y_test = np.concatenate([positives[k][:, lesion] for k in tests])
        scores = []
        for draw in range(draws):
            eyes = draw_labelled(np.arange(cohort.train), has, LABELLED, "phantom tokens", cohort.name, lesion, draw)
            if eyes is None:
                break
            x, y = (np.concatenate([part[k] for k in eyes]) for part in (inputs, [p[:, lesion] for p in positives]))
            scores.append(readout(x, y, x_test))
        if scores and y_test.any():
            samples[name] = _resampled(y_test, np.stack(scores), eye_of)
    found = {name: _value(values) for name, values in samples.items()}
    found["with_drusen"] = _value(np.mean(list(samples.values()), axis=0))
    found["without_drusen"] = _value(np.mean([v for name, v in samples.items() if name != "drusen"], axis=0))
    return found


def read_whole_eyes(featurise: Featurise, cohort: TestCohort) -> dict[str, Value]:
    """AUROC of every lesion by pooled tokens, and their mean; intervals resample test eyes."""
    vectors, has = [], []
    for number, volume in enumerate(cohort.volumes):
        one = featurise([volume])[0]
        vectors.append(pool_tokens(one, np.zeros(0, np.int64), (DEFAULT_POOL,)))
        has.append((cohort.shares(number, one.grid_index) >= TOKEN_SHARE).any(axis=0))
    x, y = np.stack(vectors), np.stack(has)
    project = Projection(x[: cohort.train], LABELLED)
    x = project(x)
    count = len(x) - cohort.train
    rng = np.random.default_rng(0)
    picks = [np.arange(count), *rng.integers(count, size=(_RESAMPLES, count))]
    samples = {}
    for lesion, name in enumerate(cohort.lesions):
        truth = y[: cohort.train, lesion]
        if min(truth.sum(), (~truth).sum()) < 2:
            continue
        scores = logistic_scores(x[: cohort.train], truth, x[cohort.train :], _STRENGTH)
        samples[name] = np.array([_auroc(y[cohort.train :, lesion][pick], scores[pick]) for pick in picks])
    found = {name: _value(values) for name, values in samples.items()}
    found["mean"] = _value(np.mean(list(samples.values()), axis=0))
    return found


def _auroc(truth: Bool[np.ndarray, " n"], scores: Float[np.ndarray, " n"]) -> float:
    return float(roc_auc_score(truth, scores)) if truth.any() and not truth.all() else np.nan


def _resampled(
    truth: Bool[np.ndarray, " k"], scores: Float[np.ndarray, "draws k"], eye_of: Int[np.ndarray, " k"]
) -> Float[np.ndarray, " n"]:
    """The mean over draws first, then resamples of test eyes, each with one random draw of the labelled eyes."""
    rng = np.random.default_rng(0)
    count = int(eye_of.max()) + 1
    values = [float(np.mean([average_precision_score(truth, one) for one in scores]))]
    for _ in range(_RESAMPLES):
        weight = np.bincount(rng.integers(count, size=count), minlength=count)[eye_of]
        here = weight > 0
        draw = scores[int(rng.integers(len(scores)))]
        some = truth[here].any()
        values.append(
            float(average_precision_score(truth[here], draw[here], sample_weight=weight[here])) if some else np.nan
        )
    return np.array(values)


def _value(samples: Float[np.ndarray, " n"]) -> Value:
    low, high = np.nanpercentile(samples[1:], [2.5, 97.5])
    return Value(*(round(float(v), 3) for v in (samples[0], low, high)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoders", nargs="*", metavar="NAME=ENCODER", help="more rows")
    parser.add_argument("--work", type=Path, required=True, help="folder of the exam's cohort")
    parser.add_argument("--draws", type=int, default=15, help="draws of the labelled eyes")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--cohorts", nargs="*", default=["exam", "shifted"])
    parser.add_argument("--readout", choices=sorted(READOUTS), default="linear")
    parser.add_argument("--eyes", action="store_true", help="read whole eyes instead of tokens")
    options = parser.parse_args(arguments)
    packaged = load_encoder("phantom-tiny")
    unet = open_encoder("phantom-unet", packaged.preprocessing)
    makers: dict[str, Callable[[], Featurise]] = {
        "packaged": lambda: of_encoder(packaged),
        "phantom-unet": lambda: of_encoder(unet),
        "random_init": lambda: of_encoder(packaged.untrained()),
        "random_unet": lambda: of_encoder(unet.untrained()),
        "intensity": lambda: of_intensity(packaged),
        "context": lambda: of_context(packaged),
        "position": lambda: of_position(packaged),
    }
    for argument in options.encoders:
        name, _, path = argument.partition("=")
        makers[name] = lambda path=path: of_encoder(open_encoder(path, packaged.preprocessing))  # type: ignore[misc]
    cohorts = {"exam": lambda: exam_cohort(options.work, packaged), "shifted": lambda: shifted_cohort(packaged)}
    out: dict[str, dict[str, dict[str, Value]]] = {}
    for name in options.cohorts:
        cohort = cohorts[name]()
        rows = dict(makers)
        if cohort.native is not None:
            rows["segmenter"] = partial(of_segmenter, cohort.native, packaged)
        out[name] = {
            row: read_whole_eyes(make(), cohort)
            if options.eyes
            else read_row(make(), cohort, options.draws, READOUTS[options.readout])
            for row, make in rows.items()
            if not options.only or row in options.only
        }
        print(json.dumps(out[name], default=vars), flush=True)


if __name__ == "__main__":
    main()
