"""What each verb prints when all goes well: one JSON object with the agreed keys, or short readable text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import call, run

# The keys that others rely on; a verb may say more.
AGREED = {
    "phantom": {"people", "volumes", "files", "broken"},
    "ingest": {"accepted", "quarantined", "by_reason", "by_device", "seconds", "volumes_per_second"},
    "split": {"train", "val", "test", "leaks"},
    "pretrain": {
        "updates",
        "loss",
        "cosine",
        "baseline_cosine",
        "rankme",
        "volumes_per_second",
        "data_wait_share",
        "checkpoint",
        "skipped_updates",
    },
    "embed": {"rows", "dim", "missing", "volumes_per_second"},
    "probe": {"rows"},
    "report": {"report"},
}
FILE_KEYS = {"kind", "shape", "spacing_mm", "provenance", "laterality", "device", "pattern", "reasons"}
PLAN_KEYS = {
    "tokens",
    "parameters",
    "trainable",
    "flops_per_volume",
    "peak_memory_bytes",
    "disk_bytes",
    "updates",
    "effective_batch",
    "lr",
    "ema_half_life_samples",
}
RECIPES = (
    "smoke_test",
    "tiny_cpu",
    "tiny_cpu_levjepa",
    "tiny_cpu_vjepa",
    "fine_cpu",
    "fine_cpu_noise2noise",
    "one_gpu",
    "eight_gpus",
    "pretrain_vjepa_single_domain",
    "pretrain_vjepa_multi_domain",
)


@pytest.mark.parametrize("verb", AGREED)
def test_json_holds_the_agreed_keys(line: Any, verb: str) -> None:
    assert AGREED[verb] <= line.results[verb].keys()


def test_the_figures_agree_from_stage_to_stage(line: Any) -> None:
    results = line.results
    assert results["phantom"]["people"] == 10
    assert results["phantom"]["volumes"] == results["phantom"]["files"] == 20
    assert results["ingest"]["accepted"] == 20
    assert results["ingest"]["quarantined"] == 0
    assert sum(results["ingest"]["by_device"].values()) == 20
    assert results["split"]["train"] + results["split"]["val"] + results["split"]["test"] == 10
    assert results["split"]["leaks"] == []
    assert results["pretrain"]["updates"] == 4
    assert set(results["pretrain"]["baseline_cosine"]) == {"constant", "position_mean", "copy_nearest"}
    assert results["embed"]["rows"] == 20
    assert results["embed"]["missing"] == 0


def test_paths_in_json_can_be_used_as_they_are(line: Any) -> None:
    assert call("inspect", line.results["pretrain"]["checkpoint"], "--json").json["kind"] == "checkpoint"
    assert (
        Path(line.results["report"]["report"]).read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")
    )


def test_inspect_draws_the_flow_of_a_run_as_a_table(line: Any) -> None:
    run = Path(line.results["pretrain"]["checkpoint"]).parents[1]
    result = call("inspect", run).out
    assert "heidelberg_spectralis eyes" not in result
    at = result.index("train cohort")
    assert result[at:].splitlines()[1].split() == ["people", "eyes", "volumes", "lost", "by", "device", "by", "site"]
    assert "val cohort" in result[at:]


def test_probe_rows_are_whole_and_stand_beside_their_baselines(line: Any) -> None:
    rows = line.results["probe"]["rows"]
    for row in rows:
        assert {"name", "target", "probe", "pool", "metric", "value", "low", "high", "n"} <= row.keys()
        assert row["metric"] == row["metric"].lower()
    assert {"smoke_test", "untrained", "histogram", "intensity", "majority", "covariates"} <= {
        row["name"] for row in rows
    }
    assert json.loads((line.root / "probe.json").read_text(encoding="utf-8"))["rows"] == rows


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_shipped_recipe_plans(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of memory takes seconds; tests/train/test_plan.py computes it of three recipes, one of them large."""
    if recipe != "tiny_cpu_levjepa":  # of which no other test plans the peak
        monkeypatch.setattr("octjepa.train.plan.peak_bytes", lambda *_: 1 << 30)
    planned = call("plan", recipe, "--json", "--quiet").json
    assert planned.keys() >= PLAN_KEYS
    assert {"first", "peak", "last"} == planned["lr"].keys()
    assert planned["trainable"] < planned["parameters"]


def test_no_recipe_is_left_out_here() -> None:
    from octjepa.config import PRETRAINING

    assert set(PRETRAINING.names()) == set(RECIPES)


