"""The verb: what its JSON holds, what it refuses and with which words; every comparison once, in small."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import compare
from benchmarks.peers.alternating_runs import Comparison
from benchmarks.peers.benchmarks import BENCHMARKS, Benchmark, Peer, run_benchmark

from command_line import Outcome, call
from octjepa.errors import OctjepaError, UsageError

QUICK = [
    ("step", "plain"),
    ("step", "transformers"),
    ("step", "shipped"),
    ("step", "shipped_default"),
    ("step", "sparse"),
    ("step", "sparse_alike"),
    ("step", "matmul"),
    ("step", "fp32"),
    ("ingest", "pydicom"),
    ("ingest", "monai"),
    ("loader", "torch"),
    ("loader", "monai"),
    ("loader", "monai_persistent"),
    ("loader", "decoding"),
    ("embed", "single"),
    ("embed", "transformers"),
    ("peak", "shipped"),
    ("segment", "monai"),
    ("segment", "surface_finder"),
]
KEYS = {"subject", "against", "ours_is", "other_is", "unit", "reads", "ours", "other", "ratio", "spread", "runs"}


def bench(*words: object) -> Outcome:
    """`make bench ARGS=...` in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = compare([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subject `step` that takes no time: ours 6, other 3."""

    @contextmanager
    def comparison() -> Iterator[Comparison]:
        yield Comparison(lambda: 6.0, lambda: 3.0, {"tokens": 7})

    peers = {"plain": Peer("a plain one", comparison), "fp32": Peer("another", comparison)}
    monkeypatch.setitem(BENCHMARKS, "step", Benchmark("ours", "volumes a second", "how to read it", 5, peers))


@pytest.mark.usefixtures("stub")
def test_the_json_of_the_contract() -> None:
    result = bench("step", "--json")
    assert result.code == 0, result.err
    assert result.json.keys() == KEYS | {"setup", "machine"}
    assert (result.json["ours"], result.json["other"], result.json["ratio"]) == (6.0, 3.0, 2.0)
    assert result.json["runs"] == [{"ours": 6.0, "other": 3.0, "ratio": 2.0}] * 5
    assert result.json["setup"] == {"tokens": 7}
    assert result.json["against"] == "plain"
    again = bench("step", "--against", "fp32", "--repeats", 2, "--json").json
    assert (again["against"], len(again["runs"])) == ("fp32", 2)


@pytest.mark.usefixtures("stub")
def test_as_text_the_ratio_stands_beside_its_spread() -> None:
    result = bench("step", "--quiet")
    assert result.code == 0
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines() if line[0] != " " and " " in line.strip())
    assert (lines["ratio"], lines["spread"], lines["unit"]) == ("2", "[2, 2]", "volumes a second")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["speed"], ["'speed'", *BENCHMARKS]),
        ([], ["subject"]),
        (["step", "--against", "keras"], ["'keras'", *BENCHMARKS["step"].peers]),
        (["ingest", "--against", "plain"], ["'plain'", "pydicom", "monai"]),
        (["step", "--repeats", "0"], ["--repeats 0", "expected 1 or more"]),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(words: list[str], expected: list[str]) -> None:
    result = bench(*words)
    assert result.code == 2
    assert result.out == ""
    for word in expected:
        assert word in result.err


def test_the_command_line_knows_every_subject() -> None:
    assert f"{{{','.join(BENCHMARKS)}}}" in bench("--help").out


@pytest.mark.parametrize("words", [{"subject": "speed"}, {"subject": "step", "repeats": 0}])
def test_from_python_the_same_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"no benchmark is called 'speed'|at least, got 0"):
        run_benchmark(**words)


@pytest.mark.parametrize(
    ("subject", "peer", "module", "extra"),
    [
        ("step", "transformers", "transformers_vjepa2", "hf"),
        ("embed", "transformers", "transformers_vjepa2", "hf"),
        ("ingest", "monai", "ingest", "monai"),
        ("loader", "monai", "ingest", "monai"),
        ("segment", "monai", "ingest", "monai"),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_peer_that_is_not_installed_names_its_extra(
    subject: str, peer: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(f"benchmarks.peers.{module}.import_module", absent)
    result = bench(subject, "--against", peer)
    assert result.code == 2
    assert f"[{extra}]" in result.err
    assert "pip install" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "peer"), QUICK, ids=map("-".join, QUICK))
@pytest.mark.usefixtures("small")
def test_every_comparison_in_small(subject: str, peer: str) -> None:
    result = run_benchmark(subject, peer, repeats=1)
    (run,) = result["runs"]
    assert min(run.values()) > 0
    assert run["ratio"] == pytest.approx(run["ours"] / run["other"])
    assert result["setup"]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_memory_is_the_plan_against_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself is in tests/train/test_plan.py."""
    from benchmarks.peers.data import RECIPE

    measured = []
    monkeypatch.setattr("octjepa.distributed.precision.bf16_is_faster", lambda device: (False, "a stand-in"))

    def peak_memory_bytes(recipe: list[str]) -> int:
        measured.append(recipe)
        return 1000

    monkeypatch.setattr("benchmarks.peers.memory.peak_memory_bytes", peak_memory_bytes)
    planned = call("plan", *RECIPE, "train.global_batch=4", "--json").json["peak_memory_bytes"]
    result = run_benchmark("memory", repeats=2)
    assert (result["ours"], result["other"], result["ratio"]) == (planned, 1000, planned / 1000)
    assert measured == [[*RECIPE, "train.global_batch=4", "train.precision=fp32"]] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_scaling_measures_the_updates_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of processes is stood in for by one: two of them are in tests/resume."""
    from benchmarks.peers import scaling

    real, measured = scaling.train, []

    def train(processes: int, threads: int, *rest: Any) -> list[float]:
        measured.append((processes, threads))
        if len(measured) == 1:
            seconds = real(1, 1, *rest)
            assert len(seconds) == 3
            assert not Path(rest[2]).exists()
        return [100.0, 1.0, 1.0] if processes == 2 else [0.0, 2.0, 2.0]  # the first is left out

    monkeypatch.setattr(scaling, "train", train)
    result = run_benchmark("scaling", repeats=1)
    assert measured == [(2, 1), (1, 2)]
    assert (result["ours"], result["other"]) == (2.0, 1.0)  # 2 updates of 2 volumes


@pytest.mark.slow
def test_a_run_that_fails_is_reported_with_its_own_words(tmp_path: Path) -> None:
    from benchmarks.peers.scaling import train

    with pytest.raises(OctjepaError, match=r"a run that was to be measured failed: octjepa: .*no store"):
        train(1, 1, 2, str(tmp_path / "no store"), tmp_path / "run", ["tiny_cpu_vjepa"])


def test_a_busy_machine_is_reported(
    monkeypatch: pytest.MonkeyPatch, stub: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (1.9, 0.0, 0.0))
    assert run_benchmark("step")["machine"]["load"] == 1.9
    assert not caplog.text
    monkeypatch.setattr("os.getloadavg", lambda: (2.1, 0.0, 0.0))
    run_benchmark("step")
    assert "load 2.1 on 4 cores" in caplog.text
