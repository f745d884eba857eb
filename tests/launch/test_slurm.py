"""scripts/launch/slurm.sbatch: the step it starts, notices and requeues, restarts, arrays."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stage

pytestmark = pytest.mark.slow  # together: the scripts wait for processes

SCRIPT = "slurm.sbatch"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def job(stage: Stage) -> Stage:
    """A job on one node, submitted from the checkout."""
    stage.environ |= {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "OCTJEPA_LOGS": str(stage.folder / "my logs"),
        "OCTJEPA_PAUSE": "0",
    }
    return stage


def requeues(job: Stage) -> list[list[str]]:
    return [words for words in job.calls("scontrol") if words[1] == "requeue"]


def test_a_job_that_ends_well(job: Stage) -> None:
    done = job.run(SCRIPT, *job.arguments, SLURM_CPUS_PER_TASK="6", OCTJEPA_PROCESSES="2")
    assert done.returncode == 0, done.stderr
    (srun,) = job.calls("srun")
    assert f"--output={job.folder}/my logs/job-%j-node-%n.log" in srun
    assert "--kill-on-bad-exit=0" in srun
    assert srun[srun.index("--cpus-per-task") + 1] == "6"
    assert (job.folder / "my logs").is_dir()
    assert ["octjepa", "rank=1", "pretrain", *job.arguments] in job.calls("octjepa")
    assert not requeues(job)


def test_two_nodes_meet_at_the_first(job: Stage) -> None:
    done = job.run(
        SCRIPT, *job.arguments, SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="oct[1-2]", FAKE_NODES="oct1 oct2"
    )
    assert done.returncode == 0, done.stderr
    first, second = job.calls("torchrun")
    assert first == second
    assert first[first.index("--rdzv-endpoint") + 1] == "oct1:24711"
    assert first[first.index("--nnodes") + 1] == "2"
    assert first[first.index("--rdzv-id") + 1] == "4711-0-0"


def test_hosts_and_nodes_that_do_not_agree_are_refused(job: Stage) -> None:
    done = job.run(SCRIPT, *job.arguments, SLURM_JOB_NUM_NODES="3", SLURM_JOB_NODELIST="x", FAKE_NODES="oct1 oct2")
    assert (done.returncode, "names 2 hosts, but the job has 3" in done.stderr) == (2, True)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_notice_writes_a_checkpoint_and_requeues_once(job: Stage, nodes: str) -> None:
    process = job.start(
        SCRIPT, *job.arguments, FAKE_CODES="wait", SLURM_JOB_NUM_NODES=nodes, SLURM_JOB_NODELIST="x", FAKE_NODES="a b"
    )
    job.wait_until(lambda: job.calls().count(["rank 0", "is", "up"]) == int(nodes))
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)
    _, output = process.communicate(timeout=30)
    assert process.returncode == 143, output
    assert job.calls().count(["rank 0", "wrote", "a", "checkpoint"]) == int(nodes)
    assert requeues(job) == [["scontrol", "requeue", "4711"]]


def test_signals_in_quick_succession_are_one_notice(job: Stage) -> None:
    process = job.start(SCRIPT, *job.arguments, FAKE_CODES="wait")
    job.wait_until(lambda: ["rank 0", "is", "up"] in job.calls())
    for microseconds in range(0, 200, 2):  # the second within the trap of the first
        process.send_signal(signal.SIGUSR1)
        end = time.perf_counter() + microseconds * 1e-6
        while time.perf_counter() < end:
            pass
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.002)
    _, output = process.communicate(timeout=30)
    assert process.returncode == 143, output
    assert job.calls().count(["rank 0", "wrote", "a", "checkpoint"]) == 1
    assert requeues(job) == [["scontrol", "requeue", "4711"]]


def test_a_requeued_job_resumes_and_requeues_are_bounded(job: Stage) -> None:
    for restarts in "01":
        process = job.start(
            SCRIPT,
            *job.arguments,
            FAKE_CODES="wait",
            FAKE_BEGINS="1",
            SLURM_RESTART_COUNT=restarts,
            OCTJEPA_REQUEUES="1",
        )
        job.wait_until(lambda seen=int(restarts): job.calls().count(["rank 0", "is", "up"]) == seen + 1)
        process.send_signal(signal.SIGUSR1)
        _, output = process.communicate(timeout=30)
        assert process.returncode == 143, output
    assert [words[-1] == "--resume" for words in job.calls("octjepa")] == [False, True]
    assert len(requeues(job)) == 1
    assert "submit it again" in output


def test_a_cancelled_job_stays_cancelled(job: Stage) -> None:
    process = job.start(SCRIPT, *job.arguments, FAKE_CODES="wait")
    job.wait_for_ranks(0)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=30)
    assert process.returncode == 143, output
    assert ["rank 0", "wrote", "a", "checkpoint"] in job.calls()
    assert not requeues(job)


@pytest.mark.parametrize("code", [2, 143])
def test_no_restart_and_no_requeue_without_a_notice(job: Stage, code: int) -> None:
    assert job.run(SCRIPT, *job.arguments, FAKE_CODES=str(code)).returncode == code
    assert len(job.calls("srun")) == 1
    assert not requeues(job)


def test_no_requeue_when_a_notice_meets_wrong_usage(job: Stage) -> None:
    """The process ends with 2 after the notice: a wrong recipe comes back from no queue right."""
    text = (job.folder / "bin" / "octjepa").read_text()
    (job.folder / "bin" / "octjepa").write_text(text.replace("exit 143' TERM USR1", "exit 2' TERM USR1"))
    process = job.start(SCRIPT, *job.arguments, FAKE_CODES="wait")
    job.wait_for_ranks(0)
    process.send_signal(signal.SIGUSR1)
    _, output = process.communicate(timeout=30)
    assert process.returncode == 2, output
    assert not requeues(job)


def test_failures_are_restarted_a_bounded_number_of_times(job: Stage) -> None:
    done = job.run(SCRIPT, *job.arguments, FAKE_CODES="1", OCTJEPA_RESTARTS="2")
    assert done.returncode == 1
    assert [words[words.index("--job") + 1] for words in job.calls("srun")] == ["4711-0-0", "4711-0-1", "4711-0-2"]
    assert not requeues(job)


def test_a_scontrol_that_refuses_is_reported(job: Stage) -> None:
    process = job.start(SCRIPT, *job.arguments, FAKE_CODES="wait", FAKE_REQUEUE="1")
    job.wait_for_ranks(0)
    process.send_signal(signal.SIGUSR1)
    _, output = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "would not requeue job 4711: submit it again" in output


@pytest.fixture
def runs(stage: Stage) -> Path:
    path = stage.folder / "my runs.txt"
    path.write_text('# two seeds\ntiny_cpu train.seed=1 --out runs/one\n\ntiny_cpu train.seed=2 --out "runs/seed 2"\n')
    return path


def test_an_array_task_takes_its_line(job: Stage, runs: Path) -> None:
    words = ["--list", str(runs), "train.precision=fp32", "--store", str(job.store)]
    done = job.run(SCRIPT, *words, SLURM_ARRAY_TASK_ID="1")
    assert done.returncode == 0, done.stderr
    arguments = ["tiny_cpu", "train.seed=2", "--out", "runs/seed 2", "train.precision=fp32", "--store", str(job.store)]
    assert job.calls("octjepa") == [["octjepa", "rank=0", "pretrain", *arguments]]


def test_nothing_in_a_list_is_run(job: Stage, runs: Path) -> None:
    runs.write_text(f"tiny_cpu '$(touch {job.folder}/ran)' `touch {job.folder}/ran` --out x\n")
    job.run(SCRIPT, "--list", str(runs), "--store", str(job.store), SLURM_ARRAY_TASK_ID="0")
    assert not (job.folder / "ran").exists()
    assert job.calls("octjepa")[0][4].startswith("$(touch")


@pytest.mark.parametrize(
    ("words", "environ", "output"),
    [
        (["--list", "{runs}"], {"SLURM_ARRAY_TASK_ID": "2"}, "holds 2, and counting starts at 0"),
        (["--list", "{runs}"], {}, "needs an array"),
        (["--list", "not there"], {"SLURM_ARRAY_TASK_ID": "0"}, "no file 'not there'"),
        (["tiny_cpu"], {"SLURM_ARRAY_TASK_ID": "0"}, "would write into one run folder"),
        (["tiny_cpu"], {"OCTJEPA_CHECKOUT": "/nowhere"}, "no folder /nowhere"),
        (["tiny_cpu"], {"OCTJEPA_CHECKOUT": "/tmp"}, "no checkout of octjepa"),
        (["tiny_cpu"], {"SLURM_JOB_ID": ""}, "submit this file with sbatch"),
        ([], {}, "no RECIPE given"),
    ],
)
def test_mistakes_are_reported(job: Stage, runs: Path, words: list[str], environ: dict[str, str], output: str) -> None:
    done = job.run(SCRIPT, *(word.replace("{runs}", str(runs)) for word in words), **environ)
    assert done.returncode == 2
    assert output in done.stderr
    assert job.calls() == []


def test_a_list_with_an_open_quote_is_reported(job: Stage, runs: Path) -> None:
    runs.write_text("tiny_cpu --out 'open\n")
    done = job.run(SCRIPT, "--list", str(runs), SLURM_ARRAY_TASK_ID="0")
    assert (done.returncode, "line 1" in done.stderr) == (2, True)


def test_a_dry_run_calls_nothing(job: Stage) -> None:
    done = job.run(SCRIPT, *job.arguments, DRY_RUN="1", SLURM_JOB_ID="")
    assert done.returncode == 0, done.stderr
    assert "srun --nodes 1" in done.stderr
    assert job.calls() == []
    assert not (job.folder / "my logs").exists()
