"""Rows read from one vector a volume: lesions, few labels, a vendor left out, the vendor itself, the fovea.

Every fit is the package's own linear probe, its setting chosen by cross-validation over training people; validation
people only compare arms, test people are measured once. Intervals are bootstraps by person.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

from octjepa import keys
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.intervals import Scale
from octjepa.metrics.scores import Predictions, measure, weighted_auroc
from octjepa.phantom import LESIONS
from octjepa.probe import linear_knn
from octjepa.probe.features import feature_space, plan_selection
from octjepa.probe.targets import Target

from .cohort import Eyes
from .plan import FEW_PEOPLE, PRIMARY_POOL

WITHIN = "_within_vendor"
OF_VAL = "_val"  # validation people: what choices are made by
# Figures whose bootstrap copies are kept: two runs are compared on the same draws of people (`pairs`).
COPIED = (
    "lesion_auroc_macro", f"lesion_auroc_macro{WITHIN}", "leave_vendor_out_drop", "fovea_error_mm", "lesion_dice",
)  # fmt: skip
_DRAWS_OF_FEW = 3  # draws of the few labelled people; the figure is their mean
Say = Callable[[str, float, float | None, float | None, int], None]
Scores = Float[np.ndarray, " n"]


@dataclass
class Bench:
    """The eyes, the resamples of the test people, and where figures go: `print_result(metric, value, low, high, n)`."""

    eyes: Eyes
    say: Say
    bootstrap: int = 2000
    train: Int[np.ndarray, " n"] = field(init=False)
    val: Int[np.ndarray, " n"] = field(init=False)
    test: Int[np.ndarray, " n"] = field(init=False)
    draws: Draws = field(init=False)
    copies: dict[str, np.ndarray] = field(init=False, default_factory=dict)  # of COPIED, in the order of `draws`

    def __post_init__(self) -> None:
        self.train, self.val, self.test = (self.eyes.rows(split) for split in ("train", "val", "test"))
        self.draws = Draws(self.eyes.people[self.test].tolist(), self.bootstrap, 0)

    def lesions(self) -> list[int]:
        """Lesions that can be measured: there and not there among training eyes and among test eyes."""
        return [k for k in range(len(LESIONS)) if _both(self.eyes.labels[self.train, k]) and _both(self.truth(k))]

    def truth(self, lesion: int) -> Bool[np.ndarray, " n"]:
        """Of the test volumes."""
        return self.eyes.labels[self.test, lesion]

    def estimate(
        self,
        metric: str,
        statistic: Callable[[np.ndarray], np.ndarray],
        centred: bool = False,
        scale: Scale = "share",
    ) -> None:
        """Says a figure of the test volumes with its interval; `statistic` takes weights [test, resamples]."""
        found = self.draws.estimate(statistic, self.eyes.people[self.test].tolist(), metric, centred, scale)
        interval = found.interval()
        if metric in COPIED:
            self.copies[metric] = found.samples.astype(np.float32)
        self.say(metric, found.value, interval.low, interval.high, found.n)


def _both(labels: Bool[np.ndarray, " n"]) -> bool:
    return bool(labels.any() and not labels.all())


def probe(
    features: Float[np.ndarray, "volumes features"],
    people: np.ndarray,
    values: np.ndarray,
    train: Int[np.ndarray, " n"],
    asked: Int[np.ndarray, " m"],
    classes: tuple[str, ...] = ("0", "1"),
) -> Predictions:
    """A linear probe fitted on the volumes `train` (`values` of all volumes), and what it says of `asked`."""
    none = train[:0]
    rows = {"train": train, "val": none, "test": asked}
    task = "regression" if not classes else "binary" if len(classes) == 2 else "multiclass"
    codes = {
        split: values[places] if not classes else values[places].astype(np.int64) for split, places in rows.items()
    }
    target = Target("study", task, rows, codes, classes, "", ())
    space = feature_space(features.astype(np.float64), target)
    with warnings.catch_warnings():
        # The rare class of few labels is thinner than the folds; the probe then takes fewer.
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        return linear_knn.fit_linear(space, target, plan_selection(target, people, 0)).predictions


def lesion_scores(
    bench: Bench, features: np.ndarray
) -> tuple[dict[int, Predictions], dict[int, tuple[Bool[np.ndarray, " v"], Scores]]]:
    """(lesion -> predictions of the test volumes, lesion -> truth and scores of the validation volumes)."""
    test, val = {}, {}
    asked = np.concatenate([bench.val, bench.test])
    cut = len(bench.val)
    for k in bench.lesions():
        said = probe(features, bench.eyes.people, bench.eyes.labels[:, k], bench.train, asked)
        test[k] = Predictions(said.truth[cut:], said.scores[cut:], said.calibrated[cut:])
        val[k] = (said.truth[:cut] == 1, said.scores[:cut, 1])
    return test, val


def say_lesions(
    bench: Bench,
    test: dict[int, Predictions],
    val: dict[int, tuple[Bool[np.ndarray, " v"], Scores]],
    ending: str = "",
) -> None:
    """Macro AUROC on test and validation people; without `ending` (the primary pool) also what else is said of them."""

    def macro(metric: str, weights: np.ndarray) -> np.ndarray:
        return np.mean([measure(metric, one, weights) for one in test.values()], axis=0)

    if not test:
        return
    bench.estimate(f"lesion_auroc_macro{ending}", lambda weights: macro("auroc", weights))
    known = [
        float(weighted_auroc(truth, scores, np.ones((len(truth), 1)))[0])
        for truth, scores in val.values()
        if _both(truth)
    ]
    if known:
        bench.say(f"lesion_auroc_macro{ending}{OF_VAL}", float(np.mean(known)), None, None, len(bench.val))
    if ending:
        return
    for k, one in test.items():
        bench.estimate(f"lesion_auroc_{LESIONS[k]}", lambda weights, one=one: measure("auroc", one, weights))
    vendors = bench.eyes.devices[bench.test]
    inside = {
        k: lambda weights, k=k, one=one: auroc_within(bench.truth(k), one.scores[:, 1], vendors, weights)
        for k, one in test.items()
    }
    for k, statistic in inside.items():
        bench.estimate(f"lesion_auroc_{LESIONS[k]}{WITHIN}", statistic)
    bench.estimate(
        f"lesion_auroc_macro{WITHIN}", lambda weights: np.mean([do(weights) for do in inside.values()], axis=0)
    )
    bench.estimate("lesion_ece_macro", lambda weights: macro("ece", weights), centred=True)


def auroc_within(
    truth: Bool[np.ndarray, " n"], scores: Scores, groups: np.ndarray, weights: Float[np.ndarray, "n resamples"]
) -> Float[np.ndarray, " resamples"]:
    """The share of ordered pairs among pairs of one group: how common the lesion is in each group plays no part."""
    right, pairs = np.zeros(weights.shape[1]), np.zeros(weights.shape[1])
    for group in np.unique(groups):
        here = np.flatnonzero(groups == group)
        count = weights[here][truth[here]].sum(axis=0) * weights[here][~truth[here]].sum(axis=0)
        right += count * np.nan_to_num(weighted_auroc(truth[here], scores[here], weights[here]))  # NaN: no pair
        pairs += count
    return np.divide(right, pairs, out=np.full_like(right, np.nan), where=pairs > 0)


def say_few_labels(bench: Bench, features: np.ndarray, sizes: Sequence[int] = FEW_PEOPLE) -> None:
    """Macro AUROC from n labelled people, half of them (or all there are) with the lesion; mean over a few draws."""
    for size in sizes:
        found = []
        for k in bench.lesions():
            for draw in range(_DRAWS_OF_FEW):
                rows = few(bench, k, size, draw)
                if rows is None:
                    break
                said = probe(features, bench.eyes.people, bench.eyes.labels[:, k], rows, bench.test)
                found.append((bench.truth(k), said.scores[:, 1]))
        if len(found) == _DRAWS_OF_FEW * len(bench.lesions()) > 0:
            bench.estimate(f"few_label_auroc_{size}", lambda weights, found=found: _mean_auroc(found, weights))
        else:
            bench.say(f"few_label_auroc_{size}", float("nan"), None, None, len(bench.test))


def few(bench: Bench, lesion: int, size: int, draw: int) -> Int[np.ndarray, " n"] | None:
    """Training volumes of `size` people, drawn; None where the cohort has too few with or without the lesion."""
    people, has = bench.eyes.people[bench.train], bench.eyes.labels[bench.train, lesion]
    with_it = np.unique(people[has])
    without = np.setdiff1d(people, with_it)
    rng = keys.generator("study few", lesion, size, draw)
    some = min(size // 2, len(with_it))
    if some < 2 or len(without) < size - some:
        return None
    chosen = np.concatenate([rng.permutation(with_it)[:some], rng.permutation(without)[: size - some]])
    rows: np.ndarray = bench.train[np.isin(people, chosen)]
    return rows


def _mean_auroc(found: Sequence[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> np.ndarray:
    return np.mean([weighted_auroc(truth, scores, weights) for truth, scores in found], axis=0)


def say_vendor_left_out(bench: Bench, features: np.ndarray, full: dict[int, Predictions]) -> None:
    """How much AUROC within a vendor falls when no eye of that vendor has a label; mean over vendors and lesions.

    The encoder has still seen the vendor, without labels. The probe also has about a quarter fewer people to learn
    from, and that is part of the figure.
    """
    eyes = bench.eyes
    pairs = []
    for vendor in np.unique(eyes.devices):
        others = bench.train[eyes.devices[bench.train] != vendor]
        here = np.flatnonzero(eyes.devices[bench.test] == vendor)
        for k, with_all in full.items():
            if _both(eyes.labels[others, k]) and _both(bench.truth(k)[here]):
                said = probe(features, eyes.people, eyes.labels[:, k], others, bench.test[here])
                pairs.append((here, bench.truth(k)[here], with_all.scores[here, 1], said.scores[:, 1]))

    def drop(weights: np.ndarray) -> np.ndarray:
        falls = [
            weighted_auroc(truth, all_, weights[here]) - weighted_auroc(truth, without, weights[here])
            for here, truth, all_, without in pairs
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Mean of empty slice", category=RuntimeWarning)
            return np.nanmean(falls, axis=0)  # a resample may hold no case of one vendor: the others speak

    if pairs:
        bench.estimate("leave_vendor_out_drop", drop, scale="difference")


def say_vendor_and_fovea(bench: Bench, features: np.ndarray) -> None:
    """How well the device (balanced accuracy; low is good) and the place of the fovea (high is good) can be read."""
    eyes = bench.eyes
    names = tuple(np.unique(eyes.devices).tolist())
    if len(names) > 1:
        codes = np.searchsorted(names, eyes.devices)
        said = probe(features, eyes.people, codes, bench.train, bench.test, names)
        bench.estimate("vendor_accuracy", lambda weights: measure("balanced_accuracy", said, weights))
    axes = [probe(features, eyes.people, eyes.fovea_mm[:, k], bench.train, bench.test, ()) for k in (0, 1)]
    bench.estimate(
        "fovea_r2",
        lambda weights: np.mean([measure("r2", one, weights) for one in axes], axis=0),
        scale="below_one",
    )
    error = np.hypot(*(one.scores[:, 0] - one.truth for one in axes))
    bench.estimate("fovea_error_mm", lambda weights: error @ weights / weights.sum(axis=0), scale="error")


def say_all(bench: Bench, pools: dict[str, np.ndarray]) -> None:
    """Every row of frozen vectors. `pools` with a single entry has that one as its primary."""
    primary = pools.get(PRIMARY_POOL, next(iter(pools.values())))
    test, val = lesion_scores(bench, primary)
    say_lesions(bench, test, val)
    for pool, features in pools.items():
        if features is not primary:
            say_lesions(bench, *lesion_scores(bench, features), ending=f"_{pool}")
    say_few_labels(bench, primary)
    say_vendor_left_out(bench, primary, test)
    say_vendor_and_fovea(bench, primary)
