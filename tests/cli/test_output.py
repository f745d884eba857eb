"""The text that commands print for people: few lines, the right plurals, no counts of zero, the path last."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import call
from octjepa.cli.output import check_parquet_file, comparison_lines, print_probe, print_result, print_table
from octjepa.errors import counted


@pytest.fixture
def verbose() -> Iterator[None]:
    log = logging.getLogger("octjepa")
    before, log.level = log.level, logging.INFO
    logging.getLogger("octjepa").setLevel(logging.INFO)
    yield
    log.setLevel(before)


def row(name: str, target: str, value: float, pool: str = "zones_whitened", probe: str = "linear") -> dict[str, Any]:
    ends = {"low": value - 0.05, "high": value + 0.05, "n": 60, "n_people": 30}
    return {"name": name, "target": target, "probe": probe, "pool": pool, "metric": "auroc", "value": value, **ends}


def probe_payload(targets: int, people: int = 30) -> dict[str, Any]:
    rows = []
    for number in range(targets):
        target = "macro" if number == targets - 1 else f"lesion {number}"
        for pool in ("mean", "zones_whitened"):
            rows += [row("run", target, 0.9, pool), row("untrained", target, 0.8, pool)]
        rows += [row("intensity", target, 0.85, "none"), row("histogram", target, 0.6, "none")]
        rows.append(row("majority", target, 0.5, "none", "constant"))
    paired = {"name": "run", "reference": "untrained", "target": "macro", "metric": "auroc", "probe": "linear"}
    paired |= {"pool": "zones_whitened", "difference": 0.1, "low": 0.05, "high": 0.15, "n_people": people}
    return {"rows": rows, "paired": paired}


def test_a_probe_prints_its_comparison_in_fifteen_lines_and_the_path_last(capsys: pytest.CaptureFixture[str]) -> None:
    print_probe(probe_payload(20), "rows", False, Path("run/probe.json"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 15
    assert lines[0].split() == ["auroc", "(linear", "probe,", "zones_whitened)", "run", "untrained", "intensity"]
    assert lines[1].startswith("macro")
    assert [line.split("  ")[0] for line in lines[2:5]] == ["lesion 0", "lesion 1", "lesion 2"]
    assert "and 12 more targets" in lines[9]
    assert "run minus untrained, macro auroc: 0.100 [0.05, 0.15], same 30 test people" in lines
    assert lines[-1] == "all results  run/probe.json"


def test_control_characters_of_a_scan_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A DICOM header from another person may hold them, for example in its protocol name."""
    protocol = "macula\x1b]0;title\x07\x1b[31m \u202ered"
    print_result({"protocol": protocol, "files": [{"name": protocol}]}, as_json=False)
    print_table([("protocol", protocol)])
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "protocol  macula\\x1b]0;title" in shown


def test_encoders_and_baselines_are_compared_with_one_probe_and_one_pooling() -> None:
    payload = probe_payload(1)
    payload["rows"].insert(0, row("run", "macro", 0.99, "mean"))
    header, values = comparison_lines(payload["rows"], {"auroc"}, payload["paired"])
    assert header[1:] == ("run", "untrained", "intensity")
    assert values[1].startswith("0.900")


def test_few_test_people_conclude_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_probe(probe_payload(1, people=6), "rows", False)
    assert "6 test people: too few to conclude anything" in capsys.readouterr().out
    print_probe(probe_payload(1), "rows", False)
    assert "too few" not in capsys.readouterr().out


def test_counts_of_zero_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"accepted": 3, "people_at_several_sites": 0, "split": False, "loss": 0.0}
    print_result(result, False)
    assert capsys.readouterr().out.split() == ["accepted", "3", "split", "no", "loss", "0"]


@pytest.mark.usefixtures("verbose")
def test_verbose_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"accepted": 3, "people_at_several_sites": 0}, False)
    print_probe(probe_payload(20), "rows", False)
    printed = capsys.readouterr().out
    assert "people_at_several_sites  0" in printed
    print_probe(probe_payload(1, people=6), "rows", False)
    assert "6 test people: too few to conclude anything" in capsys.readouterr().out
    assert len(printed.splitlines()) > 100


def test_plurals() -> None:
    assert [counted(count, "test person") for count in (0, 1, 2)] == ["0 test people", "1 test person", "2 test people"]
    assert [counted(count, "entry") for count in (1, 2000)] == ["1 entry", "2,000 entries"]


@pytest.mark.parametrize("name", ["e.csv", "e.TSV", "e.json", "e.npz"])
def test_a_parquet_table_is_not_written_under_the_suffix_of_another_format(tmp_path: Path, name: str) -> None:
    outcome = call("embed", "phantom-unet", "--store", tmp_path / "store", "--out", tmp_path / name)
    assert outcome.code == 2
    assert f"would hold a Parquet table, not {Path(name).suffix}: give --out {tmp_path / 'e.parquet'}" in outcome.err


@pytest.mark.parametrize("name", ["e.parquet", "e", "run.v2"])
def test_other_names_of_a_parquet_table_are_taken(tmp_path: Path, name: str) -> None:
    check_parquet_file(tmp_path / name)
