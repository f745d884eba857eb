"""scripts/launch/one_machine: what torchrun is asked for, when a run continues, restarts, signals, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stage

pytestmark = pytest.mark.slow  # together: the scripts wait for processes

SCRIPT = "one_machine"


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, output = process.communicate(timeout=30)
    return process.returncode, output


def test_one_process_a_device_and_arguments_with_spaces_survive(stage: Stage) -> None:
    done = stage.run(SCRIPT, *stage.arguments, FAKE_DEVICES="2")
    assert done.returncode == 0, done.stderr
    (torchrun,) = stage.calls("torchrun")
    assert torchrun[torchrun.index("--nproc-per-node") + 1] == "2"
    assert {"--standalone", "--max-restarts"} <= set(torchrun)
    for rank in "01":
        assert ["octjepa", f"rank={rank}", "pretrain", *stage.arguments] in stage.calls("octjepa")


@pytest.mark.parametrize(("devices", "cores"), [("1", 1), ("3", 3)])
def test_cores_are_divided_over_the_processes(stage: Stage, devices: str, cores: int) -> None:
    stage.run(SCRIPT, *stage.arguments, FAKE_DEVICES=devices)
    had = len(os.sched_getaffinity(0))
    assert stage.calls("torchrun")[0][1] == f"OMP_NUM_THREADS={max(1, had // cores)}"


def test_threads_that_were_requested_stay(stage: Stage) -> None:
    stage.run(SCRIPT, *stage.arguments, OMP_NUM_THREADS="7")
    assert stage.calls("torchrun")[0][1] == "OMP_NUM_THREADS=7"


def test_resume_is_added_when_the_folder_holds_a_run(stage: Stage) -> None:
    stage.out.mkdir()
    stage.run(SCRIPT, *stage.arguments)
    assert "--resume" not in stage.calls("octjepa")[-1]
    (stage.out / "run.json").touch()
    stage.run(SCRIPT, *stage.arguments)
    assert stage.calls("octjepa")[-1][-1] == "--resume"
    stage.run(SCRIPT, *stage.arguments, "--resume")
    assert stage.calls("octjepa")[-1].count("--resume") == 1


def test_a_failure_is_followed_by_a_restart_that_resumes(stage: Stage) -> None:
    done = stage.run(SCRIPT, "--pause", "0", *stage.arguments, FAKE_CODES="1 137 0", FAKE_BEGINS="1")
    assert done.returncode == 0, done.stderr
    assert [words[-1] == "--resume" for words in stage.calls("octjepa")] == [False, True, True]


def test_restarts_are_bounded(stage: Stage) -> None:
    done = stage.run(SCRIPT, "--pause", "0", "--restarts", "2", *stage.arguments, FAKE_CODES="1")
    assert done.returncode == 1
    assert len(stage.calls("octjepa")) == 3
    assert "after 2 restarts" in done.stderr


@pytest.mark.parametrize(
    ("first", "second", "code"), [("2", "2", 2), ("2", "wait", 2), ("143", "143", 143), ("130", "130", 130)]
)
def test_wrong_usage_and_a_wanted_stop_are_not_restarted(stage: Stage, first: str, second: str, code: int) -> None:
    words = ["--processes", "2", "--pause", "0", *stage.arguments]
    done = stage.run(SCRIPT, *words, FAKE_CODES_0=first, FAKE_CODES_1=second)
    assert done.returncode == code, done.stderr
    assert len(stage.calls("torchrun")) == 1


def test_a_process_that_died_beside_one_that_stopped_is_a_failure(stage: Stage) -> None:
    words = ["--processes", "2", "--restarts", "0", *stage.arguments]
    done = stage.run(SCRIPT, *words, FAKE_CODES_0="143", FAKE_CODES_1="137")
    assert done.returncode == 1


def test_processes_that_torchrun_ended_by_itself_did_not_stop_as_requested(stage: Stage) -> None:
    words = ["--processes", "2", "--restarts", "0", *stage.arguments]
    done = stage.run(SCRIPT, *words, FAKE_CODES="wait", FAKE_LOST="1")
    assert done.returncode == 1, done.stderr
    assert "failed (exit code 1)" in done.stderr


@pytest.mark.parametrize(
    ("sent", "handed_on", "code"),
    [("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGTERM", 143), ("SIGUSR1", "SIGTERM", 143), ("SIGHUP", "SIGTERM", 143)],
)
def test_a_signal_reaches_every_process_once_and_the_checkpoint_is_waited_for(
    stage: Stage, sent: str, handed_on: str, code: int
) -> None:
    process = stage.start(SCRIPT, "--processes", "2", *stage.arguments, FAKE_CODES="wait")
    stage.wait_for_ranks(0, 1)
    process.send_signal(signal.Signals[sent])
    if sent != "SIGINT":
        stage.wait_until(lambda: ["torchrun", "got", handed_on] in stage.calls())
        process.send_signal(signal.Signals[sent])  # schedulers like to say it twice
    ended_with, output = ended(process)
    assert ended_with == code, output
    assert f"stopped as asked (exit code {code})" in output
    assert [words for words in stage.calls("torchrun") if "got" in words] == [["torchrun", "got", handed_on]]
    for rank in "01":
        assert [f"rank {rank}", "wrote", "a", "checkpoint"] in stage.calls()


def test_a_signal_sent_to_everything_does_not_end_torchrun(stage: Stage) -> None:
    process = stage.start(SCRIPT, *stage.arguments, FAKE_CODES="wait")
    stage.wait_for_ranks(0)
    for line in stage.left_over():
        with suppress(ProcessLookupError):  # a stand-in's `sleep`, which lasts 0.02 s
            os.kill(int(line.partition(":")[0]), signal.SIGUSR1)
    code, output = ended(process)
    assert code == 143, output
    assert ["rank 0", "wrote", "a", "checkpoint"] in stage.calls()


def test_ctrl_c_twice_ends_everything_at_once(stage: Stage) -> None:
    process = stage.start(SCRIPT, "--processes", "2", *stage.arguments, FAKE_CODES="deaf")
    stage.wait_for_ranks(0, 1)
    process.send_signal(signal.SIGINT)
    stage.wait_until(lambda: ["torchrun", "got", "SIGINT"] in stage.calls())
    process.send_signal(signal.SIGINT)
    code, output = ended(process)
    assert (code, "ending at once" in output) == (1, True)  # no checkpoint was written: not 130
    stage.wait_until(lambda: not stage.left_over())


def test_processes_do_not_outlive_a_torchrun_that_was_killed(stage: Stage) -> None:
    process = stage.start(SCRIPT, "--processes", "2", "--restarts", "0", *stage.arguments, FAKE_CODES="deaf")
    stage.wait_for_ranks(0, 1)
    (torchrun,) = [line for line in stage.left_over() if "bin/torchrun" in line and "-IS" in line]
    os.kill(int(torchrun.partition(":")[0]), signal.SIGKILL)
    assert ended(process)[0] == 1
    stage.wait_until(lambda: not stage.left_over())


def test_a_stop_between_two_starts_is_heard(stage: Stage) -> None:
    process = stage.start(SCRIPT, "--pause", "60", *stage.arguments, FAKE_CODES="1")
    stage.wait_until(lambda: len(stage.calls("octjepa")) == 1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert len(stage.calls("octjepa")) == 1


def test_several_machines_meet_at_one_position_and_do_not_restart_alone(stage: Stage) -> None:
    words = ["--nodes", "2", "--rendezvous", "node a:29400", "--job", "17", *stage.arguments]
    done = stage.run(SCRIPT, *words, FAKE_CODES="1")
    assert done.returncode == 1
    (torchrun,) = stage.calls("torchrun")
    assert "--standalone" not in torchrun
    arguments = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node a:29400", "--rdzv-id", "17"]
    start = torchrun.index("--nnodes")
    assert torchrun[start : start + 8] == arguments


def test_a_dry_run_prints_the_command_and_calls_nothing(stage: Stage) -> None:
    done = stage.run(SCRIPT, "--dry-run", *stage.arguments)
    assert done.returncode == 0
    assert "torchrun --nproc-per-node 1" in done.stderr
    assert "my\\ run" in done.stderr
    assert stage.calls() == []


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ([], "no RECIPE given"),
        (["tiny_cpu", "--out", "x"], "no --store"),
        (["tiny_cpu", "--store", "."], "no --out"),
        (["tiny_cpu", "--store", "not there", "--out", "x"], "no store at not there on here"),
        (["--processes", "two", "tiny_cpu", "--store", ".", "--out", "x"], "--processes takes a whole number"),
        (["--processes", "0", "tiny_cpu", "--store", ".", "--out", "x"], "--processes takes a whole number from 1"),
        (["--nodes", "2", "tiny_cpu", "--store", ".", "--out", "x"], "need --rendezvous HOST:PORT"),
        (["--frocesses", "2", "tiny_cpu"], "unknown option --frocesses"),
        (["--processes"], "--processes needs a value"),
    ],
)
def test_mistakes_are_reported(stage: Stage, words: list[str], output: str) -> None:
    done = stage.run(SCRIPT, *words)
    assert done.returncode == 2
    assert output in done.stderr
    assert stage.calls() == []


def test_a_store_in_a_bucket_is_left_to_octjepa(stage: Stage) -> None:
    assert stage.run(SCRIPT, "tiny_cpu", "--store=gs://bucket/store", "--out=x").returncode == 0


@pytest.mark.slow
def test_the_real_torchrun_hands_signals_on_and_waits(stage: Stage) -> None:
    """Two processes of the stand-in octjepa under torch's own launcher."""
    (stage.folder / "bin" / "torchrun").unlink()
    (stage.folder / "bin" / "torchrun").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m torch.distributed.run "$@"\n'
    )
    (stage.folder / "bin" / "torchrun").chmod(0o755)
    process = stage.start(SCRIPT, "--processes", "2", *stage.arguments, FAKE_CODES="wait")
    stage.wait_for_ranks(0, 1)
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 143, output
    for rank in "01":
        assert [f"rank {rank}", "wrote", "a", "checkpoint"] in stage.calls()
