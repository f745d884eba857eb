"""Frozen probes: small models on the features of an encoder that is not trained further.

Embedding tables and a label file go in; results {name, target, probe, pool, metric, value, low, high, n} come out,
always with majority, covariates, histogram and untrained next to the encoder's, and the paired difference to the
untrained encoder. Probes are fitted on split train, their settings selected on val (or inside train), and measured on
test once. Fails with UsageError on people in two splits, on labels that match no scan and on targets that cannot be
measured; of several targets such a target is left out with a note.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from octjepa.embed.alignment import NamedTables, align_tables, feature_sets, name_tables, token_sets
from octjepa.embed.table import Embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.encoders import pooling
from octjepa.errors import UsageError
from octjepa.evaluate.attention import VolumeAttention, list_attention
from octjepa.evaluate.calibration import ProbeFit
from octjepa.evaluate.case_predictions import CasePrediction, list_predictions
from octjepa.evaluate.cases import Cases, PreparedTarget
from octjepa.evaluate.features import (
    PROBES,
    TOKEN_PROBES,
    FeatureSpace,
    covariate_features,
    feature_space,
    majority_predictions,
)
from octjepa.evaluate.label_fractions import limit_prepared
from octjepa.evaluate.measurements import (
    MACRO,
    PredictionsByKey,
    compare_with_baselines,
    compare_with_untrained,
    describe_target,
    measure_subgroups,
)
from octjepa.evaluate.protocol import (
    Candidate,
    Evaluation,
    Ledger,
    ProtocolSettings,
    TestSet,
    prepare_evaluation,
    read_target_labels,
    refuse_leaks,
)
from octjepa.evaluate.results import (
    CaseProtocol,
    Choice,
    Confusion,
    ProbePaired,
    ResultKey,
    Row,
    SubgroupResult,
    TargetSummary,
    TunedChoice,
    WithFewerLabels,
    findings_json,
)
from octjepa.evaluate.subgroups import SubgroupColumn
from octjepa.evaluate.survival import DEFAULT_PROBES, check_survival
from octjepa.metrics import test_set_ledger
from octjepa.metrics.findings import Findings
from octjepa.metrics.scores import METRICS
from octjepa.progress import bar
from octjepa.record import to_json

COMMAND = "octjepa probe"
ATTENTION = "attention"  # the pooling of token probes, learned from labels

Fits = Iterator[tuple[ResultKey, PreparedTarget, ProbeFit]]


_NOT_SMOOTHED = frozenset({"linear", "knn"})  # probes that labels are not smoothed for


@dataclass(frozen=True)
class ProbeSettings:
    """How embeddings are probed.

    probes: names in PROBES and TOKEN_PROBES. task: one of `targets.TASKS`. pools: default, all that every table holds.
    metrics: default, all of the task. bootstrap: resamples. level, several, visit_order: see `cases`.
    label_smoothing: of mlp and attentive. paired_probe and paired_pool name the comparison reported in `paired` before
    any test metric is seen; if that probe is not run, the last of those that are, if that pool is not,
    `pooling.default_pool` of those that are. labelled: train also with the labels of this many people, for
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

    def protocol(self) -> ProtocolSettings:
        """The part that the evaluation protocol needs."""
        return ProtocolSettings(
            self.task, self.level, self.several, self.visit_order, self.event, self.subgroups, self.bootstrap, self.seed
        )


