"""The page of all comparisons: a line for each machine, what is missing is named, equal results give an equal plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import performance


def _result(ratio: float) -> dict[str, Any]:
    return {
        "ratio": ratio, "spread": [ratio - 0.1, ratio + 0.1], "ours": 10.0 * ratio, "other": 10.0, "threads": 2,
        "measured": "2026-01-01", "gflops_fp32": 100, "gflops_bf16": 50, "precision": "fp32",
        "machine": {"cores": 2, "torch": "2.13"},
    }  # fmt: skip


EVERY = {
    "Processor, no bf16": {"step plain": _result(1.5), "step shipped": {"missing": "needs transformers"}},
    "Other, avx512_bf16": {"step plain": _result(0.75)},
}


def test_every_machine_has_its_line_and_what_is_missing_is_named() -> None:
    text = performance.page(EVERY)
    assert "| A | 2026-01-01 | Processor, no bf16 | 2 | 2 | 2.13 | 100 | 50 | fp32 |" in text
    assert "a plain eager torch loop | A | 1.50 (1.40 to 1.60) | 15 | 10 |" in text
    assert "a plain eager torch loop | B | 0.75 (0.65 to 0.85) | 7.5 | 10 |" in text
    assert "| A | not measured: needs transformers | | |" in text


def test_equal_results_give_an_equal_plot(tmp_path: Path) -> None:
    performance.plot_ratios(EVERY, tmp_path / "one.svg")
    performance.plot_ratios(EVERY, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_machine_with_hidden_instructions_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "cpu_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(performance, "processor", lambda: "Processor")
    for name in performance.RESTRICTIONS:
        monkeypatch.delenv(name, raising=False)
    assert performance.machine() == "Processor, avx512_bf16"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert performance.machine() == "Processor, ATEN_CPU_CAPABILITY=avx2"
