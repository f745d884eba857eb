"""The measures of benchmarks/structure.py stay within their limits, and CONTRIBUTING.md shows them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.structure import LIMITS, functions_with_many_parameters, measure, run_time_imports_upwards

ROOT = Path(__file__).resolve().parents[2]


def test_no_measure_of_the_structure_grows() -> None:
    """A limit in benchmarks/structure_limits.json falls when the code improves; it never rises."""
    values = measure()
    over = {name: f"{values[name]}, at most {limit}" for name, limit in LIMITS.items() if values[name] > limit}
    assert not over, (over, functions_with_many_parameters(), run_time_imports_upwards())


def test_contributing_names_the_command_that_computes_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "make structure" in text
    assert all(name in text for name in LIMITS)
