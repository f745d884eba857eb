"""The monitor's figures, the alarms they trip in runs that are spoilt on purpose, and the best checkpoint."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.model.encoder import Encoder
from octjepa.objectives.base import gather_tokens
from octjepa.recipe import ObjectiveRecipe
from octjepa.train.guards import LIMITS, CollapseAlarms, remedy
from octjepa.train.loop import pretrain
from octjepa.train.monitor import MonitorSet, run_monitor
from octjepa.train.validate import evaluate
from octjepa.views.loader import TrainingDataset, training_batches
from octjepa.views.sample import make_sample, sample_layers
from octjepa.views.tokens import LAYERS, TISSUE_SHARE
from synthetic import DEVICE, MemoryStore, small_recipe

TRAIN = {"max_updates": 40, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"}


def run(out: Path, **sections: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    recipe = small_recipe(**{"train": TRAIN, "monitor": {"every_updates": 10, "volumes": 8}, **sections})
    summary = pretrain(recipe, MemoryStore(recipe.preprocessing), out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return summary, [line for line in lines if "monitor/lidar" in line]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("healthy") / "run"
    return *run(out), out


@pytest.mark.slow
def test_a_healthy_run_trips_nothing_and_is_measured_on_time(healthy: Any) -> None:
    summary, measured, _ = healthy
    assert summary.alarms == {}
    assert [line["update"] for line in measured] == [10, 20, 30, 40]
    names = {name.removeprefix("monitor/") for name in measured[-1] if name.startswith("monitor/")}
    meters = ("rankme", "alpha_req", "target_std", "student_std", "pair_cosine", "position_share", "sigreg", "cosine")
    parts = ("tissue", "background")
    vendors = ("", "_topcon_triton", "_zeiss_cirrus")  # four volumes of each
    each = {f"{name}_{part}{vendor}" for name in meters for part in parts for vendor in vendors}
    assert names == each | {"lidar", "cosine", "loss_over_constant", "layer_accuracy", "layer_accuracy_student"}
    assert all(math.isfinite(measured[-1][f"monitor/{name}"]) for name in names)
    assert measured[-1]["monitor/rankme_tissue_topcon_triton"] != measured[-1]["monitor/rankme_tissue_zeiss_cirrus"]


@pytest.mark.slow
def test_the_best_checkpoint_is_the_online_probes_and_is_retained(healthy: Any) -> None:
    summary, measured, out = healthy
    assert summary.best == "step-00000040"  # the only one that was saved
    saves = out / "checkpoints"
    assert folder.read_manifest(saves / "step-00000040")["score"] == measured[-1]["monitor/layer_accuracy"]
    whole = {"schema": folder.SCHEMA, "files": {}}
    for step, score in ((0, math.nan), (1, None), (2, 2.0), (3, 1.5)):
        (saves / f"step-{step:08d}").mkdir()
        (saves / f"step-{step:08d}" / "manifest.json").write_text(json.dumps({**whole, "update": step, "score": score}))
    assert folder.best_checkpoint(saves).name == "step-00000002"
    folder.prune(saves, keep_last=1)
    assert [path.name for path in folder.list_checkpoints(saves)] == ["step-00000002", "step-00000040"]


def constant(self: Encoder, *_: Any) -> torch.Tensor:
    tokens = _[0]
    return self.norm.bias + 0 * tokens.mean() + torch.ones(*tokens.shape[:2], self.width)


@pytest.mark.slow
def test_a_constant_solution_trips_its_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "intermediate_features", constant)
    # the leak check would see that nothing depends on anything, which is what it asks for
    summary, _ = run(tmp_path / "run")
    assert {"constant_solution", "vanishing_features", "low_rank"} <= set(summary.alarms)
    assert (tmp_path / "run" / "checkpoints" / "step-00000030").is_dir(), "a snapshot at the alarm"


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["vjepa", "normalized_mse"])
def test_a_rate_too_high_trips_diverging(objective: str, tmp_path: Path) -> None:
    """Where the loss cannot explode as well: that of unit vectors that all point alike is small."""
    train = {**TRAIN, "base_lr": 1.0, "clip_norm": None}
    summary, measured = run(tmp_path / "run", train=train, objective={"name": objective})
    assert "diverging" in summary.alarms
    outputs = next(line["alarms"]["diverging"] for line in measured if "alarms" in line)
    assert "Lower train.base_lr" in outputs


def test_mae_diverges_where_predicting_zero_is_better() -> None:
    """What zero costs depends on the voxels: each update says it, and a resumed run reads it back."""
    for loss, rings in ((0.7, False), (0.9, True)):
        alarms = CollapseAlarms(ObjectiveRecipe(name="mae"), warmup=0)
        lines = [{"update": n, "train/loss": loss, "train/loss_trivial": 0.8} for n in range(1, 21)]
        for line in lines:
            alarms.follow_line(line)
        resumed = CollapseAlarms(ObjectiveRecipe(name="mae"), warmup=0)
        resumed.restore(lines)
        for one in (alarms, resumed):
            assert ("diverging" in one.check({}, 100)) is rings


def test_mae_reports_what_zero_costs(tmp_path: Path) -> None:
    train = {**TRAIN, "max_updates": 2}
    recipe = small_recipe(train=train, objective={"name": "mae"}, monitor={"every_updates": None})
    store = MemoryStore(recipe.preprocessing)
    pretrain(recipe, store, tmp_path / "run")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    dataset = TrainingDataset(store, recipe, list(store.volumes)[:12])
    batch = next(training_batches(dataset, 0, 1, 0))
    hidden = gather_tokens(batch.target_view, batch.target)
    assert line["train/loss_trivial"] == pytest.approx(float(hidden.square().mean()), rel=1e-5)


def test_an_alarm_rings_once_and_never_in_warm_up() -> None:
    alarms = CollapseAlarms(ObjectiveRecipe(name="vjepa"), warmup=10)
    alarms.follow_loss(0.5)
    bad = {"pair_cosine_tissue": 0.99, "rankme_tissue": 80.0}
    assert alarms.check(bad, 20) == {}
    assert list(alarms.check(bad, 30)) == ["constant_solution"]
    assert alarms.check(bad, 40) == {}
    assert alarms.tripped == {"constant_solution": 30}


def test_a_figure_that_could_not_be_had_trips_nothing() -> None:
    alarms = CollapseAlarms(ObjectiveRecipe(name="vjepa"), warmup=0)
    alarms.follow_loss(0.5)
    assert alarms.check({limit.metric: math.nan for limit in LIMITS.values()}, 100) == {}


def test_a_loss_that_is_not_finite_hides_no_divergence() -> None:
    def outputs(*losses: float) -> list[str]:
        alarms = CollapseAlarms(ObjectiveRecipe(name="vjepa"), warmup=0)
        for loss in losses:
            alarms.follow_loss(loss)
        return list(alarms.check({}, 100))

    assert outputs(*[0.9] * 19, math.nan) == ["diverging"]
    assert outputs(*[0.5] * 19, math.nan) == []  # one update that was not taken
    assert outputs(*[math.nan, math.inf] * 10) == ["diverging"]


@pytest.mark.parametrize("recipe", ["tiny_cpu", "tiny_cpu_vjepa", "tiny_cpu_levjepa"])
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_an_alarm_names_keys_that_the_recipe_accepts(name: str, recipe: str) -> None:
    """An objective without a moving target used to be told to raise objective.ema_horizon."""
    objective = load_recipe(recipe).objective
    message = remedy(objective, LIMITS[name].remedies)
    for key in re.findall(r"objective\.(\w+)", message):
        load_recipe(recipe, [f"objective.{key}=0.04"])  # raises if the objective does not use the key
    moves = recipe == "tiny_cpu_vjepa"
    assert ("the target moves" in message) is (moves and "target" in LIMITS[name].remedies)
    assert ("V-JEPA" in message) is (moves and "rate" in LIMITS[name].remedies)
    assert message == message[0].upper() + message[1:].rstrip(".") + "."


def test_an_alarm_names_the_momentum_and_the_weight_of_the_run() -> None:
    cosine = ObjectiveRecipe(name="vjepa", ema_base=0.99, variance_covariance=0.04)
    assert remedy(cosine, ["target"]) == "Raise objective.ema_base, so that the target moves more slowly."
    assert remedy(cosine, ["spread"]) == "Raise objective.variance_covariance (0.04 now)."
    teacher = ObjectiveRecipe(name="vjepa", teacher="phantom-tiny")
    assert remedy(teacher, ["target", "views"]) == "Change the intensity of the views more (views)."
    alarms = CollapseAlarms(ObjectiveRecipe(name="levjepa"), warmup=0)
    assert "raise objective.sigreg (0.05 now)" in alarms.check({"rankme_tissue": 1.0}, 100)["low_rank"]


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_each_limit_has_a_side(name: str) -> None:
    limit = LIMITS[name]
    step = -1e-3 if limit.below else 1e-3
    for beyond, trips in ((step, True), (-step, False)):
        alarms = CollapseAlarms(ObjectiveRecipe(name="mae"), warmup=0)
        alarms.follow_loss(0.1)
        assert (name in alarms.check({limit.metric: limit.bound + beyond}, 100)) is trips


def test_vendors_take_turns_in_the_monitor_set() -> None:
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing, train=12)
    monitor_set = MonitorSet.choose(store, recipe, sorted(store.volumes), 5)
    assert sorted(monitor_set.device_of).count("topcon_triton") == 3
    assert (
        monitor_set.batch.volume_ids
        == MonitorSet.choose(store, recipe, sorted(store.volumes)[::-1], 5).batch.volume_ids
    )


def test_background_is_looked_at_where_training_sees_none() -> None:
    recipe = small_recipe(tokens={"budget": 12})
    store = MemoryStore(recipe.preprocessing)
    ids = sorted(store.volumes)
    seen = TrainingDataset(store, recipe, ids)
    assert min(float(seen[location].sample.tissue.min()) for location in range(4)) >= TISSUE_SHARE
    monitor_set = MonitorSet.choose(store, recipe, ids, 5)
    assert (~monitor_set.tissue).sum(dim=1).tolist() == [3] * 5
    torch.manual_seed(0)
    found = run_monitor(VJEPA3D.from_recipe(recipe).to(DEVICE), Runtime("fp32"), monitor_set, 1)
    assert {"rankme_background", "cosine_background", "rankme_tissue"} <= found.keys()
    assert not any(name.endswith(("triton", "cirrus")) for name in found), "two and three volumes are too few"


def test_a_student_that_collapses_below_a_frozen_teacher_is_seen() -> None:
    recipe = small_recipe(objective={"teacher": "teacher"})
    store = MemoryStore(recipe.preprocessing)
    torch.manual_seed(0)
    model, ids = VJEPA3D.from_recipe(recipe).to(DEVICE), sorted(store.volumes)
    with torch.no_grad():
        model.context_encoder.norm.weight.zero_()
        model.context_encoder.norm.bias.fill_(0.3)
    found = run_monitor(model, Runtime("fp32"), MonitorSet.choose(store, recipe, ids, 4), 500)
    alarms = CollapseAlarms(recipe.objective, 0)
    assert {"constant_solution", "vanishing_features", "low_rank"} <= alarms.check(found, 500).keys()
    assert found["layer_accuracy"] > found["layer_accuracy_student"]  # the teacher's is still reported
    validated = evaluate(model, Runtime("fp32"), store, ids[:4], ids[4:8], recipe)
    assert validated["rankme"] < 2


def test_measuring_changes_nothing() -> None:
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe).to(DEVICE)
    monitor_set = MonitorSet.choose(store, recipe, sorted(store.volumes), 4)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    first = run_monitor(model, Runtime("fp32"), monitor_set, 1)
    assert run_monitor(model, Runtime("fp32"), monitor_set, 1) == pytest.approx(first, nan_ok=True)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_layers_follow_the_band() -> None:
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    volume = store.volumes["volume0000"]
    layers = sample_layers(volume, recipe).reshape(recipe.grid)
    assert (layers[:, 0] == LAYERS.index("vitreous")).all()
    assert (layers[:, -1] >= LAYERS.index("choroid")).all()
    assert (layers[:, 1:] >= layers[:, :-1]).all()
    sample = make_sample(volume, recipe, None)
    inside = sample.tissue > 0.9
    assert set(layers.reshape(-1)[sample.grid_index[inside]]) <= {1, 2, 3}
