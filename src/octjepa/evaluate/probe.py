"""Frozen probes: what can be read from an encoder's features by a linear model or by nearest neighbours.

Embedding tables and a label file go in; rows {name, target, probe, pool, metric, value, low, high, n} come out, always
with majority, covariates, histogram and untrained beside the encoder's, and the paired difference to the untrained
encoder. Probes are fitted on split train, chosen on val (or inside train), and measured on test once. Fails with
UsageError on people in two splits, on labels that meet no scan and on targets that cannot be measured; with several
targets such a target is left out and said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from threadpoolctl import threadpool_limits

from octjepa.errors import UsageError
from octjepa.evaluate import heads
from octjepa.evaluate.baselines import covariate_features, majority
from octjepa.evaluate.intervals import Draws, Estimate, mean_estimate, paired_difference
from octjepa.evaluate.labels import Target, check_people, join, read_labels
from octjepa.evaluate.metrics import METRICS, PRIMARY_METRIC, TASK_METRICS, Predictions, confusion, measure
from octjepa.evaluate.table import POOLS, Embeddings
from octjepa.progress import bar

log = logging.getLogger(__name__)

PROBES = {"linear": heads.linear, "knn": heads.knn}
RESERVED = ("untrained", "histogram", "majority", "covariates")
MACRO = "macro"


@dataclass
class ProbeResult:
    """What a probe run found; `payload` is what `octjepa probe` prints and the report draws.

    rows: a figure each; value, low and high are None where the figure or an honest interval does not exist; n counts
        test volumes, n_people the people behind them.
    paired: the first encoder minus its untrained twin on the same people (empty if a figure is missing).
    comparisons: the same for every encoder, target, probe and pool: for reading, not for picking the best.
    choices: the setting chosen per row, how, and how many fits stopped early. confusions: counts on the test volumes.
    notes: everything that was left out or degraded, in words.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    paired: dict[str, Any] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    confusions: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keeps a note once and says it on the log."""
        if text not in self.notes:
            self.notes.append(text)
            log.warning("%s", text)

    def payload(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class _Row:
    name: str
    target: str
    probe: str
    pool: str


def run_probes(
    embeddings: Sequence[Embeddings],
    labels_path: str | Path,
    targets: Sequence[str],
    probes: Sequence[str] = ("linear", "knn"),
    task: str = "auto",
    pools: Sequence[str] = POOLS,
    metric_names: Sequence[str] | None = None,
    bootstrap: int = 2000,
    seed: int = 0,
    paired_probe: str = "linear",
    paired_pool: str = "mean_std_max",
) -> ProbeResult:
    """Probes every table for every target. See the module's text for what comes out.

    paired_probe and paired_pool name the comparison reported in `paired` before any test figure is seen; where that
    probe or pool is not run, the last of those that are.
    Raises UsageError: nothing to probe, an unknown probe, pool, metric or task, tables that do not fit together, and
    everything that `read_labels`, `check_people` and, for a single target, `join` raise.
    """
    _check_names(embeddings, probes, pools, metric_names)
    targets = list(dict.fromkeys(targets))
    labels = read_labels(labels_path, targets)
    result = ProbeResult()
    tables = _named(_aligned(embeddings, result), result)
    frame = tables[0][1].frame
    check_people(frame)
    leaked = max(table.leaked for table in embeddings)
    if leaked:
        raise UsageError(
            f"leak: the encoder was pretrained on eyes of {leaked} people who are now in val or test, so their figures "
            "would be too good. Give the store the split it was trained with, or pretrain anew, then embed again."
        )
    for text in labels.notes:
        result.note(text)
    joined = _joined(labels, frame, targets, task, result)
    person_ids = frame["person_id"].to_numpy(dtype=str)
    tested = np.concatenate([target.rows["test"] for target in joined])
    draws = Draws(person_ids[tested].tolist(), bootstrap, seed)
    ways = {target.name: heads.choosing(target, person_ids, seed) for target in joined}
    for target in joined:
        if ways[target.name].by == "fixed":
            result.note(f"{target.name}: too few people per class to choose settings; the middle of each grid is used")

    predicted: dict[_Row, tuple[Target, Predictions]] = {}
    for target in joined:
        predicted[_Row("majority", target.name, "constant", "none")] = (target, majority(target))
    views = list(_views(tables, pools))
    with bar("probes", (len(views) * len(probes) + 1) * len(joined), "fit") as shown, threadpool_limits(1):
        # One thread: these matrices are small, and the result then does not depend on the number of cores.
        for name, pool, features in views:
            spaces: dict[bytes, heads.Space] = {}
            for target in joined:
                # Targets with the same labelled volumes share standardised, rotated features and neighbour lists.
                same = b"|".join(rows.tobytes() for rows in target.rows.values())
                if same not in spaces:
                    spaces[same] = heads.prepare(features, target)
                for probe in probes:
                    probed = PROBES[probe](spaces[same], target, ways[target.name])
                    predicted[_keep(_Row(name, target.name, probe, pool), probed, ways[target.name].by, result)] = (
                        target,
                        probed.predictions,
                    )
                    shown.advance()
        for target in joined:
            features, notes = covariate_features(frame, target)
            for text in notes:
                result.note(text)
            probed = heads.linear(heads.prepare(features, target), target, ways[target.name])
            row = _keep(_Row("covariates", target.name, "linear", "none"), probed, ways[target.name].by, result)
            predicted[row] = (target, probed.predictions)
            shown.advance()

    estimates = _measure(predicted, person_ids, draws, metric_names, result)
    _macro(joined, estimates, person_ids, result)
    _compare(joined, tables, estimates, result, _one(paired_probe, probes), _one(paired_pool, pools))
    return result


def _check_names(
    embeddings: Sequence[Embeddings], probes: Sequence[str], pools: Sequence[str], metric_names: Sequence[str] | None
) -> None:
    if not embeddings:
        raise UsageError("no embeddings to probe: give at least one .parquet file of octjepa embed")
    for what, given, known in (("probe", probes, PROBES), ("pool", pools, POOLS), ("metric", metric_names, METRICS)):
        unknown = [name for name in given or () if name not in known]
        if unknown or (given is not None and not given):
            raise UsageError(f"no {what} {', '.join(unknown) or 'given'}: known are {', '.join(known)}")


def _one(wanted: str, run: Sequence[str]) -> str:
    return wanted if wanted in run else run[-1]


def _aligned(embeddings: Sequence[Embeddings], result: ProbeResult) -> list[Embeddings]:
    """All tables cut to the volumes that every one of them holds, in one order, so that rows can be paired."""
    places = [{volume: place for place, volume in enumerate(table.frame["volume_id"])} for table in embeddings]
    common = sorted(set(places[0]).intersection(*places[1:]))
    if not common:
        raise UsageError(f"the {len(embeddings)} embedding files share no volume, so their rows cannot be compared")
    for table in embeddings:
        if len(table) > len(common):
            result.note(f"{table.encoder}: {len(table) - len(common)} volumes are not in every table and are left out")
    tables = [table.take(place[volume] for volume in common) for table, place in zip(embeddings, places, strict=True)]
    keys = ["person_id", "eye", "split"]
    for table in tables[1:]:
        differing = int((table.frame[keys] != tables[0].frame[keys]).any(axis=1).sum())
        if differing:
            raise UsageError(
                f"{table.encoder} and {tables[0].encoder} differ in person, eye or split for {differing} of "
                f"{len(common)} volumes; embed both from the same store"
            )
        if table.contract != tables[0].contract:
            result.note(
                f"{table.encoder} and {tables[0].encoder} saw differently preprocessed volumes (contracts "
                f"{table.contract[:12]} and {tables[0].contract[:12]}): the comparison holds that difference too"
            )
    return tables


def _named(tables: list[Embeddings], result: ProbeResult) -> list[tuple[str, Embeddings]]:
    """Tables under the names of their rows; a name that is taken gets a number."""
    named: list[tuple[str, Embeddings]] = []
    taken = set(RESERVED)
    for table in tables:
        name, number = table.encoder or "encoder", 2
        while name in taken:
            name, number = f"{table.encoder}#{number}", number + 1
        if name != table.encoder:
            result.note(f"the name {table.encoder!r} is taken: table {len(named) + 1} stands in the rows as {name!r}")
        taken.add(name)
        named.append((name, table))
    return named


def _joined(labels: Any, frame: Any, targets: Sequence[str], task: str, result: ProbeResult) -> list[Target]:
    joined: list[Target] = []
    for name in targets:
        try:
            target = join(labels, frame, name, task)
        except UsageError as error:
            if len(targets) == 1:
                raise
            result.note(f"target {name} is left out: {error}")
            continue
        joined.append(target)
        for text in target.notes:
            result.note(text)
    if not joined:
        raise UsageError(f"none of the {len(targets)} targets can be probed:\n  " + "\n  ".join(result.notes))
    return joined


def _twin(tables: list[tuple[str, Embeddings]], index: int) -> str:
    """Row name of the untrained twin of table `index`: "untrained" where it equals the first table's."""
    name, table = tables[index]
    return "untrained" if np.array_equal(table.untrained, tables[0][1].untrained) else f"untrained:{name}"