@pytest.mark.usefixtures("without_memory")
def test_plan_counts_the_volumes_of_a_store(line: Any) -> None:
    planned = call("plan", "tiny_cpu", "--store", line.store, "--json").json
    assert planned["volumes"] == line.results["split"]["train"] * 2


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(
    ("overrides", "result"),
    [
        ([], "no, data.expected_volumes is taken"),
        (["data.expected_volumes=null"], "no, one batch is taken"),
        (["data.expected_volumes=null", "data.max_samples=40"], "no, at most data.max_samples are taken"),
    ],
)
def test_plan_says_which_number_of_volumes_it_counts_with(
    line: Any, overrides: list[str], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Takes seconds; test_plan_hours.py tests it.
    monkeypatch.setattr("octjepa.train.plan.is_quick_to_time", lambda *_: False)
    shown = call("plan", "tiny_cpu", *overrides).out
    after = "epochs, and updates counted in epochs, follow it; --store STORE counts a store's"
    assert re.search(rf"^volumes_known +{re.escape(f'{result}: {after}')}$", shown, re.MULTILINE)
    assert "volumes_known" not in call("plan", "tiny_cpu", *overrides, "--store", line.store).out
    assert isinstance(call("plan", "tiny_cpu", *overrides, "--json").json["volumes_known"], bool)


def test_inspect_tells_what_each_thing_is(line: Any, tmp_path: Path) -> None:
    broken = tmp_path / "page.dcm"
    broken.write_text("<html>", encoding="utf-8")
    scan, refused = (call("inspect", path, "--json").json for path in (line.scan, broken))
    assert scan["kind"] == "volume"
    assert scan["reasons"] == []
    assert len(scan["shape"]) == len(scan["spacing_mm"]) == 3
    assert refused["kind"] == "rejected"
    assert refused["reasons"][0]["reason"] == "not_dicom"
    assert scan.keys() >= FILE_KEYS
    assert refused.keys() >= FILE_KEYS
    weights = line.checkpoint / "model.safetensors"
    kinds = {line.store: "store", line.run: "run", line.checkpoint: "checkpoint", weights: "checkpoint"}
    for path, kind in kinds.items():
        assert call("inspect", path, "--json").json["kind"] == kind
    found = call("inspect", line.run, "--json").json
    assert found["finished"]
    assert found["cosine"] == line.results["pretrain"]["cosine"]


def test_a_second_ingest_has_nothing_to_do(line: Any) -> None:
    again = call("ingest", line.cohort, "--store", line.store, "--workers", 1, "--json").json
    assert again["accepted"] == 0
    assert again["skipped"] == 20


def test_probe_without_json_is_a_table_with_the_macro_average_first(line: Any) -> None:
    result = call(
        "probe",
        line.embeddings,
        "--labels",
        line.labels,
        "--target",
        "drusen",
        "--target",
        "intraretinal_fluid",
        "--probe",
        "linear",
    )
    assert result.code == 0
    head, *rows = result.out.splitlines()
    assert re.match(r"auroc \(linear probe, \w+\) +smoke_test +untrained", head), head
    assert [row.split()[0] for row in rows[:3]] == ["macro", "drusen", "intraretinal_fluid"]
    assert all(re.search(r"  (none|\d\.\d{3}( \[\d\.\d\d, \d\.\d\d\])?)", row) for row in rows[:3])
    assert any(row.startswith("smoke_test minus untrained, macro auroc: ") for row in rows)
    assert len(rows) <= 14
    assert max(map(len, result.out.splitlines())) <= 120


def test_text_is_short_and_readable(line: Any) -> None:
    result = call("plan", "smoke_test").out
    assert re.search(r"^parameters +\d,\d{3},\d{3}$", result, re.MULTILINE)
    assert re.search(r"^memory +\d\.\d\d GB, estimated peak$", result, re.MULTILINE)
    assert result.splitlines()[-1].startswith("verdict ")
    assert len(result.splitlines()) <= 15
    scan = call("inspect", line.scan).out
    assert re.search(r"^laterality +O[DS]$", scan, re.MULTILINE)
    assert "None" not in scan
    assert "{" not in scan


def test_help_and_version() -> None:
    from importlib.metadata import version

    assert call("--version").out == f"octjepa {version('octjepa')}\n"
    assert call("-h").out == call("--help").out
    assert call().code == 2


_BELOW = ["datasets list", "datasets show", "datasets check", "datasets tables"]
_BELOW += ["recipes list", "recipes show", "recipes copy"]


@pytest.mark.parametrize("verb", ["demo", *AGREED, "inspect", "plan", "visits", *_BELOW])
def test_every_verb_takes_json_and_quiet(verb: str) -> None:
    result = call(*verb.split(), "--help")
    assert result.code == 0
    assert "--json" in result.out
    assert "--quiet" in result.out


def test_the_reader_of_the_output_may_leave(line: Any) -> None:
    import subprocess

    from command_line import COMMAND

    with subprocess.Popen(
        [*COMMAND, "inspect", str(line.scan)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


def test_text_that_the_terminal_cannot_show_is_no_failure(tmp_path: Path) -> None:
    result = run("ingest", tmp_path / "眼", "--store", tmp_path / "store", PYTHONIOENCODING="ascii")
    assert result.code == 2
    assert "no file or folder at" in result.err
