"""Frozen probes: what can be read from an encoder's features by a model too small to learn it by itself.

Embedding tables and a label file go in; rows {name, target, probe, pool, metric, value, low, high, n} come out, always
with majority, covariates, histogram and untrained beside the encoder's, and the paired difference to the untrained
encoder. Probes are fitted on split train, chosen on val (or inside train), and measured on test once. Fails with
UsageError on people in two splits, on labels that meet no scan and on targets that cannot be measured; with several
targets such a target is left out and said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from octjepa.embed import pooling
from octjepa.embed.alignment import NamedTables, align_tables, feature_sets, name_tables, token_sets
from octjepa.embed.table import Embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.errors import UsageError
from octjepa.metrics import test_set_ledger
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import METRICS
from octjepa.probe import probe_training
from octjepa.probe.aggregation import Cases, PreparedTarget, aggregation_notes, group_cases, prepare_targets
from octjepa.probe.calibration import ProbeFit
from octjepa.probe.features import FeatureSpace, Selection, covariate_features, feature_space, majority_predictions
from octjepa.probe.labels import read_labels, split_multilabel
from octjepa.probe.linear_knn import fit_knn, fit_linear
from octjepa.probe.results import ProbeResult as ProbeResult
from octjepa.probe.results import ResultKey, add_macro, compare_with_untrained, estimate_metrics
from octjepa.probe.targets import Target, check_people, test_set_hash
from octjepa.progress import bar

PROBES = ("linear", "knn", "mlp", "attentive")
DEFAULT_PROBES = ("linear", "knn")
COMMAND = "octjepa probe"
ATTENTION = "attention"  # the pooling of the attentive probe, learned from labels


def run_probes(
    embeddings: Sequence[Embeddings],
    labels_path: str | Path,
    targets: Sequence[str],
    probes: Sequence[str] = DEFAULT_PROBES,
    task: str = "auto",
    pools: Sequence[str] | None = None,
    metric_names: Sequence[str] | None = None,
    bootstrap: int = 2000,
    seed: int = 0,
    paired_probe: str = "linear",
    paired_pool: str = "mean_std_max",
    level: str = "volume",
    several: str = "features",
    visit_order: Mapping[str, float] | None = None,
    tokens: Sequence[TokenFolder] = (),
    label_smoothing: float = 0.0,
    ledger_folder: Path | None = None,
) -> ProbeResult:
    """Probes every table for every target. See the module's text for what comes out.

    pools: default, all that every table holds. level and several: what is a case and what becomes of its volumes
    (`protocol`). tokens: a folder for each table, for the attentive probe. label_smoothing: of mlp and attentive.
    paired_probe and paired_pool name the comparison reported in `paired` before any test figure is seen; where that
    probe or pool is not run, the last of those that are. ledger_folder: counts the uses of each test set, beside the
    labels where none is named.
    Raises UsageError: nothing to probe, an unknown probe, pool, metric, task, level or rule, tables or tokens that do
    not fit together, a ledger that cannot be written, and everything that `read_labels`, `check_people` and, for a
    single target, `join` raise.
    """
    pools = _checked(embeddings, probes, pools, metric_names, label_smoothing)
    targets = list(dict.fromkeys(targets))
    labels = read_labels(labels_path, targets)
    looks = ledger_folder or test_set_ledger.default_folder(Path(labels_path))
    test_set_ledger.check_writable(looks)
    result = ProbeResult()
    tables = name_tables(align_tables(embeddings, result), result.add_note)
    frame = tables[0][1].frame
    for text in check_people(frame):
        result.add_note(text)
    leaked = max(table.leaked for table in embeddings)
    if leaked:
        raise UsageError(
            f"leak: the encoder was pretrained on eyes of {leaked} people who are now in val or test, so their figures "
            "would be too good. Give the store the split it was trained with, or pretrain anew, then embed again."
        )
    for text in labels.notes:
        result.add_note(text)
    if task == "multilabel":
        labels, targets = split_multilabel(labels, targets)
        task = "binary"
    cases = group_cases(frame, level, several, visit_order)
    result.protocol = cases.about
    aggregation_notes(cases, result)
    by_volume = several == "scores" and level != "volume"
    merged: NamedTables = [(name, cases.aggregate(table)) for name, table in tables]
    asked = prepare_targets(labels, tables, merged, targets, task, cases if by_volume else None, level, seed, result)
    learnt_on = tables if by_volume else merged

    people = merged[0][1].frame["person_id"].to_numpy(dtype=str)
    people_of = {one.test_target.name: people[one.test_target.indices["test"]].tolist() for one in asked}
    draws = Draws([person for some in people_of.values() for person in some], bootstrap, seed)
    token_views, token_frame = [], frame
    if "attentive" in probes:
        token_views = list(token_sets(tables, tokens))
        token_frame = frame.iloc[_token_rows(cases, by_volume, len(frame))]
    of_vectors = [probe for probe in probes if probe != "attentive"]
    fits: dict[str, Callable[[FeatureSpace, Target, Selection], ProbeFit]] = {
        "linear": fit_linear,
        "knn": fit_knn,
        "mlp": partial(probe_training.mlp, smoothing=label_smoothing, seed=seed),
    }
    attend = partial(_attend, smoothing=label_smoothing, seed=seed)
    read = [
        test_set_ledger.fingerprint(features, probe)
        for _, _, features in feature_sets(learnt_on, pools if of_vectors else ())
        for probe in of_vectors or ("linear",)
    ]
    read += [f"{folder.weights} {view} attentive" for _, folder, view in token_views]
    test_sets = {one.test_target.name: test_set_hash(labels, frame, one.test_target.name) for one in asked}
    test_set_ledger.record_uses(looks, COMMAND, test_sets, dict.fromkeys(test_sets, read), result)
    for one in asked:
        result.predicted[ResultKey("majority", one.test_target.name, "constant", "none")] = (
            one.test_target,
            majority_predictions(one.test_target),
        )
    # One thread: these matrices are small, and the result then does not depend on the number of cores.
    with bar("probes", None, "fit") as shown, threadpool_limits(1):
        for name, pool, features in feature_sets(learnt_on, pools if of_vectors else ()):
            for one, space in _spaces(features, asked):
                for probe in of_vectors or ("linear",):
                    probed = fits[probe](space, one.fit_target, one.selection)
                    _keep(ResultKey(name, one.test_target.name, probe, pool), probed, one, result)
                    shown.advance()
        for name, folder, view in token_views:
            for one, probed in zip(asked, attend(folder, view, token_frame, asked), strict=True):
                _keep(ResultKey(name, one.test_target.name, "attentive", ATTENTION), probed, one, result)
                shown.advance()
        for one in asked:
            features, notes = covariate_features(learnt_on[0][1].frame, one.fit_target)
            for text in notes:
                result.add_note(text)
            probed = fit_linear(feature_space(features, one.fit_target), one.fit_target, one.selection)
            _keep(ResultKey("covariates", one.test_target.name, "linear", "none"), probed, one, result)
            shown.advance()

    measured_targets = [one.test_target for one in asked]
    estimates = estimate_metrics(result.predicted, people_of, draws, metric_names, result)
    add_macro(measured_targets, estimates, people_of, result)
    headline = paired_probe if paired_probe in probes else probes[-1]
    pool = ATTENTION if headline == "attentive" else paired_pool if paired_pool in pools else pools[-1]
    compare_with_untrained(measured_targets, tables, estimates, result, headline, pool)
    return result


def _checked(
    embeddings: Sequence[Embeddings],
    probes: Sequence[str],
    pools: Sequence[str] | None,
    metric_names: Sequence[str] | None,
    label_smoothing: float,
) -> tuple[str, ...]:
    """The pools to read. Raises UsageError for a name that is not known."""
    if not embeddings:
        raise UsageError("no embeddings to probe: give at least one .parquet file of octjepa embed")
    for what, given, known in (("probe", probes, PROBES), ("metric", metric_names, tuple(METRICS))):
        unknown = [name for name in given or () if name not in known]
        if unknown or (given is not None and not given):
            raise UsageError(f"no {what} {', '.join(unknown) or 'given'}: known are {', '.join(known)}")
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label smoothing is {label_smoothing}, expected a share from 0 to below 1")
    if pools is not None:
        return pooling.check_pools(pools)
    common = set(pooling.POOL_WIDTHS).intersection(*(pooling.readable_pools(table.pools) for table in embeddings))
    if not common:
        raise UsageError("the tables share no pooling: embed them again with the same --pool")
    return tuple(name for name in pooling.POOL_WIDTHS if name in common)


def _spaces(features: np.ndarray, asked: Sequence[PreparedTarget]) -> Iterator[tuple[PreparedTarget, FeatureSpace]]:
    """Targets with the same labelled rows share standardised, rotated features and neighbour lists."""
    spaces: dict[bytes, FeatureSpace] = {}
    for one in asked:
        same = b"|".join(rows.tobytes() for rows in one.fit_target.indices.values())
        if same not in spaces:
            spaces[same] = feature_space(features, one.fit_target)
        yield one, spaces[same]


def _token_rows(cases: Cases, by_volume: bool, volumes: int) -> np.ndarray:
    """The volume whose tokens stand for each row that is learnt from."""
    if by_volume:
        return np.arange(volumes)
    many = sum(len(case) > 1 for case in cases.members)
    if many:
        raise UsageError(
            f"{many} cases have several volumes, whose tokens have no mean: probe with --several scores or "
            "best_quality, or without the attentive probe"
        )
    return np.concatenate(cases.members)


def _attend(
    folder: TokenFolder, view: str, frame: pd.DataFrame, asked: Sequence[PreparedTarget], smoothing: float, seed: int
) -> list[ProbeFit]:
    """The attentive probe for every target; `frame` are the rows that are learnt from."""
    train = np.flatnonzero((frame["split"] == "train").to_numpy())
    targets, hows = [one.fit_target for one in asked], [one.selection for one in asked]
    return probe_training.attentive(folder, view, frame["volume_id"].tolist(), train, targets, hows, smoothing, seed)


def _keep(row: ResultKey, probed: ProbeFit, one: PreparedTarget, result: ProbeResult) -> None:
    """Records predictions and the chosen setting, and says where a fit did not converge."""
    result.predicted[row] = (one.test_target, one.predictions(probed.predictions))
    choice = {**vars(row), "setting": probed.setting, "by": one.selection.by, "unconverged": probed.unconverged}
    result.choices.append(choice)
    if probed.unconverged:
        result.add_note(
            f"{probed.unconverged} fit(s) of {row.name} ({row.probe}, {row.pool}) for {row.target} stopped before "
            "convergence"
        )
