"""What a run takes of its machine: one list, with reasons, which a plan prints and a run prints and records."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octjepa.distributed import precision
from octjepa.distributed.precision import with_precision
from octjepa.distributed.runtime import Runtime
from octjepa.machine import Processor, cores
from octjepa.model import blocks
from octjepa.progress import set_quiet
from octjepa.recipe import Recipe
from octjepa.train import plan as planning
from octjepa.train.hardware_settings import (
    Choice,
    choose_attention,
    choose_compile,
    choose_for_machine,
    choose_loader_workers,
    choose_threads,
    print_choices,
)
from octjepa.train.setup import prepare_run
from octjepa.views.loader import TrainingDataset, training_batches
from synthetic import MemoryStore, small_recipe

SETTINGS = "octjepa.train.hardware_settings"

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(cores, threads, processes)`: those of this machine from now on."""

    def become(cores: int, threads: int = 1, processes: int = 1) -> None:
        monkeypatch.setattr(f"{SETTINGS}.cores", lambda: cores)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    return become


@pytest.mark.parametrize(
    ("cores", "threads", "processes", "to_do"),
    [
        (2, 2, 1, ""),
        (8, 4, 2, ""),
        (2, 8, 1, "set OMP_NUM_THREADS=2"),
        (8, 4, 4, "set OMP_NUM_THREADS=2"),
        (2, 1, 4, "start 2 processes, each with OMP_NUM_THREADS=1"),
    ],
)
def test_more_threads_than_cores_are_a_warning(
    machine: Any, cores: int, threads: int, processes: int, to_do: str
) -> None:
    machine(cores, threads, processes)
    choice = choose_threads()
    assert (choice.value, choice.to_do) == (threads, to_do)
    assert f"on {cores} core" in choice.reason


def test_threads_that_the_environment_sets_are_reported_so(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2, 2)
    assert choose_threads().reason == "torch sets them, in one process on 2 cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads().reason.startswith("OMP_NUM_THREADS sets them")


def test_more_loader_processes_than_cores_are_a_warning(machine: Any) -> None:
    machine(4, processes=2)
    assert choose_loader_workers(2, CPU) == Choice(2, "the recipe asks for it")
    machine(2, processes=2)
    choice = choose_loader_workers(2, CPU)
    assert choice.reason == "2 loader processes in each of 2 processes share 2 cores"
    assert choice.to_do == "lower machine.loader_workers (of a fine-tuning: loader_workers) to 1"
    assert not choose_loader_workers(None, CUDA).to_do


def test_torch_does_not_repeat_that(machine: Any) -> None:
    recipe = small_recipe()
    dataset = TrainingDataset(MemoryStore(recipe.preprocessing, 4, 2), recipe, ["volume0000"])
    batches = training_batches(dataset, 0, 1, 1 + 2 * cores())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(batches).volume_ids == 4 * ("volume0000",)
    batches.close()


@pytest.mark.parametrize(
    ("has_triton", "has_compiler", "missing"),
    [
        (True, False, "a C compiler (gcc, clang, cc) not found"),
        (False, True, "Triton not found"),
        (False, False, "Triton and a C compiler (gcc, clang, cc) not found"),
    ],
)
def test_a_gpu_without_a_compiler_runs_uncompiled_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool, has_compiler: bool, missing: str
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(f"{SETTINGS}.importlib.util.find_spec", lambda name: name if has_triton else None)
    monkeypatch.setattr(f"{SETTINGS}.shutil.which", lambda name: name if has_compiler else None)
    choice = choose_compile(small_recipe(), CUDA, 1000)
    assert choice.value is False
    assert choice.reason.startswith(missing)
    assert "machine.compile=false" in choice.to_do
    for recipe, device, updates in (
        (small_recipe(), CUDA, 999),
        (small_recipe(), CPU, 1000),
        (small_recipe(machine={"compile": False}), CUDA, 1000),
    ):
        assert not choose_compile(recipe, device, updates).to_do, "nobody waits for a compiler there"


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("plain_tokens", [5, 15, 24])
def test_the_attention_reported_is_that_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str, plain_tokens: int
) -> None:
    """24 tokens, of which the encoder has fewer than 15 and the predictor more."""
    monkeypatch.setattr(blocks, "PLAIN_TOKENS", plain_tokens)
    monkeypatch.setattr(f"{SETTINGS}.PLAIN_TOKENS", plain_tokens)
    recipe = with_precision(small_recipe(), name)
    context, target = recipe.mask_counts
    assert 5 < context < 15 < context + target <= 24
    calls = []
    attention = blocks.F.scaled_dot_product_attention
    monkeypatch.setattr(blocks.F, "scaled_dot_product_attention", lambda *args: calls.append(1) or attention(*args))
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    for tokens in (context, context + target):
        blocks.attend(*(torch.ones(1, 1, tokens, 4, dtype=dtype, requires_grad=True) for _ in range(3)))
    expected = {0: "plain products", 2: "scaled_dot_product_attention"}.get(
        len(calls), f"plain products up to {plain_tokens} tokens, else scaled_dot_product_attention"
    )
    assert choose_attention(recipe, CPU).value == expected
    assert choose_attention(recipe, CUDA).value == "scaled_dot_product_attention"


