"""bf16 is chosen where it is faster, and only there."""

from __future__ import annotations

import pytest
import torch

from octjepa.distributed import precision
from octjepa.distributed.precision import (
    bf16_is_faster,
    choose_precision,
    computes_in_bf16,
    gemm_gflops,
    inference_autocast,
    measured_rates,
)
from octjepa.distributed.runtime import Runtime
from octjepa.machine import Processor

CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, bf16_gflops: float, *sets: str, architecture: str = "x86_64") -> None:
    """A CPU with these instruction sets, on which fp32 products run at 100 GFLOP/s."""
    monkeypatch.setattr(precision, "processor", lambda: Processor(architecture, frozenset(sets)))
    monkeypatch.setattr(precision, "measured_rates", lambda device: (bf16_gflops, 100.0))


@pytest.mark.parametrize(
    ("architecture", "sets", "bf16_gflops", "expected"),
    [
        ("x86_64", [], 400.0, False),  # no instruction set: the products do not count
        ("x86_64", ["avx512_bf16"], 400.0, True),
        ("x86_64", ["amx_bf16"], 400.0, True),
        ("x86_64", ["amx_bf16"], 52.0, False),  # hidden by the hypervisor
        ("x86_64", ["avx512_bf16"], 110.0, False),  # less than the casts of an update cost
        ("aarch64", [], 300.0, True),
        ("aarch64", [], 50.0, False),
    ],
)
def test_instruction_sets_are_confirmed_by_a_product(
    monkeypatch: pytest.MonkeyPatch, architecture: str, sets: list[str], bf16_gflops: float, expected: bool
) -> None:
    pretend(monkeypatch, bf16_gflops, *sets, architecture=architecture)
    faster, reason = bf16_is_faster(CPU)
    assert faster == expected
    assert f"{bf16_gflops:.3g} GFLOP/s in bf16, 100 in fp32" in reason
    assert choose_precision("auto", CPU) == ("bf16" if expected else "fp32", reason)


def test_cuda_needs_compute_capability_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "measured_rates", lambda device: (400.0, 100.0))
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert bf16_is_faster(torch.device("cuda"))[0] == expected


@pytest.mark.parametrize(("sets", "expected"), [([], False), (["avx512_bf16"], True), (["amx_bf16"], True)])
def test_inference_multiplies_in_bf16_only_with_its_instructions(
    monkeypatch: pytest.MonkeyPatch, sets: list[str], expected: bool
) -> None:
    pretend(monkeypatch, 400.0, *sets)
    computes_in_bf16.cache_clear()
    with inference_autocast(CPU):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    computes_in_bf16.cache_clear()
    assert product.dtype == (torch.bfloat16 if expected else torch.float32)


def test_a_precision_that_the_recipe_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 5.0)
    name, reason = choose_precision("bf16", CPU)
    assert name == "bf16"
    assert "slower than in fp32" in reason
    assert "5 GFLOP/s" in reason
    pretend(monkeypatch, 400.0, "amx_bf16")
    assert choose_precision("fp32", CPU)[0] == "fp32"
    assert "slower" not in choose_precision("bf16", CPU)[1]


@pytest.mark.parametrize(("sets", "expected"), [(["amx_bf16"], "bf16"), ([], "fp32")])
def test_auto_never_reaches_torch(monkeypatch: pytest.MonkeyPatch, sets: list[str], expected: str) -> None:
    pretend(monkeypatch, 400.0, *sets)
    runtime = Runtime("auto")
    assert runtime.precision == expected
    assert runtime.describe()["precision"] == expected
    with runtime.autocast():
        assert torch.is_autocast_enabled("cpu") == (expected == "bf16")


def test_rates_are_measured_once() -> None:
    assert measured_rates(CPU) is measured_rates(CPU)
    assert min(measured_rates(CPU)) > 0


def test_the_rate_of_products_is_measured() -> None:
    assert gemm_gflops(CPU, torch.float32, seconds=0.01)[0] > 0.1


class PretendedProcessor:
    """A clock, and products that take their time by it; those of `interrupted` numbers take 50 ms more."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, gflops: dict[torch.dtype, float], interrupted: set[int]
    ) -> None:
        self.now, self.gflops, self.interrupted = 0.0, gflops, interrupted
        self.products: list[tuple[torch.dtype, int]] = []
        monkeypatch.setattr(precision.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(precision.torch, "mm", self.multiply)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> None:
        number = sum(dtype == a.dtype for dtype, _ in self.products)
        self.now += 2 * len(a) ** 3 / self.gflops[a.dtype] / 1e9 + 0.05 * (number in self.interrupted)
        self.products.append((a.dtype, len(a)))


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("interrupted", [set(), {0}, {1}, {2}, {3}, {9}, {0, 1, 2, 3}])
@pytest.mark.parametrize("bf16", [20.0, 270.0, 1200.0])
def test_products_that_other_work_interrupts_change_no_rate(
    monkeypatch: pytest.MonkeyPatch, bf16: float, interrupted: set[int]
) -> None:
    processor = PretendedProcessor(monkeypatch, {BF16: bf16, FP32: 300.0}, interrupted)
    assert gemm_gflops(CPU, BF16, FP32) == pytest.approx([bf16, 300.0])
    assert min(side for _, side in processor.products) == 512
    assert [dtype for dtype, _ in processor.products[:6]] == 3 * [BF16, FP32], "they take turns"
    assert processor.now < 0.4 + 0.1 * len(interrupted)


def test_an_emulated_type_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = PretendedProcessor(monkeypatch, {BF16: 0.5, FP32: 300.0}, set())
    assert gemm_gflops(CPU, BF16, FP32) == pytest.approx([0.5, 300.0])
    assert [dtype for dtype, _ in processor.products].count(BF16) == 2


def test_a_rate_of_a_thousand_is_written_as_people_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1234.5, "amx_bf16")
    assert bf16_is_faster(CPU)[1] == "amx_bf16: 1,230 GFLOP/s in bf16, 100 in fp32"