@dataclass
class ProbeResult(Findings):
    """Result of a probe run; `payload` is what `octjepa probe` prints and the report draws.

    rows: n counts test cases (volumes, eyes or people), n_people the people behind them.
    paired: the first encoder minus the same network randomly initialised, on the same people; None if one of the two
        is undefined.
    comparisons: the same for every encoder, target, probe and pool; to be read, not to pick the best.
    baselines: the encoder's result of `paired` minus that of every other baseline on the same people.
    choices: what was selected for each result. confusions: test case counts.
    targets: task, classes, counts by split and class weights. protocol: the unit of analysis and its aggregation.
    labelled: by number of labelled training people, as text.
    subgroups: of the results that `paired` compares.
    predicted: target and test predictions by key; not part of the payload.
    case_predictions: those of `paired` case by case, as `case_predictions.list_predictions`; not part of the payload.
    attention: where attentive probes look, as `evaluate.attention` lists it; not part of the payload.
    """

    rows: list[Row] = field(default_factory=list)
    paired: ProbePaired | None = None
    comparisons: list[ProbePaired] = field(default_factory=list)
    baselines: list[ProbePaired] = field(default_factory=list)
    choices: list[Choice | TunedChoice] = field(default_factory=list)
    confusions: list[Confusion] = field(default_factory=list)
    targets: list[TargetSummary] = field(default_factory=list)
    protocol: CaseProtocol | None = None
    labelled: dict[str, WithFewerLabels] = field(default_factory=dict)
    subgroups: list[SubgroupResult] = field(default_factory=list)
    predicted: PredictionsByKey = field(default_factory=dict)
    case_predictions: list[CasePrediction] = field(default_factory=list)
    attention: list[VolumeAttention] = field(default_factory=list)

    def payload(self) -> dict[str, object]:
        """The result as plain data for JSON."""
        return {
            **findings_json(self),
            "rows": to_json(self.rows),
            "paired": {} if self.paired is None else self.paired.to_json(),
            "comparisons": to_json(self.comparisons),
            "baselines": to_json(self.baselines),
            "choices": to_json(self.choices),
            "confusions": to_json(self.confusions),
            "targets": to_json(self.targets),
            "protocol": {} if self.protocol is None else self.protocol.to_json(),
            "labelled": {count: fewer.to_json() for count, fewer in self.labelled.items()},
            "subgroups": to_json(self.subgroups),
        }


def run_probes(
    embeddings: Sequence[Embeddings],
    labels_path: str | Path,
    targets: Sequence[str],
    settings: ProbeSettings | None = None,
    tokens: Sequence[TokenFolder] = (),
    ledger_folder: Path | None = None,
) -> ProbeResult:
    """Probes every table for every target.

    tokens: a folder for each table, for token probes. ledger_folder: counts the uses of each test set; default next to
    the labels. Raises UsageError: nothing to probe, an unknown probe, pool, metric, task, level or rule, tables or
    tokens that do not fit together, a ledger that cannot be written, and everything that `read_labels`, `check_people`
    and, for a single target, `join_labels` raise.
    """
    settings = settings or ProbeSettings()
    pools = _check_settings(embeddings, settings)
    _check_used(settings, tokens)
    names = list(dict.fromkeys(targets))
    labels = read_target_labels(labels_path, names, settings.event)
    ledger = Ledger.of(labels_path, ledger_folder, COMMAND)
    result = ProbeResult()
    tables = name_tables(align_tables(embeddings, result), result.add_note)
    refuse_leaks(max(table.leaked for table in embeddings), "the encoder", "pretrain again, then embed again.")
    evaluation = prepare_evaluation(tables[0][1].frame, labels, names, settings.protocol(), result)
    result.protocol = evaluation.cases.about
    result.add_notes(evaluation.cases.notes())
    evaluation.report_targets(result)
    prepared = evaluation.targets
    test_targets = [target.test_target for target in prepared]
    result.targets = [describe_target(target) for target in test_targets]

    inputs = ProbeInputs(tables, evaluation, pools, settings, tokens)
    with_fewer_labels = {count: _limit_labels(inputs, count, result) for count in settings.labelled}
    fingerprints = inputs.fingerprints()
    fingerprints += [
        f"{fingerprint} labelled {count}"
        for count, (fewer, _) in with_fewer_labels.items()
        if fewer.prepared
        for fingerprint in fingerprints
    ]
    measured_things = dict.fromkeys(evaluation.test_sets, fingerprints)
    test_set = evaluation.open_test_set(ledger, measured_things, result)
    candidates = _with_majority(prepared, _candidates(inputs, "probes", result, result.choices))
    result.predicted, measured = test_set.measure(candidates, settings.metrics, result)
    result.rows, result.confusions = measured.rows, measured.confusions
    result.comparisons = compare_with_untrained(test_targets, tables, measured.estimates)
    headline = _headline(tables[0][0], settings, pools, result.comparisons, test_targets[0].name)
    result.paired = next((pair for pair in result.comparisons if pair.key == headline), None)
    result.case_predictions = list_predictions(result.predicted, headline, evaluation.cases, evaluation.volumes)
    result.baselines = compare_with_baselines(result.paired, measured.estimates)
    read_by = {key: predictions for key, predictions in result.predicted.items() if _is_read_by(key, headline)}
    result.subgroups = measure_subgroups(read_by, evaluation.groups, test_set.people, test_set.draws, settings.metrics)
    for count, (fewer, reasons) in with_fewer_labels.items():
        result.labelled[str(count)] = _measure_labelled(count, fewer, reasons, tables, test_set)
    return result


