"""The results at the top of the page, each with a value and a sentence, and the faults that come before them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octjepa.errors import counted, counted_are
from octjepa.evaluate.results import Paired, ProbePaired, Row, TunedPaired
from octjepa.metrics.findings import BASELINES, FEWEST_TEST_PEOPLE, Fault
from octjepa.metrics.intervals import LOWER_IS_BETTER
from octjepa.recipe.objectives import FACTS
from octjepa.report.cohort import Cohort
from octjepa.report.contents import Contents, Training
from octjepa.report.html import number, signed
from octjepa.store import Store

Verdict = Literal["good", "open", "bad", "none"]
MAX_LOST = 0.2  # share of files that may be lost, as `octjepa ingest --max-lost` has it by default
PREDICTORS = {
    "constant": "the mean of all tokens",
    "position_mean": "the mean of that position in the eye",
    "copy_nearest": "a copy of the nearest visible token",
}


@dataclass(frozen=True)
class Headline:
    """One result: its value as text, whether it holds, and a sentence that explains it.

    too_few_people: the test set has fewer than `FEWEST_TEST_PEOPLE` people, so that nothing is concluded.
    over_strongest: it compares with the strongest of the baselines that were measured.
    """

    title: str
    figure: str
    verdict: Verdict
    sentence: str
    too_few_people: bool = False
    over_strongest: bool = False


@dataclass(frozen=True)
class Contrast:
    """The words of a paired difference: both sides, both together, and what is tested by it."""

    title: str
    ours: str
    reference: str
    both: str
    tested: str


TRAINED = Contrast(
    "Trained minus untrained",
    "The probe on the trained encoder scores {0} than on",
    "the same network untrained",
    "the trained and the untrained encoder",
    "training",
)
TUNED = Contrast(
    "Tuned minus frozen",
    "The tuned encoder scores {0} than",
    "a linear probe on the same encoder frozen",
    "the tuned and the frozen encoder",
    "tuning",
)
HEAD_OVER = {  # by baseline
    "position_prior": Contrast(
        "Head minus position prior",
        "The head has a Dice {0} than",
        "the most frequent class of each position (it does not use the image)",
        "the head and the position prior",
        "looking at the scan",
    ),
    "untrained": Contrast(
        "Trained minus untrained",
        "The head on this encoder has a Dice {0} than",
        "the same head on it untrained",
        "the heads on the trained and the untrained encoder",
        "pretraining",
    ),
    "intensity": Contrast(
        "Head minus intensity",
        "The head on this encoder has a Dice {0} than",
        "the same head on intensities only",
        "the heads on the encoder and on intensities only",
        "the encoder",
    ),
}


def headlines(contents: Contents, cohort: Cohort | None) -> list[Headline]:
    """The packaged segmenter of a demo, files read, then the trained encoder against predictors and baselines."""
    result = [] if contents.segmenter is None else [_packaged_segmenter(contents.segmenter)]
    result += [] if cohort is None else [_files(cohort)]
    if contents.kind in ("run", "demo"):
        validations = contents.run.lines_with("val/loss") if contents.run else []
        paired = None if contents.probe is None else contents.probe.paired
        pretext = pretext_headline(validations[-1] if validations else None, _predicted(contents))
        result += [pretext, paired_headline(paired, TRAINED)]
        if contents.probe is not None:
            result += strongest_baseline_headline(contents.probe.rows, paired, contents.probe.baselines)
    elif contents.kind == "tuning":
        result += _tuning(contents.training)
    elif contents.kind == "segmentation":
        result += _head(contents.training)
    return result


def _packaged_segmenter(measured: Mapping[str, Any]) -> Headline:
    """Layers and fluid of the packaged segmenter on synthetic eyes with known truth."""
    error = f"{float(measured['boundary_error_um']):.1f} um"
    sentence = (
        f"On {counted(int(measured['eyes']), 'synthetic eye')}, one per device, the packaged segmenter places eight "
        f"boundaries with a mean error of {error}"
    )
    if measured.get("fluid_dice") is not None:
        sentence += f", and fluid with a Dice of {float(measured['fluid_dice']):.2f}"
    return Headline("Packaged segmenter", error, "good", sentence + ". The pictures are in segmented/index.html.")


def _files(cohort: Cohort) -> Headline:
    sentence = f"{cohort.volumes} of {counted(cohort.files, 'file')} read and accepted"
    refused = f"; {cohort.refused} refused, with the reason below. "
    sentence += refused if cohort.refused else "; none refused. "
    if cohort.uncertain:
        sentence += f"In {cohort.uncertain} of them a spacing is uncertain, and marked so. "
    leaks, share = cohort.people_in_two_splits, cohort.refused / max(cohort.files, 1)
    sentence += f"{counted_are(leaks, 'person')} in more than one split." if leaks else "No person is in two splits."
    verdict: Verdict = "bad" if leaks or share > MAX_LOST else "good"
    if share > MAX_LOST:
        lost = counted_are(cohort.refused, "scan")
        sentence += f" {lost} lost, {share:.0%} of the files; up to {MAX_LOST:.0%} pass by default."
    return Headline("Files read", f"{cohort.volumes} of {cohort.files}", verdict, sentence)


def _head(segmentation: Training | None) -> list[Headline]:
    """A segmentation head minus each of its baselines; the strongest of them leaves the smallest difference."""
    results = None if segmentation is None else segmentation.segmented
    pairs = [] if results is None else results.paired
    by_reference = {pair.reference: pair for pair in pairs if pair.reference in HEAD_OVER}
    smallest = min((pair.difference for pair in by_reference.values() if pair.difference is not None), default=None)
    compared = []
    for reference, words in HEAD_OVER.items():
        pair = by_reference.get(reference)
        strongest = pair is not None and pair.difference is not None and pair.difference == smallest
        compared.append(replace(paired_headline(pair, words), over_strongest=strongest))
    return compared


def _tuning(tuning: Training | None) -> list[Headline]:
    """For each target: tuned minus frozen, and minus the strongest baseline if one was measured for any target."""
    results = None if tuning is None else tuning.tuned
    pairs = [] if results is None else list(results.paired)
    named = [] if results is None else [summary.target for summary in results.targets]
    targets = list(dict.fromkeys([*named, *(pair.target for pair in pairs)]))  # also those without a difference
    has_baselines = any(pair.against == "best_baseline" for pair in pairs)
    compared = []
    for target in targets or [""]:
        against = {pair.against: pair for pair in pairs if pair.target == target}
        suffix = f", {target.replace('_', ' ')}" if len(targets) > 1 else ""
        compared.append(_tuned_headline(against.get("frozen"), TUNED, suffix))
        if has_baselines:
            best = against.get("best_baseline")
            headline = _tuned_headline(best, _over_best(best), suffix)
            compared.append(replace(headline, over_strongest=best is not None))
    return compared


def _tuned_headline(pair: TunedPaired | None, words: Contrast, suffix: str) -> Headline:
    """The suffix of the title names the target."""
    words = replace(words, title=words.title + suffix)
    return paired_headline(pair, words, pair is not None and pair.metric in LOWER_IS_BETTER)


def _over_best(best: TunedPaired | None) -> Contrast:
    name = "the strongest baseline" if best is None else best.reference.replace("_", " ")
    return Contrast(
        f"Tuned minus {name}",
        "The tuned encoder scores {0} than",
        f"{name}, the strongest baseline,",
        f"the tuned encoder and {name}, the strongest baseline,",
        "the tuned encoder",
    )


def _predicted(contents: Contents) -> str:
    """The noun for what the objective of the run predicts: features, voxels, or targets of another package."""
    if contents.run is None or contents.run.recipe is None:
        return "targets"
    facts = FACTS.get(contents.run.recipe.objective.name)
    return {"jepa": "features", "mae": "voxels"}.get(facts.module if facts else "", "targets")


def pretext_headline(validation: Mapping[str, Any] | None, predicted: str = "features") -> Headline:
    """Whether the learned predictor beats the trivial predictors on held-out people. predicted: features or voxels."""
    title = "Predicting hidden tissue"
    if validation is None:
        return Headline(title, "–", "none", "There is no validation, so nothing is known of the pretext task.")
    ours = float(validation["val/cosine"])
    keys = {name: f"val/baseline/{name}" for name in PREDICTORS}
    baselines = {name: float(validation[key]) for name, key in keys.items() if _is_finite(validation.get(key))}
    if not baselines or not math.isfinite(ours):
        sentence = "The trivial predictors were not measured, so nothing is compared."
        return Headline(title, number(ours), "none", sentence)
    best = max(baselines, key=lambda name: baselines[name])
    rival = f"{PREDICTORS[best]} ({number(baselines[best])})"
    sentence = (
        f"On held-out people the predictor reaches a cosine of {number(ours)} with the hidden tokens’ {predicted}. "
    )
    unbeaten = [name.replace("_", " ") for name, cosine in baselines.items() if ours <= cosine]
    if unbeaten:
        sentence += (
            f"It does not beat {' or '.join(unbeaten)}. The best of these, {rival}, needs no learning: the task is not "
            "learned yet."
        )
        return Headline(title, number(ours), "bad", sentence)
    sentence += f"It beats all {len(baselines)} predictors that see nothing of the eye; the best of them is {rival}."
    return Headline(title, number(ours), "good", sentence + _centred_sentence(validation))


def _centred_sentence(validation: Mapping[str, Any]) -> str:
    """Whether the loss is the lowest with every view centred as well; empty if it was not measured."""
    ours = validation.get("val_centred/loss")
    losses = [validation.get(f"val_centred/baseline_loss/{name}") for name in PREDICTORS]
    measured = [float(value) for value in losses if value is not None]
    if ours is None or not measured:
        return ""
    loss, best = number(float(ours)), number(min(measured))
    if loss == best:
        return f" With every view centred it is as good as the best of them: loss {loss} against {best}."
    holds = "also beats them" if float(ours) < min(measured) else "does not beat them"
    return f" With every view centred it {holds}: loss {loss} against {best}."


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(float(value))


def paired_headline(pair: Paired | None, words: Contrast, lower_is_better: bool = False) -> Headline:
    """A paired difference in words; an interval that contains zero shows nothing, whichever sign the value has."""
    if pair is None or pair.difference is None:
        sentence = f"No paired difference was measured, so it is not known whether {words.tested} helped."
        return Headline(words.title, "–", "none", sentence)
    value = float(pair.difference)
    if pair.low is None or pair.high is None:
        sentence = (
            f"The difference is {signed(value)}, without a 95 % interval (fewer than six people are held out, or it is "
            "the same in every resample): it shows nothing."
        )
        few = pair.n_people is not None and pair.n_people < FEWEST_TEST_PEOPLE
        return Headline(words.title, signed(value), "open", sentence, too_few_people=few)
    low, high = float(pair.low), float(pair.high)
    interval = f"95 % interval {signed(low)} to {signed(high)}, people resampled"
    if pair.n_people is not None and pair.n_people < FEWEST_TEST_PEOPLE:
        sentence = (
            f"The difference between {words.both} is {signed(value)} ({interval}). "
            f"{counted(pair.n_people, 'test person')} cannot show whether {words.tested} helped: use at least "
            f"{FEWEST_TEST_PEOPLE}."
        )
        return Headline(words.title, signed(value), "open", sentence, too_few_people=True)
    if low > 0 or high < 0:
        good = (low > 0) != lower_is_better
        is_model = words.tested.startswith("the ")  # otherwise an action, such as training
        outcome = ("is better", "is worse") if is_model else ("helped", "reduced performance")
        aside = ", and less is better," if lower_is_better else ""
        sentence = (
            f"{words.ours.format('higher' if low > 0 else 'lower')} {words.reference}{aside} by {number(abs(value))} "
            f"({interval}). The interval excludes zero: {words.tested} "
            f"{outcome[0] if good else outcome[1]} on these people."
        )
        return Headline(words.title, signed(value), "good" if good else "bad", sentence)
    sentence = (
        f"The difference between {words.both} is {signed(value)} ({interval}). The interval contains zero: this run "
        f"does not show that {words.tested} helped. More held-out people would narrow it."
    )
    return Headline(words.title, signed(value), "open", sentence)


def _value(row: Row) -> float:
    return math.nan if row.value is None else float(row.value)


def strongest_baseline_headline(
    rows: Sequence[Row], paired: ProbePaired | None, differences: Sequence[ProbePaired] = ()
) -> list[Headline]:
    """The encoder of `paired` against the baseline that scores highest on its target, unless that is the untrained one.

    Only rows with the probe and the pooling of `paired` are compared, as in the table that `octjepa probe` prints; a
    baseline without a pooling that this probe did not read is there with its first probe. The baseline is chosen by its
    metric on these people, which favours it. `differences` may hold the paired difference to
    it; without one, a higher metric of the encoder shows nothing.
    """
    if paired is None:
        return []
    rows = [
        row
        for row in rows
        if (row.target, row.metric) == (paired.target, paired.metric)
        and row.pool in (paired.pool, "none")
        and (row.probe in (paired.probe, "constant") or row.pool == "none")
        and _is_finite(row.value)
    ]
    read: dict[str, Row] = {}
    for row in rows:
        if row.probe == paired.probe or row.name not in read:
            read[row.name] = row
    ours = read.get(paired.name)
    sign = -1 if paired.metric in LOWER_IS_BETTER else 1
    baselines = [row for name, row in read.items() if name.partition(":")[0] in BASELINES]
    if ours is None or not baselines:
        return []
    best = max(baselines, key=lambda row: sign * _value(row))
    if best.name == (paired.reference or "untrained"):
        return []  # the paired difference above already compares with the strongest baseline
    title, name = f"Trained minus {best.name}", best.name.replace("_", " ")
    pair = next((difference for difference in differences if difference.reference == best.name), None)
    if pair is not None:
        words = Contrast(
            title,
            "The probe on the trained encoder scores {0} than",
            f"{name}, the strongest baseline,",
            f"the trained encoder and {name}, the strongest baseline,",
            "the encoder",
        )
        return [replace(paired_headline(pair, words, sign < 0), over_strongest=True)]
    difference = _value(ours) - _value(best)
    beats = sign * difference > 0
    sentence = (
        f"The strongest baseline is {name} with {number(best.value)}; the trained encoder has {number(ours.value)}. "
    )
    sentence += (
        "No interval of their difference was measured, so it shows nothing."
        if beats
        else f"The encoder is not better than {name} on these people, and {name} needs no pretraining."
    )
    return [Headline(title, signed(difference), "open" if beats else "bad", sentence, over_strongest=True)]


def faults(contents: Contents, cohort: Cohort | None) -> list[Fault]:
    """Faults of the store, of the embeddings, and as the probe found them; only counts, no person's id."""
    result: list[Fault] = []
    for where, count in (
        ("store", 0 if cohort is None else cohort.people_in_two_splits),
        ("embeddings", 0 if contents.embeddings is None else contents.embeddings.in_two_splits),
    ):
        if count:
            what = f"people in more than one split of the {where}: {count}. What is measured on test people is too good"
            result.append(Fault("leaked_person", f"{what}, and probes refuse it"))
    if contents.embeddings is not None and contents.embeddings.leaked:
        what = f"people of val or test whose eyes the encoder was pretrained on: {contents.embeddings.leaked}"
        result.append(Fault("leaked_person", f"{what}. Probes refuse these embeddings"))
    if contents.store is not None:
        result += [Fault("lost_group", what) for what in _sites_without_volumes(contents.store)]
    return result + (contents.probe.faults if contents.probe is not None else [])


def _sites_without_volumes(store: Store) -> list[str]:
    """Clinical sites of the participants' table whose people have no volume."""
    people = store.participants
    if "clinical_site" not in people:
        return []
    located = people[people["clinical_site"].astype(str).str.strip() != ""].dropna(subset=["clinical_site"])
    stored = set(located.loc[located["person_id"].isin(store.table["person_id"]), "clinical_site"])
    counts = Counter(str(site) for site in located["clinical_site"] if site not in stored)
    return [
        f"clinical site {site} is lost: none of its {count} people in participants.tsv has a volume in the store"
        for site, count in sorted(counts.items())
    ]
