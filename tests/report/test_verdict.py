"""The verdict in words follows the results below it, with the strongest baseline among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octjepa.evaluate.results import HeadPaired, TargetSummary, TunedPaired
from octjepa.metrics.findings import Fault
from octjepa.report.cohort import summarise_cohort
from octjepa.report.contents import Contents, Training
from octjepa.report.figures.curves import CHARTS, training_charts
from octjepa.report.figures.eyes import extreme_volumes, through_the_volume
from octjepa.report.headlines import Headline, headlines
from octjepa.report.verdict import overall_verdict
from octjepa.store import Store
from octjepa.tasks.finetune.result import FinetuneResult
from octjepa.tasks.segment.result import SegmentationResult


def line(update: int, **values: object) -> dict[str, object]:
    return {"update": update, "train/loss": 1.0 / update, **values}


def contents(*lines: dict[str, object]) -> Contents:
    return Contents(Path("run"), "run", training=Training(Path("run"), {}, "", list(lines)))


GOOD, OPEN, BAD, NONE = (
    Headline(f"Trained minus {kind}", "+0.1", kind, "") for kind in ("good", "open", "bad", "none")
)


@pytest.mark.parametrize(
    ("results", "word"),
    [
        ([GOOD], "healthy"),
        ([GOOD, OPEN], "suspicious"),
        ([GOOD, BAD], "suspicious"),
        ([GOOD, NONE], "not known"),
        ([GOOD, Headline("Files read", "1 of 2", "bad", "")], "broken"),
    ],
)
def test_one_result_that_does_not_hold_is_enough(results: list[Headline], word: str) -> None:
    verdict = overall_verdict(contents(line(1)), results, [])
    assert verdict is not None
    assert verdict.word == word
    if word == "suspicious":
        assert results[1].title in verdict.reasons[0]


def test_faults_alarms_and_a_loss_that_is_no_number_are_broken() -> None:
    for run, faults in (
        (contents(line(1)), [Fault("leaked_person", "two people are in two splits")]),
        (contents(line(1), {"update": 2, "train/loss": float("nan")}), []),
        (contents(line(1), line(2, **{"monitor/lidar": 1.0, "alarms": {"rankme": "collapse"}})), []),
    ):
        verdict = overall_verdict(run, [GOOD], faults)
        assert verdict is not None
        assert verdict.word == "broken"
        assert verdict.reasons
    healed = contents(
        line(1, **{"monitor/lidar": 1.0, "alarms": {"rankme": "collapse"}}), line(2, **{"monitor/lidar": 2.0})
    )
    verdict = overall_verdict(healed, [GOOD], [])
    assert verdict is not None
    assert verdict.word == "healthy"
    assert overall_verdict(replace(healed, kind="store"), [GOOD], []) is None


@pytest.mark.parametrize(
    ("results", "answer"),
    [
        ([GOOD], "Yes."),
        ([BAD, OPEN], "Not shown."),
        ([GOOD, BAD], "In part. Some of the comparisons below hold."),
        ([GOOD, NONE], "In part. What was measured holds; not measured: Trained minus none."),
        ([NONE], "Unknown."),
        ([replace(OPEN, too_few_people=True)], "Unknown. There are too few"),
    ],
)
def test_software_and_training_are_two_questions(results: list[Headline], answer: str) -> None:
    files = Headline("Files read", "9 of 9", "good", "")
    verdict = overall_verdict(contents(line(1)), [files, *results], [])
    assert verdict is not None
    software, training, following = verdict.answers
    assert following.answer.startswith("Embed the store")
    assert following.commands == ("octjepa embed run --store STORE --out run/embeddings.parquet",)
    assert not software.answer.startswith("No.")
    assert training.answer.startswith(answer)
    assert all("Files read" not in reason for reason in training.reasons)
    diverged = overall_verdict(contents({"update": 1, "train/loss": float("nan")}), [files, *results], [])
    assert diverged is not None
    assert diverged.answers[0].answer.startswith("No.")


def test_every_stage_ran_only_if_no_part_is_missing_and_the_run_has_ended() -> None:
    """A run that was stopped at update 3, without anything else, got "Every stage ran"."""

    def software(of: Contents) -> str:
        verdict = overall_verdict(of, [GOOD], [])
        assert verdict is not None
        return verdict.answers[0].answer

    stopped = contents(line(3))
    assert stopped.training is not None
    assert software(stopped) == (
        "No check found a problem, but these did not run or cannot be read: "
        "the store, the end of the training, the embeddings, the probe."
    )
    read: dict[str, Any] = {"store": object(), "embeddings": object(), "probe": object()}
    assert software(replace(stopped, **read)).endswith("cannot be read: the end of the training.")
    ended = replace(stopped, training=replace(stopped.training, summary=object()), **read)  # type: ignore[arg-type]
    assert software(ended) == "Yes. Every stage ran, and no check found a problem."
    assert software(replace(ended, probe=None)).endswith("cannot be read: the probe.")
    assert "cannot be read: the run" in software(replace(ended, kind="demo", training=None))


def test_what_to_do_next_follows_from_what_was_measured() -> None:
    def following(results: list[Headline], **parts: object) -> tuple[str, str]:
        verdict = overall_verdict(replace(contents(line(1)), **parts), results, [])  # type: ignore[arg-type]
        assert verdict is not None
        answer = verdict.answers[2]
        return answer.answer.split()[0], " ".join(answer.commands)

    embedded = {"embeddings": object()}
    measured = {**embedded, "probe": object()}
    assert "octjepa probe run/embeddings.parquet" in following([NONE], **embedded)[1]
    assert following([replace(OPEN, too_few_people=True)], **measured)[0] == "Label"
    assert "octjepa leaderboard run" in following([GOOD], **measured)[1]
    assert "octjepa leaderboard run" in following([GOOD, NONE], **measured)[1]
    assert "phantom-unet" in following([BAD], **measured)[1]


def test_a_site_that_few_test_people_lack_by_chance_breaks_nothing() -> None:
    """A fine-tuning on few people was "broken" because no test person came from one of the sites."""
    tuned = Contents(Path("tuned"), "tuning", training=Training(Path("tuned"), {}, "", []))
    absent = Fault("one_sided_group", "site UW is trained on and never tested")
    few = replace(OPEN, too_few_people=True)
    for faults, reason in (([absent], absent.what), ([], "Trained minus open is not shown: +0.1")):
        verdict = overall_verdict(tuned, [few], faults)
        assert verdict is not None
        assert (verdict.word, verdict.reasons) == ("too small to conclude", (reason,))
    verdict = overall_verdict(tuned, [OPEN], [absent])
    assert verdict is not None
    assert verdict.word == "broken"


def test_a_small_test_set_is_too_small_and_not_broken() -> None:
    tuned = Contents(Path("tuned"), "tuning", training=Training(Path("tuned"), {}, "", []))
    small = Fault("rare_class", "2 test people have grade 3")
    verdict = overall_verdict(tuned, [GOOD], [small, small])
    assert verdict is not None
    assert (verdict.word, verdict.reasons) == ("too small to conclude", (small.what,))
    verdict = overall_verdict(tuned, [GOOD], [small, Fault("leaked_person", "a person is in two splits")])
    assert verdict is not None
    assert verdict.word == "broken"


def tuning(*paired: TunedPaired, targets: tuple[TargetSummary, ...] = ()) -> Contents:
    results = FinetuneResult("", (), paired, targets=targets)
    return Contents(Path("tuned"), "tuning", training=Training(Path("tuned"), {}, "", tuned=results))


def tuned_pair(against: str, low: float, target: str = "drusen") -> TunedPaired:
    return TunedPaired(
        target=target,
        against=against,
        reference="covariates",
        metric="auroc",
        difference=low + 0.1,
        low=low,
        high=low + 0.2,
    )


def test_a_fine_tuning_names_its_strongest_baseline() -> None:
    tuned = tuning(tuned_pair("frozen", 0.02), tuned_pair("best_baseline", -0.05))
    found = headlines(tuned, None)
    assert [(one.title, one.verdict) for one in found] == [
        ("Tuned minus frozen", "good"),
        ("Tuned minus covariates", "open"),
    ]
    verdict = overall_verdict(tuned, found, [])
    assert verdict is not None
    assert (verdict.word, verdict.reasons) == ("suspicious", ("Tuned minus covariates is not shown: +0.050",))


def test_a_fine_tuning_is_healthy_only_if_every_target_holds() -> None:
    """A second target that was worse than the frozen encoder had no headline, and the word was "healthy"."""
    first = (tuned_pair("frozen", 0.02), tuned_pair("best_baseline", 0.03))
    second = [tuned_pair("frozen", -0.3, "fluid_loss"), tuned_pair("best_baseline", 0.03, "fluid_loss")]
    tuned = tuning(*first, *second)
    found = headlines(tuned, None)
    assert [(one.title, one.verdict) for one in found] == [
        ("Tuned minus frozen, drusen", "good"),
        ("Tuned minus covariates, drusen", "good"),
        ("Tuned minus frozen, fluid loss", "bad"),
        ("Tuned minus covariates, fluid loss", "good"),
    ]
    verdict = overall_verdict(tuned, found, [])
    assert verdict is not None
    assert (verdict.word, verdict.reasons) == ("suspicious", ("Tuned minus frozen, fluid loss fails: −0.200",))
    unmeasured = tuning(*first, second[1], targets=(TargetSummary("fluid_loss", "binary", "h"),))
    verdict = overall_verdict(unmeasured, headlines(unmeasured, None), [])
    assert verdict is not None
    assert (verdict.word, verdict.reasons) == ("not known", ("Tuned minus frozen, fluid loss",))
    without_baseline = tuning(*first, tuned_pair("frozen", 0.02, "fluid_loss"))
    verdict = overall_verdict(without_baseline, headlines(without_baseline, None), [])
    assert verdict is not None
    assert verdict.reasons == ("Tuned minus the strongest baseline, fluid loss",)


def test_the_strongest_baseline_is_claimed_only_if_it_was_compared() -> None:
    strongest = "including the comparison with the strongest baseline"
    for tuned, claimed in (
        (tuning(tuned_pair("frozen", 0.02)), False),
        (tuning(tuned_pair("frozen", 0.02), tuned_pair("best_baseline", 0.03)), True),
    ):
        verdict = overall_verdict(tuned, headlines(tuned, None), [])
        assert verdict is not None
        assert (verdict.word, strongest in verdict.sentence) == ("healthy", claimed)


def test_a_head_is_compared_with_every_baseline() -> None:
    """A head that was worse than the same head on intensities was "healthy"."""

    def head(**lows: float) -> Contents:
        pairs = tuple(
            HeadPaired(reference=name, metric="dice", difference=low + 0.1, low=low, high=low + 0.2)
            for name, low in lows.items()
        )
        results = SegmentationResult(
            metrics={},
            checkpoint="",
            classes=(),
            encoder="",
            labelled={},
            store="",
            chosen={},
            paired=pairs,
            rows=(),
            etdrs="",
            figure="",
        )
        return Contents(Path("head"), "segmentation", training=Training(Path("head"), {}, "", segmented=results))

    worse = head(untrained=0.02, intensity=-0.25, position_prior=0.15)
    found = headlines(worse, None)
    verdict = overall_verdict(worse, found, [])
    assert verdict is not None
    assert (verdict.word, verdict.reasons) == ("suspicious", ("Head minus intensity fails: −0.150",))
    assert [one.title for one in found if one.over_strongest] == ["Head minus intensity"]
    assert "lower than the same head on intensities only by 0.150" in found[2].sentence
    better = head(untrained=0.02, intensity=0.05, position_prior=0.15)
    verdict = overall_verdict(better, headlines(better, None), [])
    assert verdict is not None
    assert verdict.word == "healthy"
    assert verdict.sentence == "Every result holds, including the comparison with the strongest baseline."
    incomplete = head(untrained=0.02, position_prior=0.15)
    verdict = overall_verdict(incomplete, headlines(incomplete, None), [])
    assert verdict is not None
    assert (verdict.word, verdict.reasons) == ("not known", ("Head minus intensity",))


def test_files_read_is_good_below_the_allowed_share_alone(made: Path) -> None:
    cohort = summarise_cohort(Store.open(made / "store"))
    assert headlines(contents(), cohort)[0].verdict == "good"
    lost = headlines(contents(), replace(cohort, refused=cohort.files // 2))[0]
    assert lost.verdict == "bad"
    assert "are lost" in lost.sentence


def test_charts_start_at_zero_and_show_what_guessing_reaches() -> None:
    updates = [line(1), line(2)]
    validation = {
        "update": 2,
        "val/loss": 0.4,
        "val/baseline_loss/constant": 0.8,
        "val/baseline_loss/copy_nearest": 0.7,
    }
    monitored = [{"update": 2, "monitor/layer_accuracy": 0.6, "monitor/lidar": 1.0}]
    drawn = {chart.key: str(drawing) for chart, drawing in training_charts(updates, [validation], monitored, CHARTS)}
    plain = dict.fromkeys(drawn, "")
    plain |= {chart.key: str(drawing) for chart, drawing in training_charts(updates, [], [], CHARTS)}
    assert drawn["train/loss"].count("<path") > plain["train/loss"].count("<path")
    assert "stroke-dasharray" in drawn["monitor/layer_accuracy"]


def test_the_strip_goes_through_the_tissue_and_the_extremes_are_by_quality(made: Path) -> None:
    import numpy as np

    assert through_the_volume(np.array([0, 0, 5, 9, 9, 0]), 3) == [2, 3, 4]
    assert through_the_volume(np.zeros(4, int)) == []
    table = Store.open(made / "store").table.assign(quality=np.linspace(0.1, 0.9, 12))
    found = extreme_volumes(table, 2)
    assert [entry.quality for entry in found["lowest"]] == pytest.approx([0.1, 0.1 + 0.8 / 11])
    assert found["highest"][0].quality == pytest.approx(0.9)
    assert extreme_volumes(table[:1]) == {"lowest": [], "highest": []}


@pytest.mark.slow
def test_the_page_says_the_verdict(page: str) -> None:
    assert "Did the software work?" in page
    assert "Did this training teach something?" in page
    assert 'class="strip"' in page
    assert "Volumes of lowest quality" in page
