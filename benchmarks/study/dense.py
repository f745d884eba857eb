"""Rows read from frozen tokens by a linear head: which layer, and which lesion, each place of the volume belongs to.

The head is ridge regression from a token to every cell of its patch, in closed form, so it has no chance in it and no
schedule. It also knows the place of each token, as any segmentation head does: in flattened volumes the place alone
tells most layers (`say_place_prior`), and a token is to tell more. Its penalty is chosen on validation volumes, and a
lesion's threshold where Dice is best among them (among the training volumes where they hold too few). A place without
a token, which no encoder saw, is given its commonest layer and no lesion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.phantom import LESIONS
from octjepa.tasks.segment.dice import dice
from octjepa.tasks.segment.linear import PENALTIES, Ridge, patch_cells, with_intercept

from .cohort import LAYERS, REGIONS, UNSEEN
from .features import Tokens
from .frozen import Bench

THRESHOLDS = tuple(float(t) for t in np.round(np.geomspace(0.02, 0.7, 18), 4))
_LEAST_WITH_LESION = 5
Counts = Float[np.ndarray, "volumes kinds 3"]  # places found and true, found, true


def with_place(one: Tokens, grid: tuple[int, int, int]) -> Float[np.ndarray, "k dim+places"]:
    """Features of the tokens and, one-hot, where each lies."""
    place = one.index[:, None] == np.arange(int(np.prod(grid)))
    return np.concatenate([one.features.astype(np.float32), place], axis=1)


def counted(found: np.ndarray, true: np.ndarray) -> tuple[float, float, float]:
    """(both, found, true) places of two masks."""
    return float((found & true).sum()), float(found.sum()), float(true.sum())


def dice_of_thresholds(
    counts: Float[np.ndarray, "volumes lesions thresholds 3"],
) -> Float[np.ndarray, "lesions thresholds"]:
    """Dice of each lesion over all volumes, 0 where there is none, at each of THRESHOLDS."""
    return np.nan_to_num(np.stack([dice(counts[:, k])[:, 0] for k in range(counts.shape[1])]))


Truth = Callable[[int], tuple[np.ndarray, np.ndarray]]


def say_dense(bench: Bench, found: Sequence[Tokens], grid: tuple[int, int, int]) -> None:
    """layer_dice (mean over LAYERS), lesion_dice (mean over lesions) and each of their parts."""
    truth = bench.eyes.coarse_truth
    layers, lesions = _heads(found, truth, bench.train, grid)
    prior = patch_cells(place_prior(bench), grid, np.arange(int(np.prod(grid))))
    penalty = max(
        PENALTIES,
        key=lambda one: float(
            np.nanmean(dice(_layer_counts(layers.weights(one), found, truth, bench.val, grid, prior)))
        ),
    )
    counts = _layer_counts(layers.weights(penalty), found, truth, bench.test, grid, prior)
    _say(bench, "layer_dice", LAYERS, list(range(len(LAYERS))), counts)

    kinds = bench.lesions()
    if not kinds:
        return
    tried = {}
    for one in PENALTIES:
        weights = lesions.weights(one)
        on_val = _lesion_counts(weights, found, truth, bench.val, grid, kinds)
        curves = dice_of_thresholds(on_val)
        rare = [k for k in kinds if (on_val[:, k, 0, 2] > 0).sum() < _LEAST_WITH_LESION]
        if rare:
            on_train = _lesion_counts(weights, found, truth, bench.train, grid, rare)
            curves[rare] = dice_of_thresholds(on_train)[rare]
        tried[one] = (float(curves[kinds].max(axis=1).mean()), curves.argmax(axis=1))
    penalty = max(tried, key=lambda one: tried[one][0])
    every = _lesion_counts(lesions.weights(penalty), found, truth, bench.test, grid, kinds)
    chosen = np.take_along_axis(every, tried[penalty][1][None, :, None, None], axis=2)[:, :, 0]
    _say(bench, "lesion_dice", LESIONS, kinds, chosen)


def say_place_prior(bench: Bench) -> None:
    """layer_dice of the commonest region at each place over the training volumes: what needs no picture at all."""
    truth = bench.eyes.coarse_truth
    said = place_prior(bench)
    counts = np.array([_layers_of(said, truth(int(place))[0]) for place in bench.test])
    _say(bench, "layer_dice", LAYERS, list(range(len(LAYERS))), counts)


def place_prior(bench: Bench) -> UInt8[np.ndarray, "D H C"]:
    """The commonest region at each place over the training volumes."""
    votes = sum(_one_hot(bench.eyes.coarse_truth(int(place))[0]) for place in bench.train)
    return np.asarray(votes).argmax(axis=-1).astype(np.uint8)


def _say(bench: Bench, name: str, kinds: Sequence[str], which: list[int], counts: Counts) -> None:
    bench.estimate(name, lambda weights: np.mean(dice(counts, weights)[which], axis=0))
    for k in which:
        bench.estimate(f"{name}_{kinds[k]}", lambda weights, k=k: dice(counts, weights)[k])


def _heads(
    found: Sequence[Tokens], truth: Truth, train: Iterable[int], grid: tuple[int, int, int]
) -> tuple[Ridge, Ridge]:
    layers = lesions = None
    for place in train:
        one = found[place]
        regions, bits = (patch_cells(part, grid, one.index) for part in truth(int(place)))
        whole = (regions != UNSEEN).all(axis=1)  # a patch that reaches out of the scan teaches nothing
        features = with_place(one, grid)[whole]
        if layers is None or lesions is None:
            dim, size = features.shape[1], regions.shape[1]
            layers, lesions = Ridge(dim, size * len(REGIONS)), Ridge(dim, size * len(LESIONS))
        layers.add(features, _one_hot(regions[whole]).reshape(len(features), -1))
        wanted = (bits[whole][..., None] >> np.arange(len(LESIONS))) & 1
        lesions.add(features, wanted.reshape(len(features), -1).astype(float))
    assert layers is not None
    assert lesions is not None
    return layers, lesions


def _one_hot(regions: np.ndarray) -> np.ndarray:
    return (regions[..., None] == np.arange(len(REGIONS))).astype(float)


def _layer_counts(
    weights: np.ndarray,
    found: Sequence[Tokens],
    truth: Truth,
    places: Iterable[int],
    grid: tuple[int, int, int],
    prior: UInt8[np.ndarray, "tokens cells"],
) -> Counts:
    every = np.arange(len(prior))
    rows = []
    for place in places:
        one = found[place]
        said = prior.copy()
        scores = (with_intercept(with_place(one, grid)) @ weights).reshape(len(one.index), -1, len(REGIONS))
        said[one.index] = scores.argmax(axis=-1)
        rows.append(_layers_of(said, patch_cells(truth(int(place))[0], grid, every)))
    return np.array(rows)


def _layers_of(said: np.ndarray, true: np.ndarray) -> list[tuple[float, float, float]]:
    seen = true != UNSEEN
    return [counted((said == code) & seen, true == code) for code in range(1, 1 + len(LAYERS))]


def _lesion_counts(
    weights: np.ndarray,
    found: Sequence[Tokens],
    truth: Truth,
    places: Sequence[int] | np.ndarray,
    grid: tuple[int, int, int],
    kinds: list[int],
) -> Float[np.ndarray, "volumes lesions thresholds 3"]:
    """Of the lesions `kinds`; zeros for the others."""
    every = np.arange(int(np.prod(grid)))
    weights = weights.reshape(len(weights), -1, len(LESIONS))[:, :, kinds]
    flat = weights.reshape(len(weights), -1)
    counts = np.zeros((len(places), len(LESIONS), len(THRESHOLDS), 3))
    for number, place in enumerate(places):
        one = found[place]
        scores = (with_intercept(with_place(one, grid)) @ flat).reshape(len(one.index), -1, len(kinds))
        whole = np.full((len(every), *scores.shape[1:]), -np.inf)
        whole[one.index] = scores
        regions, bits = (patch_cells(part, grid, every) for part in truth(int(place)))
        seen = regions != UNSEEN
        for column, k in enumerate(kinds):
            counts[number, k] = curve(whole[..., column][seen], ((bits >> k) & 1).astype(bool)[seen])
    return counts


def curve(scores: Float[np.ndarray, " n"], true: np.ndarray) -> Float[np.ndarray, "thresholds 3"]:
    """(both, found, true) at each of THRESHOLDS."""
    step = np.searchsorted(THRESHOLDS, scores, side="right")  # thresholds that the score reaches
    size = len(THRESHOLDS) + 1
    found = np.bincount(step, minlength=size)[::-1].cumsum()[::-1][1:]
    both = np.bincount(step[true], minlength=size)[::-1].cumsum()[::-1][1:]
    return np.stack([both, found, np.full(len(found), true.sum())], axis=1).astype(float)
