"""Frozen probes: small models on the features of an encoder that is not trained further.

Embedding tables and a label file go in; results {name, target, probe, pool, metric, value, low, high, n} come out,
always with majority, covariates, histogram and untrained beside the encoder's, and the paired difference to the
untrained encoder. Probes are fitted on split train, their settings selected on val (or inside train), and measured on
test once. Fails with UsageError on people in two splits, on labels that match no scan and on targets that cannot be
measured; of several targets such a target is left out with a note.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from octjepa.embed.alignment import NamedTables, align_tables, feature_sets, name_tables, token_sets
from octjepa.embed.table import Embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.encoders import pooling
from octjepa.errors import UsageError
from octjepa.evaluate.attention_maps import list_attention
from octjepa.evaluate.calibration import ProbeFit
from octjepa.evaluate.case_predictions import list_predictions
from octjepa.evaluate.cases import Cases, PreparedTarget, group_cases, prepare_targets
from octjepa.evaluate.features import (
    PROBES,
    TOKEN_PROBES,
    FeatureSpace,
    covariate_features,
    feature_space,
    majority_predictions,
)
from octjepa.evaluate.label_fractions import limit_prepared
from octjepa.evaluate.labels import read_labels, split_multilabel
from octjepa.evaluate.results import (
    MACRO,
    PredictionsByKey,
    ProbeResult,
    ResultKey,
    compare_with_baselines,
    compare_with_untrained,
    describe_target,
    measure_predictions,
    measure_subgroups,
)
from octjepa.evaluate.subgroup_columns import SubgroupColumn, read_groups
from octjepa.evaluate.survival import DEFAULT_PROBES, check_survival, join_events
from octjepa.evaluate.targets import check_people, test_set_hash
from octjepa.metrics import test_set_ledger
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.findings import Findings
from octjepa.metrics.scores import METRICS
from octjepa.progress import bar

COMMAND = "octjepa probe"
ATTENTION = "attention"  # the pooling of token probes, learned from labels

Fits = Iterator[tuple[ResultKey, PreparedTarget, ProbeFit]]


@dataclass(frozen=True)
class ProbeSettings:
    """How embeddings are probed.

    probes: names in PROBES and TOKEN_PROBES. task: one of `targets.TASKS`. pools: default, all that every table holds.
    metrics: default, all of the task. bootstrap: resamples. level, several, visit_order: see `cases`.
    label_smoothing: of mlp and attentive. paired_probe and paired_pool name the comparison reported in `paired` before
    any test figure is seen; where that probe is not run, the last of those that are, where that pool is not,
    `pooling.default_pool` of those that are. labelled: numbers of training people whose labels alone are read, for
    `ProbeResult.labelled`. subgroups: columns by whose groups the results of that probe and pool are measured, for
    `ProbeResult.subgroups`. event: with task survival the column that says whether the event happened, the targets
    being times. attention: also keeps where attentive probes look in volumes of val and test, for
    `ProbeResult.attention`.
    """

    probes: Sequence[str] = DEFAULT_PROBES
    task: str = "auto"
    pools: Sequence[str] | None = None
    metrics: Sequence[str] | None = None
    bootstrap: int = 2000
    seed: int = 0
    paired_probe: str = "linear"
    paired_pool: str = pooling.DEFAULT_POOL
    level: str = "volume"
    several: str = "features"
    visit_order: Mapping[str, float] | None = None
    label_smoothing: float = 0.0
    labelled: Sequence[int] = ()
    subgroups: Sequence[SubgroupColumn] = ()
    event: str | None = None
    attention: bool = False


def run_probes(
    embeddings: Sequence[Embeddings],
    labels_path: str | Path,
    targets: Sequence[str],
    settings: ProbeSettings | None = None,
    tokens: Sequence[TokenFolder] = (),
    ledger_folder: Path | None = None,
) -> ProbeResult:
    """Probes every table for every target.

    tokens: a folder for each table, for token probes. ledger_folder: counts the uses of each test set; default beside
    the labels. Raises UsageError: nothing to probe, an unknown probe, pool, metric, task, level or rule, tables or
    tokens that do not fit together, a ledger that cannot be written, and everything that `read_labels`, `check_people`
    and, for a single target, `join_labels` raise.
    """
    settings = settings or ProbeSettings()
    pools = _check_settings(embeddings, settings)
    _check_used(settings, tokens)
    names = list(dict.fromkeys(targets))
    labels = read_labels(labels_path, names if settings.event is None else [*names, settings.event])
    ledger = ledger_folder or test_set_ledger.default_folder(Path(labels_path))
    test_set_ledger.check_writable(ledger)
    result = ProbeResult()
    tables = name_tables(align_tables(embeddings, result), result.add_note)
    frame = tables[0][1].frame
    result.add_notes(check_people(frame))
    leaked = max(table.leaked for table in embeddings)
    if leaked:
        raise UsageError(
            f"leak: the encoder was pretrained on eyes of {leaked} people who are now in val or test, so their figures "
            "would be too good. Give the store the split it was trained with, or pretrain again, then embed again."
        )
    if settings.event is not None:
        labels = join_events(labels, names, settings.event)
    result.add_notes(labels.notes)
    task = settings.task
    if task == "multilabel":
        labels, names = split_multilabel(labels, names)
        task = "binary"
    cases = group_cases(frame, settings.level, settings.several, settings.visit_order)
    result.protocol = cases.about
    result.add_notes(cases.notes())
    prepared = prepare_targets(labels, frame, cases, names, task, settings.seed, result)
    test_targets = [target.test_target for target in prepared]
    result.targets = [describe_target(target) for target in test_targets]
    case_frame = cases.frame(frame)
    groups = read_groups(settings.subgroups, labels_path, case_frame)
    people = case_frame["person_id"].to_numpy(dtype=str)
    test_people = {target.name: people[target.indices["test"]].tolist() for target in test_targets}
    draws = Draws([person for ids in test_people.values() for person in ids], settings.bootstrap, settings.seed)

    inputs = ProbeInputs(tables, cases, prepared, pools, settings, tokens)
    test_sets = {target.name: test_set_hash(labels, frame, target.name) for target in test_targets}
    with_fewer_labels = {count: _limit_labels(inputs, count, result) for count in settings.labelled}
    fingerprints = inputs.fingerprints()
    fingerprints += [
        f"{fingerprint} labelled {count}"
        for count, fewer in with_fewer_labels.items()
        if fewer.prepared
        for fingerprint in fingerprints
    ]
    test_set_ledger.record_uses(ledger, COMMAND, test_sets, dict.fromkeys(test_sets, fingerprints), result)
    for target in test_targets:
        key = ResultKey("majority", target.name, "constant", "none")
        result.predicted[key] = target, majority_predictions(target)
    # One thread: these matrices are small, and the result then does not depend on the number of cores.
    with bar("probes", None, "fit") as shown, threadpool_limits(1):
        for key, prepared_target, fit in inputs.fits(result):
            result.predicted[key] = prepared_target.test_target, prepared_target.predictions(fit.predictions)
            choice = {"setting": fit.setting, "by": prepared_target.selection.by, "unconverged": fit.unconverged}
            result.choices.append({**vars(key), **choice})
            if fit.unconverged:
                result.add_note(
                    f"{fit.unconverged} fit(s) of {key.name} ({key.probe}, {key.pool}) for {key.target} stopped before "
                    "convergence"
                )
            shown.advance()

    measured = measure_predictions(result.predicted, test_people, draws, settings.metrics, result)
    result.rows, result.confusions = measured.rows, measured.confusions
    result.comparisons = compare_with_untrained(test_targets, tables, measured.estimates)
    probe = settings.paired_probe if settings.paired_probe in settings.probes else settings.probes[-1]
    pool = settings.paired_pool if settings.paired_pool in pools else pooling.default_pool(pools)
    compared = {comparison["target"] for comparison in result.comparisons}
    headline = {
        "name": tables[0][0],
        "target": MACRO if MACRO in compared else test_targets[0].name,
        "probe": probe,
        "pool": ATTENTION if probe in TOKEN_PROBES else pool,
    }
    result.paired = next((pair for pair in result.comparisons if headline.items() <= pair.items()), {})
    result.case_predictions = list_predictions(result.predicted, headline, cases, frame)
    result.baselines = compare_with_baselines(result.paired, measured.estimates)
    read_by = {key: found for key, found in result.predicted.items() if _is_read_by(key, probe, headline["pool"])}
    result.subgroups = measure_subgroups(read_by, groups, test_people, draws, settings.metrics)
    for count, fewer in with_fewer_labels.items():
        _measure_labelled(count, fewer, tables, test_people, draws, result)
    return result


def _is_read_by(key: ResultKey, probe: str, pool: str) -> bool:
    """Whether a result is that of `probe` and `pool`, or of a baseline without a pool."""
    return (key.probe, key.pool) == (probe, pool) or (key.pool == "none" and key.probe in (probe, "linear"))


def _limit_labels(inputs: ProbeInputs, count: int, result: ProbeResult) -> ProbeInputs:
    """`inputs` with the labels of `count` training people alone; targets that are left out are recorded in `result`."""
    prepared, reasons = limit_prepared(inputs.prepared, inputs.person_ids, count, inputs.settings.seed)
    result.labelled[str(count)] = {"rows": [], "comparisons": [], "left_out": reasons}
    result.add_notes([f"{count} labelled people: {reason}; left out" for reason in reasons])
    return inputs.with_targets(prepared)


def _measure_labelled(
    count: int,
    inputs: ProbeInputs,
    tables: NamedTables,
    test_people: Mapping[str, Sequence[str]],
    draws: Draws,
    result: ProbeResult,
) -> None:
    """Fills `result.labelled[count]`: rows and comparisons as those of the whole labels.

    The macro mean is over the targets of the whole result, so that it is one curve: where one of them is left out,
    there is none.
    """
    predicted: PredictionsByKey = {}
    findings = Findings()
    with bar(f"{count} labelled", None, "fit") as shown, threadpool_limits(1):
        for key, target, fit in inputs.fits(result):
            predicted[key] = target.test_target, target.predictions(fit.predictions)
            shown.advance()
    if not inputs.prepared:
        return
    measured = measure_predictions(predicted, test_people, draws, inputs.settings.metrics, findings)
    comparisons = compare_with_untrained([target.test_target for target in inputs.prepared], tables, measured.estimates)
    whole = not result.labelled[str(count)]["left_out"]
    for name, found in (("rows", measured.rows), ("comparisons", comparisons)):
        result.labelled[str(count)][name] = [entry for entry in found if whole or entry["target"] != MACRO]


def _check_settings(embeddings: Sequence[Embeddings], settings: ProbeSettings) -> tuple[str, ...]:
    """The pools to read. Raises UsageError for a name that is not known."""
    if not embeddings:
        raise UsageError("no embeddings to probe: give at least one .parquet file of octjepa embed")
    known_probes = (*PROBES.names(), *TOKEN_PROBES.names())
    for kind, given, known in (("probe", settings.probes, known_probes), ("metric", settings.metrics, tuple(METRICS))):
        unknown = [name for name in given or () if name not in known]
        if unknown or (given is not None and not given):
            raise UsageError(f"no {kind} {', '.join(unknown) or 'given'}: known are {', '.join(known)}")
    check_survival(settings.task, settings.event, settings.probes)
    if settings.attention and not set(settings.probes) & set(TOKEN_PROBES.names()):
        raise UsageError("only a probe on tokens attends to them: give --probe attentive, and --tokens FOLDER")
    if not 0 <= settings.label_smoothing < 1:
        raise UsageError(f"label smoothing is {settings.label_smoothing}, expected a share from 0 to below 1")
    if settings.pools is not None:
        return pooling.check_pools(settings.pools)
    common = set(pooling.POOL_WIDTHS).intersection(*(pooling.readable_pools(table.pools) for table in embeddings))
    if not common:
        raise UsageError("the tables share no pooling: embed them again with the same --pool")
    return tuple(name for name in pooling.POOL_WIDTHS if name in common)


def _check_used(settings: ProbeSettings, tokens: Sequence[TokenFolder]) -> None:
    """Raises UsageError for a setting that would change nothing: its user expects that it does."""
    probes, several = set(settings.probes), settings.several
    if tokens and not probes & set(TOKEN_PROBES.names()):
        raise UsageError("tokens are read by a probe on tokens alone: add --probe attentive, or leave out --tokens")
    if settings.label_smoothing and probes <= {"linear", "knn"}:
        raise UsageError("labels are smoothed for mlp and attentive alone: add one of them with --probe")
    if settings.visit_order is not None and several != "first_visit":
        raise UsageError("an order of visits is unused unless the first one is taken: add --several first_visit")
    if settings.level == "volume" and several in ("scores", "best_quality"):
        raise UsageError(f"--several {several} joins the volumes of an eye or person: add --level eye or person")


class ProbeInputs:
    """What probes are fitted to: feature sets, token folders and covariates, for every prepared target."""

    def __init__(
        self,
        tables: NamedTables,
        cases: Cases,
        prepared: Sequence[PreparedTarget],
        pools: Sequence[str],
        settings: ProbeSettings,
        tokens: Sequence[TokenFolder],
    ) -> None:
        self.prepared, self.settings = prepared, settings
        volumes = tables[0][1].frame
        frame = volumes if cases.averages_scores else cases.frame(volumes)
        self.person_ids = frame["person_id"].to_numpy(dtype=str)  # of what targets are fitted to
        self.token_probes = [name for name in settings.probes if name in TOKEN_PROBES]
        self.feature_probes = [name for name in settings.probes if name not in self.token_probes]
        # With token probes alone, the baselines without a pool are still read, by the linear probe.
        self.pools = tuple(pools) if self.feature_probes else ()
        self.tables = tables if cases.averages_scores else [(name, cases.aggregate(table)) for name, table in tables]
        self.token_sets = list(token_sets(tables, tokens)) if self.token_probes else []
        self.token_frame = volumes.iloc[_token_positions(cases, len(volumes))] if self.token_probes else volumes

    def with_targets(self, prepared: Sequence[PreparedTarget]) -> ProbeInputs:
        """The same features for other targets, of which no attention is kept."""
        other = copy.copy(self)
        other.prepared, other.settings = prepared, replace(self.settings, attention=False)
        return other

    def fingerprints(self) -> list[str]:
        """What identifies each thing measured, for the ledger of test sets."""
        found = [
            test_set_ledger.fingerprint(features, probe)
            for _, _, features in feature_sets(self.tables, self.pools)
            for probe in self.feature_probes or ("linear",)
        ]
        return found + [
            f"{folder.weights} {view} {probe}" for _, folder, view in self.token_sets for probe in self.token_probes
        ]

    def fits(self, result: ProbeResult) -> Fits:
        """Fits every probe to every input; notes on covariates, and attention, go to `result`."""
        smoothing, seed = self.settings.label_smoothing, self.settings.seed
        for name, pool, features in feature_sets(self.tables, self.pools):
            for target, space in self._spaces(features):
                for probe in self.feature_probes or ("linear",):
                    key = ResultKey(name, target.test_target.name, probe, pool)
                    yield key, target, PROBES.get(probe)(space, target.fit_target, target.selection, smoothing, seed)
        if not self.prepared:
            return
        fit_targets, selections = zip(*((target.fit_target, target.selection) for target in self.prepared), strict=True)
        ids = self.token_frame["volume_id"].tolist()
        train = np.flatnonzero((self.token_frame["split"] == "train").to_numpy())
        held_out = np.flatnonzero(self.token_frame["split"].isin(["val", "test"]).to_numpy())
        for name, folder, view in self.token_sets:
            for probe in self.token_probes:
                fits = TOKEN_PROBES.get(probe)(folder, view, ids, train, fit_targets, selections, smoothing, seed)
                for target, fit in zip(self.prepared, fits, strict=True):
                    if self.settings.attention:
                        about = name, view == "untrained", target.test_target.name
                        result.attention += list_attention(*about, fit, folder, ids, held_out)
                    yield ResultKey(name, target.test_target.name, probe, ATTENTION), target, fit
        for target in self.prepared:
            features, notes = covariate_features(self.frame, target.fit_target)
            result.add_notes(notes)
            fit = PROBES.get("linear")(feature_space(features, target.fit_target), target.fit_target, target.selection)
            yield ResultKey("covariates", target.test_target.name, "linear", "none"), target, fit

    @property
    def frame(self) -> pd.DataFrame:
        """The volumes of the first table; all tables hold the same."""
        return self.tables[0][1].frame

    def _spaces(self, features: np.ndarray) -> Iterator[tuple[PreparedTarget, FeatureSpace]]:
        """Targets with the same labelled volumes share standardised, rotated features and neighbour lists."""
        spaces: dict[bytes, FeatureSpace] = {}
        for target in self.prepared:
            volumes = b"|".join(positions.tobytes() for positions in target.fit_target.indices.values())
            if volumes not in spaces:
                spaces[volumes] = feature_space(features, target.fit_target)
            yield target, spaces[volumes]


def _token_positions(cases: Cases, volumes: int) -> np.ndarray:
    """[cases] Position in the table of the volume whose tokens are read for each volume or case that is fitted."""
    if cases.averages_scores:
        return np.arange(volumes)
    many = sum(len(case) > 1 for case in cases.members)
    if many:
        raise UsageError(
            f"{many} cases have several volumes, whose tokens have no mean: probe with --several scores or "
            "best_quality, or without the attentive probe"
        )
    return np.concatenate(cases.members)
