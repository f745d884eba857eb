"""How rows are read and compared: on features whose answer is known."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.exam import __main__ as exam
from benchmarks.exam import openings, page, summary, training
from benchmarks.exam.admission import CNN, add_admitted_means, questions
from benchmarks.exam.measurement_tasks import macro
from benchmarks.exam.openings import close_seal, described, open_seal
from benchmarks.exam.readings import Projection, choose_strength, draw_labelled, logistic_scores, ridge_values
from benchmarks.exam.results import READINGS, Finding, LeftOut, Results, RowName, compare
from benchmarks.exam.settings import PAGES, RESULTS
from benchmarks.exam.stored_differences import StoredDifferences
from benchmarks.exam.training import plan_in_package

from examined_eyes import auroc_of
from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.comparisons import difference_estimate
from octjepa.phantom import LESIONS
from octjepa.shipped import shipped

PATCH = (4, 8, 8)
PEOPLE = np.array([f"p{number:03d}" for number in range(120)])
TRUTH = np.arange(120) % 2 == 0


def finding(scores: np.ndarray, draws: Draws, task: str = "eye_lesion") -> Finding:
    return Finding(task, "auroc", 30, auroc_of(TRUTH, scores, draws, PEOPLE))


def test_labelled_people_are_nested_half_with_the_lesion_and_repeat() -> None:
    candidates, has = np.arange(200), np.arange(200) < 40
    small, large = (draw_labelled(candidates, has, count, "people", 0, 0) for count in (10, 30))
    assert small is not None
    assert large is not None
    assert set(small) <= set(large)
    assert has[large].sum() == 15
    again = draw_labelled(candidates, has, 30, "people", 0, 0)
    assert again is not None
    assert (again == large).all()
    assert draw_labelled(candidates, has, 30, "people", 0, 1) is not None
    nearly_half = draw_labelled(np.arange(100), np.arange(100) < 51, 100, "people", 0, 0)
    assert nearly_half is not None
    assert len(nearly_half) == 100
    assert draw_labelled(candidates, np.arange(200) < 1, 10, "people", 0, 0) is None


def test_figures_of_another_training_of_the_same_row_count_as_missing(tmp_path: Path) -> None:
    results, row = Results(tmp_path), RowName("mae", PATCH)
    found = finding(np.arange(120.0), Draws(PEOPLE.tolist(), 20, 0))
    results.add(row, "eye_lesion", [found], {"run": "mae-1"})
    assert results.has(row, "eye_lesion", "mae-1")
    assert not results.has(row, "eye_lesion", "mae-2")
    assert not results.has(row, "eye_lesion")


def test_figures_of_other_cohorts_are_not_joined_and_another_processor_makes_no_other_cohort(tmp_path: Path) -> None:
    results, row = Results(tmp_path), RowName("mae", PATCH)
    results.check_cohorts({"main": {"volumes": 1500, "tissue_share": 0.2}})
    results.add(row, "eye_lesion", [finding(np.arange(120.0), Draws(PEOPLE.tolist(), 20, 0))], {"run": "mae-1"})
    Results(tmp_path).check_cohorts({"main": {"volumes": 1500, "tissue_share": 0.200001}})
    with pytest.raises(UsageError, match=r"with tissue_share 0\.2 in main, here it is 0\.201"):
        Results(tmp_path).check_cohorts({"main": {"volumes": 1500, "tissue_share": 0.201}})
    with pytest.raises(UsageError, match="volumes 1500 in main, here it is 1499"):
        Results(tmp_path).check_cohorts({"main": {"volumes": 1499, "tissue_share": 0.2}})


def test_a_run_that_was_trained_again_is_read_again(tmp_path: Path) -> None:
    results, row = Results(tmp_path), RowName("mae", PATCH)
    about = {"run": "mae-1", "weights": "00ff"}
    results.add(row, "eye_lesion", [finding(np.arange(120.0), Draws(PEOPLE.tolist(), 20, 0))], about)
    assert results.has(row, "eye_lesion", "mae-1", "00ff")
    assert not results.has(row, "eye_lesion", "mae-1", "00fe")  # another processor leaves other weights
    assert not results.has(row, "eye_lesion", "mae-1")


def test_a_signal_among_many_features_is_read_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 300))
    y = rng.random(400) < 0.5
    x[:, 7] += 3 * y
    project = Projection(x[:200])
    strength = choose_strength(project(x[:200]), y[:200])
    scores = logistic_scores(project(x[:200]), y[:200], project(x[200:]), strength)
    draws = Draws([str(number) for number in range(200)], 100, 0)
    people = np.array([str(number) for number in range(200)])
    assert auroc_of(y[200:], scores, draws, people).value > 0.7
    noise = rng.normal(size=(200, 300))
    assert abs(auroc_of(y[200:], noise[:, 0], draws, people).value - 0.5) < 0.12
    values = ridge_values(project(x[:200]), y[:200].astype(float), project(x[200:]))
    assert np.corrcoef(values, y[200:])[0, 1] > 0.4


def test_whitened_components_have_unit_variance_over_training_eyes() -> None:
    x = np.random.default_rng(0).normal(size=(300, 20)) * np.arange(1, 21)
    assert np.allclose(Projection(x, 10).whitened(x).std(axis=0), 1, atol=0.02)


def test_limited_components_stay_in_their_range() -> None:
    """A feature that is nearly constant among the labelled eyes is a hundred standard deviations away in another."""
    x = np.random.default_rng(0).normal(size=(300, 20))
    x[:, 0] *= 1e-3
    other = x.copy()
    other[0, 0] = 0.1
    free, limited = Projection(x), Projection(x, limited=True)
    assert np.array_equal(free(x), limited(x))
    assert np.abs(free(other)).max() > 10 * np.abs(free(x)).max()
    assert (limited(other).max(axis=0) <= limited(x).max(axis=0)).all()
    assert (limited(other).min(axis=0) >= limited(x).min(axis=0)).all()
    assert np.array_equal(free(other)[1:], limited(other)[1:])


@pytest.mark.slow
def test_a_row_better_than_its_twin_has_an_interval_above_zero(tmp_path: Path) -> None:
    rng, draws = np.random.default_rng(0), Draws(PEOPLE.tolist(), 300, 0)
    results = Results(tmp_path / "out")
    names = {"mae": 3.0, "untrained:mae": 0.3, "intensity": 0.3}
    for name, effect in names.items():
        for seed in (0, 1) if name != "intensity" else (0,):
            scores = rng.normal(size=120) + effect * TRUTH
            results.add(RowName(name, PATCH, seed), "eye_lesion", [finding(scores, draws)], {"run": "x"})
    again = Results(tmp_path / "out")
    assert again.has(RowName("mae", PATCH, 1), "eye_lesion", "x")
    assert not again.has(RowName("mae", PATCH, 1), "token_lesion")
    ours, twins = ([RowName(name, PATCH, seed) for seed in (0, 1)] for name in ("mae", "untrained:mae"))
    found = compare(again, ours, twins, "eye_lesion/auroc/30")
    assert found is not None
    assert found.low > 0
    assert (found.name, found.reference, found.seeds) == ("mae", "untrained:mae", 2)
    same = compare(again, twins, twins, "eye_lesion/auroc/30")
    assert same is not None
    assert same.difference == 0
    other = replace(finding(TRUTH.astype(float), draws), task="decoys")
    again.add(RowName("mae", PATCH, 1), "decoys", [other], {"run": "x"})  # which seed 0 has not been read for
    page.write_page(again, tmp_path / "out")
    text = (tmp_path / "out" / "rows.md").read_text(encoding="utf-8")
    assert "`mae` less random initialisation" in text
    assert "`mae` less intensity" in text
    assert page.MISSING in text
    assert "<svg" in (tmp_path / "out" / "compute.svg").read_text(encoding="utf-8")


def test_a_difference_is_paired_and_a_macro_figure_averages_kinds() -> None:
    draws = Draws(PEOPLE.tolist(), 200, 0)
    scores = np.random.default_rng(1).normal(size=120) + TRUTH
    one = finding(scores, draws).estimate
    assert not difference_estimate(one, one).samples.any()
    both = [Finding("decoys", "a", 30, one), Finding("decoys", "b", 30, one)]
    mean = macro(both, "decoys", "auroc", 30, ["a", "b"])
    assert isinstance(mean, Finding)
    assert mean.estimate.value == one.value
    of_one = macro(both[:1], "decoys", "auroc", 30, ["a", "b"])
    assert of_one == LeftOut("decoys", "auroc", 30, "the mean over all of them needs b, left out here")


ENCODER: dict[str, Any] = {"seed": 9, "run": "mae-0123-seed0", "weights": "00ff"}


def test_the_seal_is_opened_once(tmp_path: Path) -> None:
    open_seal(tmp_path, again=False, **ENCODER)
    close_seal(tmp_path)
    with pytest.raises(UsageError, match=r"opened on .*--again"):
        open_seal(tmp_path, again=False, **ENCODER)
    open_seal(tmp_path, again=True, **ENCODER)
    close_seal(tmp_path)
    open_seal(tmp_path, again=False, **{**ENCODER, "seed": 10})  # other people, whom nobody has looked at
    assert [one["seed"] for one in json.loads((tmp_path / "openings.json").read_text("utf-8"))] == [9, 9, 10]


@pytest.mark.parametrize(
    "other", [{"run": "mae-0123-seed1"}, {"weights": "00fe"}, {"code": "other"}, {"exam_code": "other"}]
)
def test_an_opening_that_was_interrupted_goes_on_with_the_same_encoder_and_code_alone(
    other: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        open_seal(tmp_path, again=False, **ENCODER)
    now = {**openings.code(), **ENCODER, **other}
    monkeypatch.setattr(openings, "code", lambda: {name: now[name] for name in ("code", "exam_code")})
    with pytest.raises(UsageError, match="the sealed cohort was opened"):
        open_seal(tmp_path, again=False, seed=9, run=now["run"], weights=now["weights"])


def test_an_opening_names_its_encoder_and_code_where_they_are_recorded(tmp_path: Path) -> None:
    old = [{"date": "2026-11-25", "seed": 9, "code": "f06e", "ended": "2026-11-26"}]
    (tmp_path / "openings.json").write_text(json.dumps(old), encoding="utf-8")
    open_seal(tmp_path, again=True, **ENCODER)
    first, second = described(tmp_path)
    assert first == "2026-11-25, people of seed 9, code f06e, read until 2026-11-26"
    code = openings.code()
    assert f"for `mae-0123-seed0` (weights 00ff), code {code['code']}, code of the exam {code['exam_code']}" in second


def test_the_code_of_the_exam_is_its_sources_and_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings, "__file__", str(tmp_path / "openings.py"))
    found = [openings.code()]
    for name in ("a.py", "b.yaml", "c.md"):
        (tmp_path / name).write_text("x", encoding="utf-8")
        found.append(openings.code())
    assert len({one["code"] for one in found}) == 1
    assert [one["exam_code"] for one in found].index(found[-1]["exam_code"]) == 2  # a template reads nothing


def test_a_figure_that_is_left_out_is_not_one_that_has_not_been_run(tmp_path: Path) -> None:
    results, row = Results(tmp_path), RowName("mae", PATCH)
    one = finding(np.arange(120.0), Draws(PEOPLE.tolist(), 20, 0))
    results.add(row, "eye_lesion", [one, LeftOut("eye_lesion", "auroc_drusen", 30, "too few")], {"run": "mae-1"})
    results.add(row, "surfaces", [LeftOut("surfaces", "error_um", 5, "too few")], {"run": "mae-1"})
    results.add(row, "real_fluid", [LeftOut("real_fluid", "dice", 1, "no data", retry=True)], {"run": "mae-1"})
    again = Results(tmp_path)
    keys = {
        "eye_lesion/auroc_drusen/30": True,
        "eye_lesion/auroc/30": False,
        "eye_lesion/auroc_other/30": False,
        "eye_lesion/auroc/all": False,
        "surfaces/error_um/5": True,
        "surfaces/error_um_ilm/5": True,
        "surfaces/error_um/30": False,
        "real_fluid/ap/1": True,
        "decoys/auroc/30": False,
    }
    assert {key: again.is_left_out(row, key) for key in keys} == keys
    assert not again.is_left_out(RowName("mae", PATCH, 1), "surfaces/error_um/5")
    assert again.has(row, "surfaces", "mae-1")  # these cohorts will never have more
    assert not again.has(row, "surfaces", "mae-2")
    assert not again.has(row, "surfaces", "mae-1", "00ff")
    assert not again.has(row, "real_fluid", "mae-1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sealed", "--page"], "--sealed and --page: the sealed cohort is read whole"),
        (["--sealed", "--only", "mae:0"], "--sealed and --only"),
        (["--people", "24"], "--people 24 is a trial: name a --work and an --out of its own"),
        (["--people", "24", "--out", "trial"], "a --work and an --out"),
    ],
)
def test_options_that_would_spoil_what_is_there_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make exam", *options])
    with pytest.raises(UsageError, match=message):
        exam.main()


def test_every_plan_makes_a_recipe_and_a_change_makes_another_folder(tmp_path: Path) -> None:
    plans = training.read_plans()
    folders = {training.run_folder(tmp_path, plan, seed) for plan in plans for seed in plan.seeds}
    assert len(folders) == sum(len(plan.seeds) for plan in plans)
    for plan in plans:
        assert plan.recipe(3).train.max_updates == plan.updates


def test_another_first_run_makes_other_folders_of_what_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {plan.name: plan for plan in training.read_plans()}
    before = {name: training.run_folder(tmp_path, plan, 0) for name, plan in plans.items()}
    text = training.ENCODERS.read_text(encoding="utf-8").replace("updates: 4662", "updates: 4663", 1)
    (tmp_path / "encoders.yaml").write_text(text, encoding="utf-8")
    longer = training.read_plans(tmp_path / "encoders.yaml")
    monkeypatch.setattr(training, "ENCODERS", tmp_path / "encoders.yaml")
    changed = {plan.name for plan in longer if training.run_folder(tmp_path, plan, 0) != before[plan.name]}
    assert changed == {
        "mae_long",
        "mae_real",
        "mae_more",
        "mae_longest",
        "mae_noise2noise",
        "mae_noise2noise_long",
        "mae_noise2noise_longest",
        "vjepa_teacher",
    }


def test_a_run_begins_with_the_weights_of_its_first_run(tmp_path: Path) -> None:
    plans = {plan.name: plan for plan in training.read_plans()}
    first, later = plans["mae_long"], plans["mae_more"]
    with pytest.raises(UsageError, match="--train mae_long:1"):
        training.weights_of_others(tmp_path, later, 1)
    folder = training.run_folder(tmp_path, first, 1)
    folder.mkdir(parents=True)
    (folder / "trained.json").write_text("{}", encoding="utf-8")
    assert training.weights_of_others(tmp_path, later, 1) == [f"model.warm_start={folder / 'run'}"]
    recipe = later.recipe(1, training.weights_of_others(tmp_path, later, 1))
    assert str(recipe.model.warm_start) == str(folder / "run")
    assert training.weights_of_others(tmp_path, first, 1) == []


def test_a_run_begins_with_stored_weights_where_its_first_run_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, packaged = {plan.name: plan for plan in training.read_plans()}, shipped("phantom-tiny")
    assert packaged is not None
    monkeypatch.setattr(training, "STARTS", tmp_path / "starts")
    stored = tmp_path / "starts" / training.run_folder(tmp_path, plans["mae_long"], 1).name
    shutil.copytree(packaged, stored)
    assert training.weights_of_others(tmp_path, plans["mae_more"], 1) == [f"model.warm_start={stored}"]
    encoder, about = training.finished_run(tmp_path, plans["mae_long"], 1) or (None, {})
    assert encoder is not None
    assert about["encoder"] == "mae_noise2noise_longest"
    assert "alarms" not in about


def test_a_cell_says_what_a_row_lacks_and_how_many_seeds_were_read(tmp_path: Path) -> None:
    results, draws = Results(tmp_path), Draws(PEOPLE.tolist(), 50, 0)
    rows = [RowName("mae", PATCH, seed) for seed in (0, 1)]
    results.add(rows[0], "eye_lesion", [finding(np.arange(120.0), draws)], {"run": "mae-1"})
    assert page.cell(results, rows, "eye_lesion/auroc/30").endswith("), 1 seed")
    assert page.cell(results, rows, "decoys/auroc/30") == page.MISSING
    assert page.cell(results, [RowName("covariates", PATCH)], "decoys/auroc/30") == "-"
    assert page.cell(results, [RowName("mae_real", PATCH)], "decoys/auroc/30") == "-"
    assert page.cell(results, [RowName("mae_real", PATCH)], "real_fluid/ap/1") == page.MISSING


def test_a_list_without_encoders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="names no encoder"):
        training.read_plans(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="no encoder mae:77 in"):
        training.read_plans(only=["mae:77"])
    assert training.read_plans(only=["mae:1"])[0].seeds == (1,)


def test_an_encoder_of_another_architecture_has_a_twin_of_its_own() -> None:
    plans = {plan.name: plan for plan in training.read_plans()}
    assert {training.twin_name(plan.recipe(0), name) for name, plan in plans.items()} == {"untrained"}
    finer = replace(plans["mae"], overrides=(*plans["mae"].overrides, "model.stem=patch_mlp"))
    assert training.twin_name(finer.recipe(0), "finer") == "untrained:finer"
    assert set(plans["mae_real"].tasks) == {"real_fluid", "real_surfaces"}
    assert set(plans["mae"].tasks) == set(READINGS)


def test_results_are_a_list_in_the_words_of_the_contract(tmp_path: Path) -> None:
    results, row = Results(tmp_path), RowName("mae", PATCH, 1)
    one = finding(np.arange(120.0), Draws(PEOPLE.tolist(), 20, 0))
    added = replace(one, task="added_value", metric="added_auroc")
    missing = LeftOut("eye_lesion", "auroc_drusen", 30, "too few")
    results.add(row, "eye_lesion", [one, added, missing], {"run": "mae-1", "views": 64})
    entries = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [(entry["task"], entry["metric"], entry["reading"]) for entry in entries] == [
        ("eye_lesion", "auroc", "zones_whitened"),
        ("added_value", "added_auroc", "zones_whitened"),
    ]
    keys = {"task", "encoder", "reading", "labels", "seed", "metric", "value", "low", "high", "n", "run"}
    assert all(keys <= set(entry) for entry in entries)
    assert results.estimate(row, "added_value/added_auroc/30") is not None
    assert Results(tmp_path).left_out[0].reason == "too few"
    results.add(row, "eye_lesion", [one], {"run": "mae-2"})
    assert [entry.run for entry in Results(tmp_path).entries if entry.task == "eye_lesion"] == ["mae-2"]
    assert not Results(tmp_path).left_out


def test_the_mean_over_admitted_questions_leaves_the_others_out(tmp_path: Path) -> None:
    results, draws = Results(tmp_path), Draws(PEOPLE.tolist(), 50, 0)
    rng = np.random.default_rng(2)
    noise, signal = rng.normal(size=120), rng.normal(size=120) + 4.0 * TRUTH

    def figures(labels: int | None, easy: np.ndarray, others: np.ndarray) -> list[Finding]:
        found = [(name, easy if name == LESIONS[0] else others) for name in LESIONS]
        return [replace(finding(scores, draws), metric=f"auroc_{name}", labels=labels) for name, scores in found]

    floor, encoder = RowName("intensity", PATCH), RowName("mae", PATCH)
    results.add(floor, "eye_lesion", figures(30, signal, noise), {})
    results.add(encoder, "eye_lesion", figures(30, signal, noise), {"run": "mae-1"})
    add_admitted_means(results, PATCH)
    assert results.value(encoder, "eye_lesion/auroc_admitted/30") is None  # no ceiling, no verdict
    results.add(CNN, "eye_lesion", figures(None, signal, signal) + figures(30, noise, noise), {})
    assert [one.admitted for one in questions(results, PATCH) if one.task == "eye_lesion"] == [False] + [True] * 4
    for _ in range(2):  # a second time changes nothing
        add_admitted_means(results, PATCH)
    again = Results(tmp_path)
    assert [entry.metric for entry in again.entries if entry.name == "mae"].count("auroc_admitted") == 1
    found = again.estimate(encoder, "eye_lesion/auroc_admitted/30")
    other = again.estimate(encoder, f"eye_lesion/auroc_{LESIONS[1]}/30")
    assert found is not None
    assert other is not None
    assert found.value == pytest.approx(other.value, abs=1e-5)  # every admitted one reads the same noise
    assert found.samples == pytest.approx(other.samples)
    assert again.entry(encoder, "eye_lesion/auroc_admitted/30").run == "mae-1"

    some = [one for one in figures(30, signal, noise) if one.metric != f"auroc_{LESIONS[1]}"]
    fewer = RowName("mae", PATCH, 1)
    results.add(fewer, "eye_lesion", some, {"run": "mae-2"})
    add_admitted_means(results, PATCH)
    assert not results.is_left_out(fewer, "eye_lesion/auroc_admitted/30")  # it was not put to the row
    too_few = LeftOut("eye_lesion", f"auroc_{LESIONS[1]}", 30, "too few")
    results.add(fewer, "eye_lesion", [*some, too_few], {"run": "mae-2"})
    for _ in range(2):
        add_admitted_means(results, PATCH)
    assert results.value(fewer, "eye_lesion/auroc_admitted/30") is None
    reasons = [one.reason for one in Results(tmp_path).left_out if one.metric == "auroc_admitted"]
    assert reasons == [f"the mean over all of them needs auroc_{LESIONS[1]}, left out here"]

    sealed = Results(tmp_path / "sealed")  # other people, no ceilings: the exam has decided what is admitted
    sealed.add(floor, "eye_lesion", figures(30, noise, noise), {})
    sealed.add(encoder, "eye_lesion", figures(30, noise, signal), {"run": "mae-1", "views": 64})
    open_seal(tmp_path / "sealed", again=False, **ENCODER)
    text = page.sealed_section(sealed, again)
    value = sealed.value(encoder, "eye_lesion/auroc_admitted/30")
    assert value == pytest.approx(sealed.value(encoder, f"eye_lesion/auroc_{LESIONS[1]}/30"), abs=1e-5)
    assert "interrupted" in text
    assert "real fluid" not in text


@pytest.mark.slow
def test_without_samples_the_published_pages_are_redrawn_to_the_byte(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "sealed"):
        folder.mkdir(exist_ok=True)
        for name in ("results.json", "left_out.json", "differences.json", "openings.json"):
            source = RESULTS / folder.relative_to(tmp_path) / name
            if source.is_file():
                (folder / name).write_bytes(source.read_bytes())
    page.write_page(Results(tmp_path, tmp_path / "no samples"), tmp_path)
    published = [PAGES / name for name in ("rows.md", "compute.svg")]
    for path in (*published, RESULTS / "differences.json"):
        found = (tmp_path / path.name).read_bytes()
        assert found == path.read_bytes(), f"{path.name}: run make exam ARGS='--page'"


def test_a_stored_difference_is_not_used_for_other_values(tmp_path: Path) -> None:
    stored = StoredDifferences.read(tmp_path / "differences.json")
    rows, keys = (["a"], ["b"]), ("eye_lesion/auroc/30", "eye_lesion/auroc/30")
    stored.remember(rows, keys, difference=0.100, low=0.05, high=0.15)
    stored.save()
    again = StoredDifferences.read(tmp_path / "differences.json")
    found = again.find(rows, keys, 0.1004)
    assert found is not None
    assert (found["low"], found["high"]) == (0.05, 0.15)
    assert again.find(rows, keys, 0.104) is None  # a value was measured again
    assert again.find((["a"], ["c"]), keys, 0.1) is None


def test_the_summary_says_which_baselines_the_encoder_beats(tmp_path: Path) -> None:
    draws, rng = Draws(PEOPLE.tolist(), 300, 0), np.random.default_rng(0)
    results, name = Results(tmp_path), plan_in_package().name
    for row, effect in ((name, 3.0), ("intensity", 3.0), ("untrained", 0.3)):
        scores = rng.normal(size=120) + effect * TRUTH
        results.add(RowName(row, PATCH), "eye_lesion", [finding(scores, draws)], {"run": "x"})
    assert summary.answer(results, summary.QUESTIONS[1]) == "better than random initialisation only"
    assert summary.answer(results, summary.QUESTIONS[0]) == "not compared"


def test_the_published_results_are_of_the_contract() -> None:
    entries = json.loads((RESULTS / "results.json").read_text(encoding="utf-8"))
    known = {"untrained", "intensity", "raw_patches", "supervised", "mae"}
    assert known <= {entry["encoder"] for entry in entries}
    assert {entry["task"] for entry in entries} <= set(READINGS)
    assert {"main", "boundaries", "second_visit"} < set(json.loads((RESULTS / "cohorts.json").read_text()))
