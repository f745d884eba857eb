"""The whole line, at the smallest size that still has people in every split: files in, one honest page out."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from narrow_encoder import OVERRIDES
from octjepa import config, demo, machine
from octjepa.cli.output import print_demo
from octjepa.config import load_recipe
from octjepa.demo import FEWEST_UPDATES, LESIONS, choose_schedule, run_demo
from octjepa.errors import UsageError
from octjepa.recipe import Recipe
from short_pages import draw_flat_layers, shorten_pages

pytestmark = pytest.mark.timeout(900)  # the fixture runs every stage, and the first test waits for it


def narrow(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with a narrow encoder and half its batch."""
    return load_recipe(name, [*overrides, *OVERRIDES, "train.global_batch=8"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "PEOPLE_PER_MINUTE", 20)
        patch.setattr(demo, "UPDATES_PER_MINUTE", 12)
        patch.setattr(demo, "TIMING_SECONDS", 0.0)
        patch.setattr(config, "load_recipe", narrow)
        patch.setattr(machine, "cores", lambda: 1)  # worker processes import what is imported here
        shorten_pages(patch)
        draw_flat_layers(patch)
        return out, run_demo(out, minutes=1.0)


@pytest.mark.parametrize(
    ("update_seconds", "updates", "minutes"),
    [
        (0.1, 1200, 4.0),  # a fast machine: no more than was asked for, and it ends early
        (0.28, 642, 5.0),  # the training fills the time that is left
        (0.8, FEWEST_UPDATES, 6.0),  # the claims need these
        (2.0, FEWEST_UPDATES, 12.0),  # and here it says that they take twice as long
    ],
)
def test_the_training_is_as_long_as_the_machine_allows(
    monkeypatch: pytest.MonkeyPatch, update_seconds: float, updates: int, minutes: float
) -> None:
    monkeypatch.setattr(demo, "AFTER_TRAINING", 1.0)
    schedule = choose_schedule(5.0, 60.0, update_seconds)
    assert schedule.updates == pytest.approx(updates, abs=1)
    assert FEWEST_UPDATES <= schedule.updates <= 1200
    total = (60.0 + schedule.training_seconds + schedule.after_seconds) / 60
    assert total == pytest.approx(minutes, abs=0.1)
    assert f"about {total:.1f} min in all" in schedule.describe(60.0)


def test_fewer_minutes_ask_for_fewer_updates() -> None:
    assert choose_schedule(1.0, 30.0, 5.0).updates == 240
    assert choose_schedule(2.0, 10.0, 0.01).updates == 480


@pytest.mark.slow
def test_the_updates_that_were_timed_decide(made) -> None:
    _, payload = made
    assert payload["updates"] == 12
    assert payload["seconds"] > 0


@pytest.mark.slow
def test_it_says_what_the_contract_names(made):
    out, payload = made
    assert {"report", "seconds", "cosine", "baseline_cosine", "probe", "paired"} <= payload.keys()
    assert set(payload["baseline_cosine"]) == {"constant", "position_mean", "copy_nearest"}
    assert {"difference", "low", "high"} <= payload["paired"].keys()
    names = {row["name"] for row in payload["probe"]}
    assert {"untrained", "histogram", "intensity", "majority", "covariates", "phantom-truth"} < names
    assert {row["pool"] for row in payload["probe"]} == {"zones_whitened", "none"}
    assert {row["target"] for row in payload["probe"]} >= {*LESIONS, "macro"}
    assert json.loads((out / "demo.json").read_text())["cosine"] == payload["cosine"]


@pytest.mark.slow
def test_the_packaged_segmenter_comes_first_and_is_compared_with_the_truth(made, capsys):
    out, payload = made
    segmenter = payload["segmenter"]
    assert segmenter["eyes"] == 4, "one per device"
    assert segmenter["boundary_error_um"] < 10, "B-scans in another order than the truth give 40 um"
    assert segmenter["fluid_dice"] > 0.7
    assert (out / "segmented" / "index.html").is_file()
    print_demo(payload, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 15
    assert lines[0].startswith("packaged segmenter, 4 synthetic eyes")
    assert lines[-1] == f"page  {out / 'report.html'}"


@pytest.mark.slow
def test_every_part_is_there_and_the_broken_files_are_listed(made):
    out, payload = made
    page = (out / "report.html").read_text()
    assert payload["report"] == str(out / "report.html")
    assert "Synthetic eyes" in page
    refused = [json.loads(line) for line in (out / "store" / "quarantine.jsonl").read_text().splitlines()]
    assert len(refused) >= 3
    assert all(row["reason"] in page for row in refused)
    for part in ("phantom", "store", "segmented", "run", "packaged.parquet", "embeddings.parquet", "probe.json"):
        assert (out / part).exists()


def test_it_does_not_touch_a_folder_that_is_not_its_own(tmp_path):
    """Not even one whose parts have the names that the demo gives its own."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("mine")
    with pytest.raises(UsageError, match="not made by a demo"):
        run_demo(tmp_path, minutes=1.0)
    assert (tmp_path / "store" / "store.json").read_text() == "mine"
    file = tmp_path / "store" / "store.json"
    with pytest.raises(UsageError, match="is a file"):
        run_demo(file, minutes=1.0)
