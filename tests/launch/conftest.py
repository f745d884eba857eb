"""A stage for the launch scripts: stand-ins for every program that they call, which write down how they were called.

The stand-ins of octjepa and torchrun behave as the real ones do towards signals and exit codes: octjepa ends with 143
or 130 after SIGTERM or SIGINT, torchrun starts each process in a session of its own, hands signals on, and ends with 1.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "launch"

_NOTE = """\
#!/usr/bin/env bash
set -euo pipefail
note() { # one write, since several processes note at once
    local line
    printf -v line '%q ' "$@"
    printf '%s\\n' "$line" >>"$RECORD"
}
"""

# FAKE_CODES: the exit code of each start in turn, the last for all further ones; `wait` ends when told to, `deaf`
# never. FAKE_CODES_1: the same for rank 1 alone.
_OCTJEPA = (
    _NOTE
    + """
note octjepa "rank=$RANK" "$@"
own="FAKE_CODES_$RANK"
read -r -a codes <<<"${!own:-${FAKE_CODES:-0}}"
starts=$(cat "$RECORD.starts.$RANK" 2>/dev/null || echo 0)
echo $((starts + 1)) >"$RECORD.starts.$RANK"
[ "$starts" -lt "${#codes[@]}" ] || starts=$((${#codes[@]} - 1))
while [ $# -gt 0 ]; do [ "$1" != --out ] || out=$2; shift; done
if [ -n "${FAKE_BEGINS:-}" ]; then
    mkdir -p "$out"
    touch "$out/run.json"
    echo '{"update": 7, "train/loss": 0.5}' >"$out/metrics.jsonl"
fi
case "${codes[$starts]}" in
deaf) trap '' TERM INT USR1 ;;
wait)
    trap 'sleep 0.2; note "rank $RANK" wrote a checkpoint; exit 143' TERM USR1
    trap 'sleep 0.2; note "rank $RANK" wrote a checkpoint; exit 130' INT
    ;;
*) exit "${codes[$starts]}" ;;
esac
note "rank $RANK" is up
while :; do sleep 0.02; done
"""
)

_PYTHON = f"""\
#!{sys.executable} -IS
import os, shlex, signal, subprocess, sys, time
def note(*words):
    with open(os.environ["RECORD"], "a") as file:
        file.write(shlex.join(words) + "\\n")
args = sys.argv[1:]
"""

_TORCHRUN = (
    _PYTHON
    + """
note("torchrun", "OMP_NUM_THREADS=" + os.environ.get("OMP_NUM_THREADS", ""), *args)
workers, came = [], []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: came.append(number))
def hand_on():
    while came:
        note("torchrun", "got", signal.Signals(came[0]).name)
        for worker in workers:
            os.killpg(worker.pid, came[0])
        del came[0]
command = args[args.index("--no-python") + 1 :]
for rank in range(int(args[args.index("--nproc-per-node") + 1])):
    environ = {**os.environ, "RANK": str(rank)}
    workers.append(subprocess.Popen(command, env=environ, start_new_session=True))
if "FAKE_LOST" in os.environ:  # as when the machine where all meet is gone
    while sum("up" in line.split() for line in open(os.environ["RECORD"])) < len(workers):
        time.sleep(0.02)
    for worker in workers:
        os.killpg(worker.pid, signal.SIGTERM)
        worker.wait()
    sys.exit(1)
told = False
while any(worker.poll() is None for worker in workers):
    told = told or bool(came)
    hand_on()
    if not told and any(worker.poll() for worker in workers):  # one failed; told to stop, all are waited for
        break
    time.sleep(0.01)
if all(worker.poll() == 0 for worker in workers):
    sys.exit(0)
time.sleep(0.2)
for worker in workers:
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
sys.exit(1)
"""
)

_SRUN = (
    _PYTHON
    + """
note("srun", *args)
start = next(place for place, word in enumerate(args) if word.endswith("one_machine"))
tasks = []
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
for _ in range(int(args[args.index("--nodes") + 1])):
    tasks.append(subprocess.Popen(args[start:]))
sys.exit(max(task.wait() for task in tasks))
"""
)

_SCONTROL = (
    _NOTE
    + """