def _views(
    tables: list[tuple[str, Embeddings]], pools: Sequence[str]
) -> Iterator[tuple[str, str, Float[np.ndarray, "volumes features"]]]:
    """(row name, pool, features) of every feature set, one at a time."""
    seen: set[str] = set()
    for index, (name, table) in enumerate(tables):
        for pool in pools:
            yield name, pool, table.features("vector", pool)
        twin = _twin(tables, index)
        if twin not in seen:
            seen.add(twin)
            for pool in pools:
                yield twin, pool, table.features("untrained", pool)
    yield "histogram", "none", tables[0][1].features("histogram", "none")


def _keep(row: _Row, probed: heads.Probed, by: str, result: ProbeResult) -> _Row:
    """Records the chosen setting, and says so where a fit did not converge or a probe cannot tell anything apart."""
    result.choices.append({**vars(row), "setting": probed.setting, "by": by, "unconverged": probed.unconverged})
    if probed.unconverged:
        result.note(
            f"{probed.unconverged} fit(s) of {row.name} ({row.pool}) for {row.target} stopped before convergence"
        )
    return row


def _measure(
    predicted: dict[_Row, tuple[Target, Predictions]],
    person_ids: np.ndarray,
    draws: Draws,
    metric_names: Sequence[str] | None,
    result: ProbeResult,
) -> dict[tuple[_Row, str], Estimate]:
    """Every metric of every row with its bootstrap; fills rows, confusions and the notes on them."""
    estimates: dict[tuple[_Row, str], Estimate] = {}
    for row, (target, predictions) in predicted.items():
        people = person_ids[target.rows["test"]].tolist()
        primary = PRIMARY_METRIC[target.task]
        wanted = [name for name in TASK_METRICS[target.task] if metric_names is None or name in metric_names]
        if not wanted and metric_names is not None:
            known = ", ".join(TASK_METRICS[target.task])
            raise UsageError(f"{target.name} is {target.task}: none of the metrics asked for fits; it has {known}")
        for metric in dict.fromkeys((*wanted, primary)):

            def statistic(weights: np.ndarray, metric: str = metric, of: Predictions = predictions) -> np.ndarray:
                return measure(metric, of, weights)

            estimate = draws.estimate(statistic, people, target.label_hash, centred=metric == "ece")
            estimates[row, metric] = estimate
            if metric in wanted:
                result.rows.append(_as_row(row, metric, estimate))
            lost = estimate.interval().undefined
            if metric == primary and lost:
                result.note(
                    f"{target.name}: {lost} of {len(estimate.samples)} resamples of {estimate.n_people} test people "
                    f"hold too few classes for {metric}; intervals cover the others"
                )
        if target.classes:
            counts = confusion(predictions)
            result.confusions.append({**vars(row), "classes": list(target.classes), "counts": counts})
            said = [name for name, column in zip(target.classes, zip(*counts, strict=True), strict=True) if any(column)]
            if len(said) == 1 and row.name not in RESERVED:
                result.note(
                    f"{row.name} ({row.probe}, {row.pool}) says {said[0]!r} of every test volume of {row.target}: "
                    "a constant predictor"
                )
    return estimates