def test_a_plan_names_every_choice_and_why(monkeypatch: pytest.MonkeyPatch, machine: Any) -> None:
    monkeypatch.setattr(planning, "peak_bytes", lambda *_: 0)
    machine(2, 8)
    planned = planning.plan(small_recipe()).to_json()
    assert (planned["threads"], planned["compile"], planned["loader_workers"]) == (8, False, 0)
    assert planned["attention"] == "scaled_dot_product_attention"
    assert planned["threads_reason"] == "8 threads in one process on 2 cores slow each other down"
    assert all(planned[f"{name}_reason"] for name in choose_for_machine(small_recipe(), CPU, 1, 1))


def prepared(out: Path, recipe: Recipe) -> Any:
    runtime = Runtime("fp32")
    runtime.precision_reason = "of the test"
    return prepare_run(recipe, MemoryStore(recipe.preprocessing, 4, 2), out, False, runtime)


@pytest.mark.cpu
def test_a_run_records_what_it_takes_and_prints_it_once(
    tmp_path: Path, machine: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    machine(2, 8)
    run = prepared(tmp_path / "run", small_recipe(machine={"loader_workers": 3}))
    devices = json.loads((tmp_path / "run" / "run.json").read_text())["devices"]
    assert devices["precision_reason"] == "of the test"
    assert (devices["threads"], devices["compile"], devices["loader_workers"]) == (8, False, 3)
    assert devices["compile_reason"]
    assert devices["attention"] == "scaled_dot_product_attention"
    capsys.readouterr()
    run.print_choices()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "on cpu: precision fp32 (of the test), threads 8, compile no, attention scaled_dot_product_attention, "
        "loader_workers 3, data_on host"
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(":")[0] for message in warnings] == ["threads", "loader_workers"]
    assert "set OMP_NUM_THREADS=2" in warnings[0]


def test_a_run_prints_where_it_makes_views_also_when_memory_is_used_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared(tmp_path / "run", small_recipe())
    monkeypatch.setattr(f"{SETTINGS}.choose_data_on", lambda *_: Choice("patches", "less memory is free"))
    run.print_choices()
    assert capsys.readouterr().err.rstrip().endswith("data_on host")


def test_a_quiet_run_prints_warnings_alone(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    set_quiet(True)
    try:
        print_choices(CPU, "fp32", "of the test", {"threads": Choice(8, "too many", "set fewer")})
    finally:
        set_quiet(False)
    assert capsys.readouterr().err == ""
    assert caplog.messages == ["threads: too many; set fewer"]


def test_one_thread_is_a_number_and_no_yes(capsys: pytest.CaptureFixture[str]) -> None:
    print_choices(CPU, "fp32", "of the test", {"threads": Choice(1, ""), "compile": Choice(True, "")})
    assert capsys.readouterr().err.endswith("threads 1, compile yes\n")


@pytest.mark.cpu
def test_the_precision_of_a_runtime_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "processor", lambda: Processor("x86_64", frozenset({"amx_bf16"})))
    monkeypatch.setattr(precision, "measured_rates", lambda device: (400.0, 100.0))
    assert Runtime("auto").describe()["precision_reason"] == "amx_bf16: 400 GFLOP/s in bf16, 100 in fp32"