def _headline(
    name: str, settings: ProbeSettings, pools: Sequence[str], comparisons: Sequence[ProbePaired], first_target: str
) -> ResultKey:
    """Whose result is compared in `ProbeResult.paired`; fixed by the settings, not by test results."""
    probe = settings.paired_probe if settings.paired_probe in settings.probes else settings.probes[-1]
    pool = settings.paired_pool if settings.paired_pool in pools else pooling.default_pool(pools)
    target = MACRO if any(pair.target == MACRO for pair in comparisons) else first_target
    return ResultKey(name, target, probe, ATTENTION if probe in TOKEN_PROBES else pool)


def _is_read_by(key: ResultKey, headline: ResultKey) -> bool:
    """Whether a result has the probe and pool of `headline`, or is that of a baseline without a pool."""
    same = (key.probe, key.pool) == (headline.probe, headline.pool)
    return same or (key.pool == "none" and key.probe in (headline.probe, "linear"))


def _with_majority(prepared: Sequence[PreparedTarget], candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    for target in prepared:
        key = ResultKey("majority", target.name, "constant", "none")
        yield Candidate(key, target, majority_predictions(target.test_target))
    yield from candidates


def _candidates(
    inputs: ProbeInputs, title: str, result: ProbeResult, choices: list[Choice | TunedChoice]
) -> Iterator[Candidate]:
    """Every probe, fitted to every input; what was selected for each goes to `choices`."""
    # One thread: these matrices are small, and the result then does not depend on the number of cores.
    with bar(title, None, "fit") as shown, threadpool_limits(1):
        for key, target, fit in inputs.fits(result):
            choices.append(
                Choice(**vars(key), setting=fit.setting, by=target.selection.by, unconverged=fit.unconverged)
            )
            yield Candidate.of_fit(key, target, fit.predictions)
            shown.advance()


def _limit_labels(inputs: ProbeInputs, count: int, result: ProbeResult) -> tuple[ProbeInputs, list[str]]:
    """`inputs` with the labels of only `count` training people, and why targets are left out."""
    prepared, reasons = limit_prepared(inputs.prepared, inputs.person_ids, count, inputs.settings.seed)
    result.add_notes([f"{count} labelled people: {reason}; left out" for reason in reasons])
    return inputs.with_targets(prepared), reasons


def _measure_labelled(
    count: int, inputs: ProbeInputs, reasons: Sequence[str], tables: NamedTables, test_set: TestSet
) -> WithFewerLabels:
    """Rows and comparisons as those of all labels.

    The macro mean is over the targets of the whole result, so that it is one curve: if one of them is left out, there
    is not a macro mean.
    """
    if not inputs.prepared:
        return WithFewerLabels(left_out=tuple(reasons))
    quiet = ProbeResult()
    candidates = _candidates(inputs, f"{count} labelled", quiet, quiet.choices)
    _, measured = test_set.measure(candidates, inputs.settings.metrics, quiet)
    targets = [target.test_target for target in inputs.prepared]
    comparisons = compare_with_untrained(targets, tables, measured.estimates)
    whole = not reasons
    return WithFewerLabels(
        tuple(row for row in measured.rows if whole or row.target != MACRO),
        tuple(pair for pair in comparisons if whole or pair.target != MACRO),
        tuple(reasons),
    )


def _check_settings(embeddings: Sequence[Embeddings], settings: ProbeSettings) -> tuple[str, ...]:
    """The pools to read. Raises UsageError for a name that is not known."""
    if not embeddings:
        raise UsageError("no embeddings to probe: give at least one .parquet file of octjepa embed")
    known_probes = (*PROBES.names(), *TOKEN_PROBES.names())
    for kind, chosen, allowed in (
        ("probe", settings.probes, known_probes),
        ("metric", settings.metrics, tuple(METRICS)),
    ):
        unknown = [name for name in chosen or () if name not in allowed]
        if unknown or (chosen is not None and not chosen):
            raise UsageError(f"no {kind} {', '.join(unknown) or 'given'}: known are {', '.join(allowed)}")
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
        raise UsageError("only probes on tokens read tokens: add --probe attentive, or leave out --tokens")
    if settings.label_smoothing and probes <= _NOT_SMOOTHED:
        raise UsageError("labels are only smoothed for mlp and attentive: add one with --probe")
    if settings.visit_order is not None and several != "first_visit":
        raise UsageError("an order of visits is unused unless the first one is taken: add --several first_visit")
    if settings.level == "volume" and several in ("scores", "best_quality"):
        raise UsageError(f"--several {several} joins the volumes of an eye or person: add --level eye or person")


class ProbeInputs:
    """The data that probes are fitted to: feature sets, token folders and covariates, for every prepared target."""

    def __init__(
        self,
        tables: NamedTables,
        evaluation: Evaluation,
        pools: Sequence[str],
        settings: ProbeSettings,
        tokens: Sequence[TokenFolder],
    ) -> None:
        cases = evaluation.cases
        self.prepared: Sequence[PreparedTarget] = evaluation.targets
        self.settings = settings
        volumes = tables[0][1].frame
        frame = volumes if cases.averages_scores else cases.frame(volumes)
        self.person_ids = frame["person_id"].to_numpy(dtype=str)  # of what targets are fitted to
        self.token_probes = [name for name in settings.probes if name in TOKEN_PROBES]
        self.feature_probes = [name for name in settings.probes if name not in self.token_probes]
        # With only token probes, the baselines without a pool are still read, by the linear probe.
        self.pools = tuple(pools) if self.feature_probes else ()
        self.tables = tables if cases.averages_scores else [(name, cases.aggregate(table)) for name, table in tables]
        self.token_sets = list(token_sets(tables, tokens)) if self.token_probes else []
        self.token_frame = volumes.iloc[_token_positions(cases, len(volumes))] if self.token_probes else volumes

    def with_targets(self, prepared: Sequence[PreparedTarget]) -> ProbeInputs:
        """The same features for other targets, whose attention is not kept."""
        other = copy.copy(self)
        other.prepared, other.settings = prepared, replace(self.settings, attention=False)
        return other

    def fingerprints(self) -> list[str]:
        """The identity of each measured encoder with its probe, for the ledger of test sets."""
        smoothing = self.settings.label_smoothing
        smoothed = set(self.settings.probes) - _NOT_SMOOTHED if smoothing else ()
        names = {probe: f"{probe} smoothing {smoothing}" for probe in smoothed}
        identities = [
            test_set_ledger.fingerprint(features, names.get(probe, probe))
            for _, _, features in feature_sets(self.tables, self.pools)
            for probe in self.feature_probes or ("linear",)
        ]
        return identities + [
            f"{folder.weights} {view} {names.get(probe, probe)}"
            for _, folder, view in self.token_sets
            for probe in self.token_probes
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
                        result.attention += list_attention(about, fit, folder, ids, held_out)
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
