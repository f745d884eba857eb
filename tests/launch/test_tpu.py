"""scripts/launch/tpu and host: the same commit everywhere, start, stop, status; by gcloud and by ssh."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stage

pytestmark = pytest.mark.slow  # together: the scripts wait for processes

ROOT = Path(__file__).resolve().parents[2]
GCLOUD = ("--tpu", "my-slice", "--zone", "us-central2-b")
SSH = ("--hosts", "a,b")
DIR = ("--dir", "the code")


class Cluster:
    """Two hosts, and a small checkout to deploy that holds the launch scripts."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.checkout = stage.folder / "check out"
        shutil.copytree(ROOT / "scripts" / "launch", self.checkout / "scripts" / "launch")
        (self.checkout / "scripts" / "setup").write_text('#!/bin/sh\necho "$1" >../setup-was-run\n')
        (self.checkout / "scripts" / "setup").chmod(0o755)
        self.git("init", "--quiet")
        self.commit()
        stage.environ |= {"FAKE_ADDRESSES": "10.0.0.1;10.0.0.2", "FAKE_NAMES": "a b"}

    def git(self, *words: str, host: str | None = None) -> str:
        where = self.checkout if host is None else self.at(host)
        ran = subprocess.run(
            ["git", *words], cwd=where, env=self.stage.environ, capture_output=True, text=True, check=True
        )
        return ran.stdout.strip()

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "--quiet", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def at(self, host: str) -> Path:
        return self.stage.folder / "hosts" / host / "the code"

    def tpu(self, verb: str, where: tuple[str, ...], *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.stage.run(self.checkout / "scripts" / "launch" / "tpu", verb, *where, *DIR, *words, **environ)


@pytest.fixture
def cluster(stage: Stage) -> Cluster:
    return Cluster(stage)


@pytest.fixture
def deployed(cluster: Cluster) -> Cluster:
    done = cluster.tpu("deploy", SSH)
    assert done.returncode == 0, done.stderr
    cluster.stage.record.unlink()
    return cluster


@pytest.mark.parametrize("where", [SSH, GCLOUD], ids=["ssh", "gcloud"])
def test_the_whole_way(cluster: Cluster, where: tuple[str, ...]) -> None:
    """Deploy, start, status, stop, start again: the second start resumes."""
    stage = cluster.stage
    done = cluster.tpu("deploy", where)
    assert done.returncode == 0, done.stderr
    commit = cluster.git("rev-parse", "HEAD")
    for host in "ab":
        assert cluster.git("rev-parse", "HEAD", host=host) == commit
        assert (cluster.at(host).parent / "setup-was-run").read_text() == "core\n"
        assert not list(cluster.at(host).parent.glob("*.bundle"))
    assert f"2 hosts have commit {commit}" in done.stderr

    start = ("--processes", "1", "tiny_cpu", "train.seed=3", "--store", str(stage.store), "--out", "my run")
    environ = {"FAKE_CODES": "wait", "FAKE_BEGINS": "1"}
    done = cluster.tpu("start", where, *start, **environ)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("started (process") == 2
    stage.wait_until(lambda: stage.calls().count(["rank 0", "is", "up"]) == 2)
    for torchrun in stage.calls("torchrun"):
        assert torchrun[torchrun.index("--nnodes") + 1] == "2"
        meet = "a:29400" if where == SSH else "10.0.0.1:29400"
        assert torchrun[torchrun.index("--rdzv-endpoint") + 1] == meet
    names = [words[words.index("--rdzv-id") + 1] for words in stage.calls("torchrun")]
    assert names[0] == names[1]
    arguments = ["tiny_cpu", "train.seed=3", "--store", str(stage.store), "--out", "my run"]
    assert stage.calls("octjepa") == [["octjepa", "rank=0", "pretrain", *arguments]] * 2

    done = cluster.tpu("start", where, *start, **environ)
    assert (done.returncode, "a run is active here already" in done.stdout) == (1, True)


def test_a_variable_reaches_the_processes_of_every_host(deployed: Cluster) -> None:
    arguments = ("--processes", "1", "--env", "PJRT_DEVICE=TPU", "--env", "WORDS=two words", "tiny_cpu")
    location = ("--store", str(deployed.stage.store), "--out", "my run")
    done = deployed.tpu("start", SSH, *arguments, *location, FAKE_CODES="wait", FAKE_BEGINS="1")
    assert done.returncode == 0, done.stderr + done.stdout
    for host in "ab":
        process = Path(f"{deployed.at(host)}.launch", "pid").read_text().strip()
        held = Path("/proc", process, "environ").read_text().split("\0")
        assert {"PJRT_DEVICE=TPU", "WORDS=two words"} <= set(held)
    assert deployed.tpu("stop", SSH).returncode == 0
    done = deployed.tpu("start", SSH, "--env", "PJRT_DEVICE", "tiny_cpu", *location)
    assert (done.returncode, "--env takes NAME=VALUE" in done.stderr) == (2, True)


@pytest.fixture
def running(deployed: Cluster) -> Cluster:
    start = ("--processes", "1", "tiny_cpu", "--store", str(deployed.stage.store), "--out", "my run")
    done = deployed.tpu("start", SSH, *start, FAKE_CODES="wait", FAKE_BEGINS="1")
    assert done.returncode == 0, done.stderr + done.stdout
    deployed.stage.wait_until(lambda: deployed.stage.calls().count(["rank 0", "is", "up"]) == 2)
    return deployed


def test_status_stop_and_going_on(running: Cluster) -> None:
    commit = running.git("rev-parse", "HEAD")
    (running.at("b") / "my run" / "metrics.jsonl").unlink()  # as on a host whose processes do not write
    done = running.tpu("status", SSH)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"a {commit}: running (process ")
    assert first.endswith('; {"update": 7, "train/loss": 0.5}')
    assert second.endswith("; no metrics here")

    done = running.tpu("deploy", SSH)
    assert (done.returncode, "a run is active here: tpu stop it first" in done.stdout) == (1, True)

    done = running.tpu("stop", SSH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stopped with a checkpoint (exit code 143)") == 2
    assert running.stage.calls().count(["rank 0", "wrote", "a", "checkpoint"]) == 2
    assert running.tpu("status", SSH).stdout.count("stopped with a checkpoint") == 2

    (running.at("b") / "my run" / "run.json").unlink()  # only the host that writes has a run folder
    start = ("--processes", "1", "tiny_cpu", "--store", str(running.stage.store), "--out", "my run")
    done = running.tpu("start", SSH, *start, FAKE_CODES="0")
    assert done.returncode == 0, done.stderr
    running.stage.wait_until(lambda: len(running.stage.calls("octjepa")) == 4)
    assert [words[-1] for words in running.stage.calls("octjepa")[2:]] == ["--resume"] * 2
    running.stage.wait_until(lambda: running.tpu("status", SSH).stdout.count(": finished;") == 2)


def test_a_stop_that_found_no_checkpoint_is_a_failure(deployed: Cluster) -> None:
    start = ("--processes", "1", "tiny_cpu", "--store", str(deployed.stage.store), "--out", "my run")
    deployed.tpu("start", SSH, *start, FAKE_CODES="1")
    deployed.stage.wait_until(
        lambda: all((deployed.at(host).parent / "the code.launch/code").exists() for host in "ab")
    )
    done = deployed.tpu("stop", SSH)
    assert done.returncode == 1
    assert "failed (exit code 1); log: " in done.stdout
    assert "the code.launch/log" in done.stdout


def test_a_stop_does_not_wait_for_ever(deployed: Cluster) -> None:
    start = ("--processes", "1", "tiny_cpu", "--store", str(deployed.stage.store), "--out", "my run")
    deployed.tpu("start", SSH, *start, FAKE_CODES="deaf")
    deployed.stage.wait_until(lambda: deployed.stage.calls().count(["rank 0", "is", "up"]) == 2)
    done = deployed.tpu("stop", SSH, "--seconds", "0")
    assert (done.returncode, done.stdout.count("still running after 0 s")) == (1, 2)


@pytest.mark.parametrize("made", ["new file", "scripts/launch/tpu"])
def test_deploy_refuses_what_is_not_committed(cluster: Cluster, made: str) -> None:
    with (cluster.checkout / made).open("a") as file:
        file.write("# changed\n")
    done = cluster.tpu("deploy", SSH)
    assert done.returncode == 2
    assert made in done.stderr
    assert cluster.stage.calls() == []


def test_deploy_refuses_a_host_with_changes_of_its_own(deployed: Cluster) -> None:
    (deployed.at("b") / "scripts" / "setup").write_text("changed\n")
    done = deployed.tpu("deploy", SSH)
    assert done.returncode == 1
    assert "b: the\\ code has changes of its own" in done.stderr
    assert (deployed.at("b") / "scripts" / "setup").read_text() == "changed\n"


@pytest.mark.parametrize("hosts", ["b", "ab"])
def test_deploy_refuses_hosts_that_end_up_with_another_commit(deployed: Cluster, hosts: str) -> None:
    """A `git` that does nothing when asked for a checkout."""
    git = deployed.stage.folder / "bin" / "git"
    real = shutil.which("git")
    git.write_text(f'#!/bin/sh\ncase "$1 $FAKE_HOST" in "checkout "[{hosts}]) exit 0 ;; esac\nexec {real} "$@"\n')
    git.chmod(0o755)
    old, new = deployed.git("rev-parse", "HEAD"), deployed.commit()
    done = deployed.tpu("deploy", SSH)
    assert done.returncode == 1
    assert f"do not have the same commit {new}" in done.stderr
    assert f"b commit {old}" in done.stderr


@pytest.mark.parametrize("what", ["another commit", "a change on one", "a change on all"])
def test_start_refuses_hosts_that_differ(deployed: Cluster, what: str) -> None:
    if what == "another commit":
        deployed.git("commit", "--quiet", "--allow-empty", "-m", "y", host="b")
    for host in {"a change on one": "b", "a change on all": "ab"}.get(what, ""):
        (deployed.at(host) / "scripts" / "setup").write_text("changed\n")
    done = deployed.tpu("start", SSH, "tiny_cpu", "--store", ".", "--out", "x")
    assert (done.returncode, "do not have the same commit" in done.stderr) == (1, True)
    assert deployed.stage.calls("octjepa") == []


def test_a_host_that_does_not_answer(deployed: Cluster) -> None:
    for verb, words in [("deploy", ()), ("start", ("tiny_cpu", "--store", ".", "--out", "x")), ("status", ())]:
        done = deployed.tpu(verb, SSH, *words, FAKE_DOWN="b")
        assert done.returncode == 1, verb
        assert "b: failed" in done.stderr
    assert deployed.stage.calls("octjepa") == []


def test_fewer_hosts_than_the_slice_has(deployed: Cluster) -> None:
    done = deployed.tpu("start", GCLOUD, "tiny_cpu", "--store", ".", "--out", "x", FAKE_NAMES="a")
    assert (done.returncode, "1 of 2 hosts answered" in done.stderr) == (1, True)


def test_when_one_host_cannot_start_the_others_are_stopped(deployed: Cluster) -> None:
    (deployed.at("a") / "store").mkdir()
    words = ("--processes", "1", "tiny_cpu", "--store", "store", "--out", "x")
    done = deployed.tpu("start", SSH, *words, FAKE_CODES="wait")
    assert done.returncode == 1
    assert "b refused: one_machine: no store at store on b" in done.stdout
    deployed.stage.wait_until(lambda: (deployed.at("a").parent / "the code.launch" / "code").exists())
    assert (deployed.at("a").parent / "the code.launch" / "code").read_text() == "143\n"


@pytest.mark.parametrize("where", [SSH, GCLOUD], ids=["ssh", "gcloud"])
@pytest.mark.parametrize("verb", ["deploy", "start", "stop", "status"])
def test_a_dry_run_prints_every_command_and_calls_nothing(cluster: Cluster, verb: str, where: tuple[str, ...]) -> None:
    words = ("tiny_cpu", "--store", "my store", "--out", "my run") if verb == "start" else ()
    done = cluster.tpu(verb, (*where, "--dry-run"), *words)
    assert done.returncode == 0, done.stderr
    named = "gcloud compute tpus tpu-vm ssh my-slice" if where == GCLOUD else "ssh -n"
    assert named in done.stdout
    assert "the\\" in done.stdout
    assert cluster.stage.calls() == []
    assert not (cluster.stage.folder / "hosts").exists()


def test_a_missing_gcloud_is_reported(cluster: Cluster) -> None:
    tools = cluster.stage.folder / "tools"
    tools.mkdir()
    for name in ("bash", "git", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    done = cluster.tpu("status", GCLOUD, PATH=str(tools))
    assert (done.returncode, "no gcloud on PATH" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ([], "unknown verb ''"),
        (["destroy"], "unknown verb 'destroy'"),
        (["status"], "say where"),
        (["status", "--tpu", "x"], "needs --zone"),
        (["status", *GCLOUD, *SSH], "not both"),
        (["status", "--hosts", "a,,b"], "names with commas"),
        (["status", "--hosts", "a,-oProxyCommand=x"], "names with commas"),
        (["status", *SSH, "--dir", "~/x"], "leave ~ and - out"),
        (["stop", *SSH, "--seconds", "soon"], "--seconds takes a whole number"),
        (["stop", *SSH, "extra"], "stop takes no 'extra'"),
        (["start", *SSH], "start needs RECIPE"),
        (["status", "--host", "a"], "unknown option --host"),
    ],
)
def test_mistakes_are_reported(stage: Stage, words: list[str], output: str) -> None:
    done = stage.run("tpu", *words)
    assert done.returncode == 2
    assert output in done.stderr
    assert stage.calls() == []


def test_a_user_may_stand_before_a_host(cluster: Cluster) -> None:
    done = cluster.tpu("start", ("--hosts", "me@a,me@b", "--dry-run"), "tiny_cpu", "--store", "s", "--out", "x")
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [words[5] for words in lines] == ["me@a", "me@b"] * 3
    assert " --rendezvous a:29400 " in lines[-1][6]