note scontrol "$@"
[ "$1" != show ] || printf '%s\\n' ${FAKE_NODES:?}
[ "$1" != requeue ] || exit "${FAKE_REQUEUE:-0}"
"""
)

_ON_HOST = """
on_host() { # HOST COMMAND
    case " ${FAKE_DOWN:-} " in *" $1 "*) echo "no route to $1" >&2; return 255 ;; esac
    mkdir -p "$FAKE_HOSTS/$1"
    (cd "$FAKE_HOSTS/$1" && HOME="$FAKE_HOSTS/$1" FAKE_HOST=$1 bash -c "$2")
}
"""

_SSH = _NOTE + _ON_HOST + 'note ssh "$@"\non_host "$5" "$6"\n'

_SCP = (
    _NOTE
    + """
note scp "$@"
host=${6%:}
mkdir -p "$FAKE_HOSTS/$host"
cp "$5" "$FAKE_HOSTS/$host/"
"""
)

_GCLOUD = (
    _NOTE
    + _ON_HOST
    + """
note gcloud "$@"
failed=0
case "$4" in
describe) echo "${FAKE_ADDRESSES:?}" ;;
scp) for host in ${FAKE_NAMES:?}; do mkdir -p "$FAKE_HOSTS/$host"; cp "$5" "$FAKE_HOSTS/$host/"; done ;;
ssh)
    [ "$6 $7" = "--worker=all --command" ]
    for host in ${FAKE_NAMES:?}; do on_host "$host" "$8" || failed=1; done
    ;;
esac
exit "$failed"
"""
)

_FAKES = {
    "octjepa": _OCTJEPA,
    "torchrun": _TORCHRUN,
    "srun": _SRUN,
    "scontrol": _SCONTROL,
    "ssh": _SSH,
    "scp": _SCP,
    "gcloud": _GCLOUD,
    "hostname": '#!/bin/sh\necho "${FAKE_HOST:-here}"\n',
    "python": '#!/bin/sh\necho "${FAKE_DEVICES:-1}"\n',
}


class Stage:
    """A folder with the stand-ins on PATH, a store, and the record of all calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "record"
        self.store = folder / "my store"
        self.out = folder / "my run"
        self.store.mkdir()
        (folder / "bin").mkdir()
        for name, text in _FAKES.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        remaining = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OCTJEPA_", "OMP_"))
        }
        self.environ = remaining | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "RECORD": str(self.record),
            "FAKE_HOSTS": str(folder / "hosts"),
            "TMPDIR": str(folder),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        self.started: list[subprocess.Popen[str]] = []

    @property
    def arguments(self) -> list[str]:
        """A recipe with an override and paths that hold spaces."""
        return ["tiny_cpu", "train.seed=3", "--store", str(self.store), "--out", str(self.out)]

    def start(self, script: str | Path, *words: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", str(_SCRIPTS / script), *words],
            env=self.environ | environ,
            cwd=cwd or self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_signals,
        )
        self.started.append(process)
        return process

    def run(
        self, script: str | Path, *words: str, cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return finish(self.start(script, *words, cwd=cwd, **environ))

    def calls(self, name: str = "") -> list[list[str]]:
        """The recorded calls, in order; those of one stand-in with its name."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [words for words in map(shlex.split, lines) if not name or words[0] == name]

    def wait_until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not true():
            assert time.monotonic() < end, self.record.read_text() if self.record.exists() else "nothing was called"
            time.sleep(0.02)

    def wait_for_ranks(self, *ranks: int) -> None:
        self.wait_until(lambda: all([f"rank {rank}", "is", "up"] in self.calls() for rank in ranks))

    def left_over(self) -> list[str]:
        """Processes of this stage that are still there."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.fsencode(str(self.record)) in (entry / "environ").read_bytes().split(b"RECORD=")[-1][:4096]:
                        found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes()!r}")
                except OSError:
                    continue
        return found


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    stdout, stderr = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _hear_signals() -> None:
    """Bash cannot trap what was ignored when it began, as SIGHUP is under nohup and SIGINT in the background."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    for line in made.left_over():
        with suppress(ProcessLookupError):  # it was about to end
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)
    for process in made.started:  # only now, for those that were left over held its pipes open
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()