def _as_row(row: _Row, metric: str, estimate: Estimate) -> dict[str, Any]:
    interval = estimate.interval()
    return {
        **vars(row),
        "metric": metric,
        "value": estimate.value if np.isfinite(estimate.value) else None,
        "low": interval.low,
        "high": interval.high,
        "n": estimate.n,
        "n_people": estimate.n_people,
    }


def _macro(
    joined: list[Target], estimates: dict[tuple[_Row, str], Estimate], person_ids: np.ndarray, result: ProbeResult
) -> None:
    """Adds the mean AUROC over the binary targets, resampled jointly, where there are at least two."""
    binary = [target for target in joined if target.task == "binary"]
    if len(binary) < 2:
        return
    people = len({person for target in binary for person in person_ids[target.rows["test"]]})
    for row, metric in [key for key in estimates if key[0].target == binary[0].name and key[1] == "auroc"]:
        parts = [estimates[_Row(row.name, target.name, row.probe, row.pool), metric] for target in binary]
        whole = _Row(row.name, MACRO, row.probe, row.pool)
        estimates[whole, metric] = mean_estimate(parts, people)
        result.rows.append(_as_row(whole, metric, estimates[whole, metric]))


def _compare(
    joined: list[Target],
    tables: list[tuple[str, Embeddings]],
    estimates: dict[tuple[_Row, str], Estimate],
    result: ProbeResult,
    probe: str,
    pool: str,
) -> None:
    """Every encoder row against its untrained twin; the one named beforehand becomes `paired`."""
    metrics = {target.name: PRIMARY_METRIC[target.task] for target in joined} | {MACRO: "auroc"}
    twins = {name: _twin(tables, index) for index, (name, _) in enumerate(tables)}
    for (row, metric), ours in estimates.items():
        if row.name not in twins or metric != metrics[row.target]:
            continue
        reference = estimates[_Row(twins[row.name], row.target, row.probe, row.pool), metric]
        paired = paired_difference(ours, reference)
        result.comparisons.append({**vars(row), "metric": metric, "reference": twins[row.name], **vars(paired)})
    names = {one["target"] for one in result.comparisons}
    headline = MACRO if MACRO in names else joined[0].name
    for one in result.comparisons:
        if (one["name"], one["target"], one["probe"], one["pool"]) == (tables[0][0], headline, probe, pool):
            result.paired = one
