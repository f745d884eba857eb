"""The verb: what its JSON holds, what it refuses and with which words; every comparison once, in small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command_line import call
from octjepa.bench.alternating_runs import Contest
from octjepa.bench.benchmarks import SUBJECTS, Peer, Subject
from octjepa.bench.run import run_bench
from octjepa.errors import OctjepaError, UsageError

QUICK = [
    ("step", "plain"), ("step", "transformers"), ("step", "fp32"), ("ingest", "pydicom"), ("ingest", "monai"),
    ("loader", "torch"), ("loader", "monai"), ("embed", "single"), ("embed", "transformers"),
]  # fmt: skip
KEYS = {"subject", "against", "ours_is", "other_is", "unit", "reads", "ours", "other", "ratio", "spread", "runs"}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subject `step` that takes no time: ours 6, other 3."""

    @contextmanager
    def contest() -> Iterator[Contest]:
        yield Contest(lambda: 6.0, lambda: 3.0, {"tokens": 7})

    peers = {"plain": Peer("a plain one", contest), "fp32": Peer("another", contest)}
    monkeypatch.setitem(SUBJECTS, "step", Subject("ours", "volumes a second", "how to read it", 5, peers))


@pytest.mark.usefixtures("stub")
def test_the_json_of_the_contract() -> None:
    told = call("bench", "step", "--json")
    assert told.code == 0, told.err
    assert told.json.keys() == KEYS | {"setup", "machine"}
    assert (told.json["ours"], told.json["other"], told.json["ratio"]) == (6.0, 3.0, 2.0)
    assert told.json["runs"] == [{"ours": 6.0, "other": 3.0, "ratio": 2.0}] * 5
    assert told.json["setup"] == {"tokens": 7}
    assert told.json["against"] == "plain"
    again = call("bench", "step", "--against", "fp32", "--repeats", 2, "--json").json
    assert (again["against"], len(again["runs"])) == ("fp32", 2)


@pytest.mark.usefixtures("stub")
def test_as_text_the_ratio_stands_beside_its_spread() -> None:
    told = call("bench", "step", "--quiet")
    assert told.code == 0
    lines = dict(line.split(maxsplit=1) for line in told.out.splitlines() if line[0] != " " and " " in line.strip())
    assert (lines["ratio"], lines["spread"], lines["unit"]) == ("2", "[2, 2]", "volumes a second")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["speed"], ["'speed'", *SUBJECTS]),
        ([], ["subject", *SUBJECTS]),
        (["step", "--against", "keras"], ["bench step", "'keras'", *SUBJECTS["step"].peers]),
        (["ingest", "--against", "plain"], ["bench ingest", "'plain'", "pydicom", "monai"]),
        (["step", "--repeats", "0"], ["--repeats", "greater than or equal to 1"]),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(words: list[str], said: list[str]) -> None:
    told = call("bench", *words)
    assert told.code == 2
    assert told.out == ""
    for word in said:
        assert word in told.err


def test_the_command_line_knows_every_subject() -> None:
    assert f"<{'|'.join(SUBJECTS)}>" in call("bench", "--help").out


@pytest.mark.parametrize("words", [{"subject": "speed"}, {"subject": "step", "repeats": 0}])
def test_from_python_the_same_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"nothing to measure is called 'speed'|at least, got 0"):
        run_bench(**words)


@pytest.mark.parametrize(
    ("subject", "peer", "module", "extra"),
    [
        ("step", "transformers", "vjepa2", "hf"), ("embed", "transformers", "vjepa2", "hf"),
        ("ingest", "monai", "ingest", "segment"), ("loader", "monai", "ingest", "segment"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("small")
def test_a_peer_that_is_not_installed_names_its_extra(
    subject: str, peer: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(f"octjepa.bench.{module}.import_module", absent)
    told = call("bench", subject, "--against", peer)
    assert told.code == 2
    assert f"[{extra}]" in told.err
    assert "pip install" in told.err


@pytest.mark.parametrize(("subject", "peer"), QUICK, ids=map("-".join, QUICK))
@pytest.mark.usefixtures("small")
def test_every_comparison_in_small(subject: str, peer: str) -> None:
    told = run_bench(subject, peer, repeats=1)
    (run,) = told["runs"]
    assert min(run.values()) > 0
    assert run["ratio"] == pytest.approx(run["ours"] / run["other"])
    assert told["setup"]


@pytest.mark.usefixtures("small")
def test_memory_is_the_plan_against_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself is in tests/train/test_plan.py."""
    from octjepa.bench.data import RECIPE

    asked = []

    def held_bytes(recipe: list[str]) -> int:
        asked.append(recipe)
        return 1000

    monkeypatch.setattr("octjepa.bench.memory.held_bytes", held_bytes)
    planned = call("plan", *RECIPE, "train.global_batch=4", "--json").json["peak_memory_bytes"]
    told = run_bench("memory", repeats=2)
    assert (told["ours"], told["other"], told["ratio"]) == (planned, 1000, planned / 1000)
    assert asked == [[*RECIPE, "train.global_batch=4"]] * 2


@pytest.mark.usefixtures("small")
def test_scaling_measures_the_updates_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of processes is stood in for by one: two of them are in tests/resume."""
    from octjepa.bench import scaling

    real, asked = scaling.train, []

    def train(processes: int, threads: int, *rest: Any) -> tuple[float, list[float]]:
        asked.append((processes, threads))
        if len(asked) == 1:
            _, seconds = real(1, 1, *rest)
            assert len(seconds) == 3
            assert not Path(rest[2]).exists()
        return 0.0, [100.0, 1.0, 1.0] if processes == 2 else [0.0, 2.0, 2.0]  # the first is left out

    monkeypatch.setattr(scaling, "train", train)
    told = run_bench("scaling", repeats=1)
    assert asked == [(2, 1), (1, 2)]
    assert (told["ours"], told["other"]) == (2.0, 1.0)  # 2 updates of 2 volumes


def test_a_run_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    from octjepa.bench.scaling import train

    with pytest.raises(OctjepaError, match=r"a run that was to be measured failed: octjepa: .*no store"):
        train(1, 1, 2, str(tmp_path / "no store"), tmp_path / "run", ["tiny_cpu"])


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch, stub: None, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (1.9, 0.0, 0.0))
    assert run_bench("step")["machine"]["load"] == 1.9
    assert not caplog.text
    monkeypatch.setattr("os.getloadavg", lambda: (2.1, 0.0, 0.0))
    run_bench("step")
    assert "load 2.1 on 4 cores" in caplog.text
