"""The page of all comparisons: a line for each machine, what is missing is named, equal results give an equal plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import performance
from benchmarks.performance_aims import NOTES, reference_is_ahead

from octjepa.machine import Processor


def _result(ratio: float) -> dict[str, Any]:
    return {
        "subject": "step",
        "ratio": ratio,
        "spread": [ratio - 0.1, ratio + 0.1],
        "ours": 10.0 * ratio,
        "other": 10.0,
        "threads": 2,
        "measured": "2026-01-01",
        "gflops_fp32": 100,
        "gflops_bf16": 50,
        "precision": "fp32",
        "machine": {"cores": 2, "torch": "2.13"},
    }


EVERY = {
    "Processor, no bf16": {"step plain": _result(1.5), "step shipped": {"missing": "needs transformers"}},
    "Other, avx512_bf16": {"step plain": _result(0.75)},
    "Third, amx_bf16": {"step sparse": _result(1.5), "step matmul": _result(0.3)},
}
EVERY["Processor, no bf16"] |= {"step sparse": _result(1.3), "step matmul": _result(0.61)}


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
    monkeypatch.setattr(performance, "processor", lambda: Processor("x86_64", frozenset({"avx512_bf16"})))
    monkeypatch.setattr(performance, "processor_name", lambda: "Processor")
    for name in performance.RESTRICTIONS:
        monkeypatch.delenv(name, raising=False)
    assert performance.machine() == "Processor, avx512_bf16"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert performance.machine() == "Processor, avx512_bf16, ATEN_CPU_CAPABILITY=avx2"
    both = Processor("x86_64", frozenset({"amx_bf16", "avx512_bf16"}))
    monkeypatch.setattr(performance, "processor", lambda: both)
    assert performance.machine() == "Processor, amx_bf16, avx512_bf16, ATEN_CPU_CAPABILITY=avx2"


def test_aims_are_beside_the_figures_met_or_not() -> None:
    text = performance.page(EVERY)
    assert (
        "| 1.3 times as fast as a sparse V-JEPA step as published (`step sparse`) | A: 1.3; C: 1.5 | yes |  |" in text
    )
    assert "(`step matmul`) | C: 0.3; A: 0.61 | A | products of this width" in text
    assert "(`loader decoding`) | not measured | - |  |" in text
    assert "- `plain`: the same network and products" in text  # B is behind the reference
    assert "`compiled`: compiled blocks fuse" not in text


def test_the_page_in_the_repository_gives_a_reason_for_every_reference_that_is_ahead() -> None:
    every = json.loads((performance.RECORDS / "performance.json").read_text(encoding="utf-8"))
    ahead = {name for known in every.values() for name, one in known.items() if reference_is_ahead(one)}
    assert ahead <= set(NOTES)
    page = (performance.FOLDER / "README.md").read_text(encoding="utf-8")
    written = page.partition("<!-- performance -->\n")[2].partition("<!-- end -->")[0]
    assert written == performance.page(every)


def test_operators_of_an_update_are_named_with_their_share() -> None:
    one = {"precision": "bf16", "matrix_products": 0.4, "operators": {"aten::mm": 0.3, "aten::copy_": 0.2}}
    record = {"Processor, no bf16, fp32": {"threads": 1, "measured": "2026-01-01", "tiny_cpu": one}}
    lines = performance.operators_by_time(record)
    assert lines[-1] == "| Processor, no bf16, fp32 | 1 | `tiny_cpu` | 0.40 | mm 0.30, copy_ 0.20 |"
