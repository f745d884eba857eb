"""The front page of the exam: what it says follows from the records, and a hole in them is an error, not a blank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.exam.front import answer, goals, hours_of, section, verdict, write_front_page
from benchmarks.exam.measured import (
    BSCANS,
    COSTS,
    ENCODERS,
    EYES,
    MEAN,
    OBJECTIVES,
    OWN_RANDOM,
    REAL,
    TASKS,
    TOKENS,
    Records,
    tasks_of,
)
from benchmarks.exam.settings import PAGES, RESULTS

from octjepa.errors import UsageError

ROWS = (*ENCODERS, "context", "intensity", "position", "outline", "random_unet", "random_init", "segmenter")
BASELINES = ("context", "intensity", "position", "outline", "random_unet", "random_init")
VALUES = {"phantom-unet": 0.9, "phantom-truth": 0.7, "phantom-tiny": 0.6, "segmenter": 0.95}  # others 0.3


def _entry(value: float, name: str = "value") -> dict[str, float]:
    return {name: value, "low": value - 0.05, "high": value + 0.05}


def _of_rows(metrics: tuple[str, ...], name: str = "value") -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of all rows, and all differences."""
    values = {row: {metric: _entry(VALUES.get(row, 0.3), name) for metric in metrics} for row in ROWS}
    less = {
        f"{row} less {other}": {metric: _entry(VALUES[row] - 0.3, name) for metric in metrics}
        for row in ENCODERS
        for other in BASELINES
    }
    return values, less


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records in which every packaged encoder is ahead of every baseline."""
    out = tmp_path / "records"
    (out / "real").mkdir(parents=True)
    metrics = ("with_drusen", "without_drusen", "drusen", "atrophy_mm2", "fluid_mm3", "central_thickness_um", "mean")
    values, less = _of_rows(metrics)
    block = {"values": values, "differences": less}
    both = {"exam": block, "shifted": block}
    tokens = {"linear": both, "mlp": both, "eyes": both, "measures": both}
    real = ("fluid_ap", "fluid_ap_from_one_eye", "fluid_ap_mlp", "fluid_ap_from_one_eye_mlp", "surface_um")
    real_values, real_less = _of_rows(real, "mean")

    def of_bscans(metric: str) -> dict[str, Any]:
        rows = {
            row: {metric: _entry(VALUES.get(row, 0.3))}
            | {f"less_{other}": _entry(VALUES.get(row, 0.3) - 0.3) for other in BASELINES}
            for row in ROWS
        }
        return {name: {"rows": rows} for name in ("one", "two", "mean")}

    values_of_run = {key: {"with_drusen": _entry(0.2)} for key in both}
    runs = [
        {"objective": name, "setting": "rate 1e-3", "updates": updates, "values": values_of_run}
        for name, updates in (("mae", 450), ("vjepa", 260))
    ]
    seconds = {"mae": {"rate 1e-3": 0.4}, "vjepa": {"rate 1e-3": 0.7}}
    written = {
        TOKENS: tokens,
        TASKS: {"look_alikes": block, "surfaces": block},
        REAL: {"rows": real_values, "differences": real_less},
        BSCANS: {"lesions": of_bscans("ap"), "diagnoses": of_bscans("auroc")},
        EYES: {"tasks": {"task_1_um": {"octjepa": [4.0, 9.0, 8.0, 9.0, 12.0, 9.0, 9.0, 4.0]}}},
        OBJECTIVES: {"test": runs, "seconds_of_update": seconds},
        COSTS: {row: {"cpu_hours": 2.0, "note": "-"} for row in ENCODERS},
    }
    for name, content in written.items():
        (out / name).write_text(json.dumps(content), encoding="utf-8")
    return out


def change(file: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_the_same_records_give_the_same_bytes_on_one_screen(folder: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        write_front_page(Records(folder), tmp_path / out)
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert names == {"README.md", "packaged.md", "objectives.svg"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    text = (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    assert "| 0.900 (0.850 to 0.950) | 0.700 | 0.600 | 0.300 | 0.300 | 0.300 | 0.300 | 0.300 | 0.950 |" in text
    assert "| 8.2 |" not in text
    assert "| 7.0 |" in text  # `octjepa segment` at ILM, IPL/INL, OPL/ONL and BM


def test_hours_are_updates_by_the_seconds_of_one_machine() -> None:
    seconds = {"rate 5e-4": 2.0, "batch 32": 4.0}
    assert hours_of({"setting": "batch 32", "updates": 900}, seconds) == 1
    assert hours_of({"setting": "rate 5e-4 for half an hour", "updates": 1800}, seconds) == 1  # as the first setting


def test_ahead_means_that_the_paired_interval_excludes_zero(folder: Path) -> None:
    first = tasks_of(Records(folder))[0]
    assert verdict(first) == "ahead of all"

    def tie(content: Any) -> None:
        content["linear"]["exam"]["differences"]["phantom-unet less context"]["with_drusen"]["low"] = -0.01

    change(folder / TOKENS, tie)
    assert verdict(tasks_of(Records(folder))[0]) == "ahead of all but context"
    before, after = (answer(one) for one in (tasks_of(Records(folder)), [first]))
    assert "`context` in 1 of 1" in after
    assert "`context` in 1 of 1" not in before


def test_several_parts_show_the_interval_of_their_mean(folder: Path) -> None:
    def tie(content: Any) -> None:
        for part in ("one", MEAN):
            content["lesions"][part]["rows"]["phantom-unet"]["less_context"]["low"] = -0.01

    change(folder / BSCANS, tie)
    lesions = next(task for task in tasks_of(Records(folder)) if "lesions in B-scans" in task.text)
    interval = lesions.interval("phantom-unet")
    assert interval is not None
    assert interval.low == pytest.approx(0.85)
    text = verdict(lesions)
    assert text.startswith("by its mean ahead of intensity, random")
    assert "context 1 of 2" in text
    assert "mean, AP" in section(lesions)


def test_of_an_error_less_is_better(folder: Path) -> None:
    surfaces = next(task for task in tasks_of(Records(folder)) if task.text == "four surfaces")
    assert surfaces.lower_is_better
    assert verdict(surfaces) == "not clearly ahead"

    def smaller(content: Any) -> None:
        for entry in content["surfaces"]["differences"].values():
            entry["mean"] = {"value": -2.0, "low": -3.0, "high": -1.0}

    change(folder / TASKS, smaller)
    surfaces = next(task for task in tasks_of(Records(folder)) if task.text == "four surfaces")
    assert verdict(surfaces) == "ahead of all"


def test_goals_that_are_met_and_missed(folder: Path) -> None:
    tasks = tasks_of(Records(folder))
    met, missed = goals(tasks, "phantom-unet")
    assert {task.text for task in missed} == {"four surfaces"}  # 0.9 is not half of 0.3
    assert len(met) == 8
    twice_context = tasks[0].goal
    assert twice_context is not None

    def better_context(content: Any) -> None:
        content["linear"]["exam"]["values"]["context"]["with_drusen"] = _entry(0.5)

    change(folder / TOKENS, better_context)
    assert tasks_of(Records(folder))[0] in goals(tasks_of(Records(folder)), "phantom-unet")[1] or (
        twice_context.is_met(tasks_of(Records(folder))[0], "phantom-unet") is False
    )


@pytest.mark.parametrize("name", [TOKENS, TASKS, REAL, BSCANS, EYES])
def test_a_record_that_is_absent_names_the_command_that_writes_it(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(UsageError, match=f"{name} is absent: (python -m benchmarks|make real)"):
        write_front_page(Records(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_row_that_is_missing_is_named_with_its_file(folder: Path) -> None:
    change(folder / REAL, lambda content: content["rows"].pop("context"))
    with pytest.raises(UsageError, match=r"real_tokens\.json has no rows/context: measure it, python -m benchmarks\."):
        tasks_of(Records(folder))


def test_a_task_that_is_not_measured_yet_has_a_line(folder: Path, tmp_path: Path) -> None:
    change(folder / TASKS, lambda content: content.pop("look_alikes"))
    write_front_page(Records(folder), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Not measured yet: look-alikes of four lesions (`python -m benchmarks.phantom_tasks`)." in text
    assert "look-alikes of four lesions; AUROC" not in text
    change(folder / TOKENS, lambda content: content["linear"]["exam"]["values"].pop("phantom-tiny"))  # optional
    change(folder / TOKENS, lambda content: content["linear"]["exam"]["values"].pop("segmenter"))
    first = tasks_of(Records(folder))[0]
    assert (first.value("phantom-tiny"), first.reference) == (None, None)


def test_random_weights_that_are_not_measured_are_not_passed_over(folder: Path, tmp_path: Path) -> None:
    for part in ("linear", "surfaces"):

        def drop(content: Any, part: str = part) -> None:
            found = content[part]["exam"] if part == "linear" else content[part]
            found["values"].pop("random_unet")

        change(folder / (TOKENS if part == "linear" else TASKS), drop)
    tasks = {task.text: task for task in tasks_of(Records(folder))}
    assert verdict(tasks["only drusen"]) == "ahead of all; random weights of its network not compared"
    out = tmp_path / "out"
    change(folder / TOKENS, lambda content: content["linear"]["exam"]["values"].__setitem__("random_unet", {}))
    with pytest.raises(UsageError, match="random_unet/with_drusen: measure it"):
        write_front_page(Records(folder), out)
    surfaces = tasks["four surfaces"]
    assert surfaces.goal is not None
    assert [surfaces.goal.is_met(surfaces, row) for row in ENCODERS] == [None, False, False]


def test_a_difference_that_is_missing_is_named(folder: Path) -> None:
    own = OWN_RANDOM["phantom-truth"]
    change(folder / TOKENS, lambda content: content["eyes"]["exam"]["differences"].pop(f"phantom-truth less {own}"))
    with pytest.raises(UsageError, match="has no eyes/exam/differences/phantom-truth less random_init"):
        tasks_of(Records(folder))


def test_a_record_of_another_shape_is_named_with_what_was_found(folder: Path) -> None:
    def number(content: Any) -> None:
        content["lesions"]["two"]["rows"]["intensity"]["ap"] = 0.4

    change(folder / BSCANS, number)
    with pytest.raises(UsageError, match=r"lesions/two/rows/intensity/ap is 0\.4, expected value, low and high"):
        tasks_of(Records(folder))
    (folder / BSCANS).write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match=r"bscans\.json has no lesions"):
        tasks_of(Records(folder))
    (folder / BSCANS).write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"bscans\.json is not JSON"):
        tasks_of(Records(folder))


def test_the_published_page_is_redrawn_to_the_byte(tmp_path: Path) -> None:
    write_front_page(Records(RESULTS.parent), tmp_path)
    for name in ("README.md", "packaged.md", "objectives.svg"):
        assert (tmp_path / name).read_bytes() == (PAGES / name).read_bytes(), f"{name}: run make exam ARGS='--page'"
