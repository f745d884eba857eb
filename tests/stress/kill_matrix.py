"""kill -9 at random moments and at every write of a run of two ranks: it must end as if nothing had happened.

    .venv/bin/python tests/stress/kill_matrix.py [--kills 100] [--out benchmarks/records/resume.json]

Small volumes, so that a hundred lives take minutes. Every life is two forked processes of this one; a random moment
kills both, or one of them alone. "Every write" lets rank 0 die at each flush and rename of a checkpoint, of the journal
and of the summary, one after the other. At the end weights, moments and journal are compared with those of a run that
was never touched, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from octjepa.checkpoint import folder
from octjepa.files import read_json_lines, write_json
from octjepa.progress import set_quiet
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

RECIPE = small_recipe(
    train={"max_updates": 20, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"},
    checkpoint={"every_updates": 5, "keep_last": 3},
    machine={"micro_batch": 2},
    monitor={"every_updates": 10, "volumes": 4},
    validation={"max_samples": 4},
)
STORE = MemoryStore(RECIPE.preprocessing)
TIMES = {"seconds", "volumes_per_second", "data_wait_share", "cpu_cores_busy", "memory/process_bytes"}
PATIENCE_SECONDS = 120.0


def life(out: Path, rank: int, world: int, port: int, before: Callable[[], None]) -> int:
    """One process of one life, forked; its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        torch.set_num_threads(1)
        set_quiet(True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        before()
        pretrain(RECIPE, STORE, out, resume=(out / "run.json").is_file())
        code = 0
    finally:
        os._exit(code)


def lives(out: Path, before: Callable[[int], None], world: int = 2) -> list[int]:
    """The ids of the ranks of a new life."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [life(out, rank, world, port, lambda rank=rank: before(rank)) for rank in range(world)]


def ended(processes: list[int]) -> list[int]:
    """Exit codes; a process that outlives the patience is a hang, and is killed."""
    codes, until = [], time.monotonic() + PATIENCE_SECONDS
    for process in processes:
        while True:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            if time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes.append(999)
                break
            time.sleep(0.01)
    return codes


def state(out: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights and moments of the last checkpoint, and the journal without its times."""
    last = folder.list_checkpoints(out / "checkpoints")[-1]
    tensors = {
        f"{file}/{name}": value
        for file in ("model.safetensors", "optimiser.safetensors")
        for name, value in folder.read_tensors(last, file).items()
    }
    lines = [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_json_lines(out / "metrics.jsonl")
    ]
    return tensors, lines


def same(out: Path, whole: Path) -> bool:
    (mine, lines), (theirs, known) = state(out), state(whole)
    return lines == known and mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def reached(out: Path) -> int:
    saves = folder.list_checkpoints(out / "checkpoints")
    return folder.update_number(saves[-1]) if saves else 0


def random_kills(work: Path, whole: Path, kills: int, seconds: float) -> dict[str, Any]:
    """Runs that are killed at random moments until each ends; `seconds` is how long an untouched one takes."""
    rng, done, runs, wrong, hangs, lost = random.Random(0), 0, 0, 0, 0, 0
    while done < kills:
        out, runs = work / f"random{runs}", runs + 1
        for _ in range(200):
            at = reached(out)
            ranks = lives(out, lambda rank: None)
            if done < kills and rng.random() < 0.9:
                time.sleep(rng.uniform(0.0, seconds))
                alive = [one for one in ranks if os.waitpid(one, os.WNOHANG) == (0, 0)]
                if len(alive) == len(ranks):
                    for one in rng.choice([ranks, ranks[:1], ranks[1:]]):
                        os.kill(one, signal.SIGKILL)
                    done += 1
                else:
                    ranks = alive
            codes = ended(ranks)
            hangs += codes.count(999)
            lost += reached(out) < at
            if (out / "summary.json").is_file() and all(code == 0 for code in codes):
                break
        wrong += not same(out, whole)
        shutil.rmtree(out)
        print(f"{done} of {kills} kills, {runs} runs, {wrong} differ, {hangs} hangs", flush=True)
    return {
        "kills": done,
        "runs": runs,
        "runs_that_differ": wrong,
        "hangs": hangs,
        "lives_that_lost_a_checkpoint": lost,
    }


def at_every_write(work: Path, whole: Path) -> dict[str, Any]:
    """Rank 0 dies right before its n-th flush or rename, for every n of a run; then the run continues."""
    boundary, wrong, hangs = 0, 0, 0
    while True:
        out = work / f"write{boundary}"
        first = ended(lives(out, lambda rank, n=boundary: die_at_write(n) if rank == 0 else None))
        if first == [0, 0]:  # it ended before its n-th write: all are done
            break
        codes = ended(lives(out, lambda rank: None))
        hangs += (first + codes).count(999)
        wrong += codes != [0, 0] or not same(out, whole)
        shutil.rmtree(out)
        boundary += 1
        print(f"killed at write {boundary}: {wrong} differ, {hangs} hangs", flush=True)
    return {"writes": boundary, "runs_that_differ": wrong, "hangs": hangs}


def die_at_write(number: int) -> None:
    """From now on this process kills itself right before its write `number` (from 0)."""
    seen = [0]

    def counted(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1
            return honest(*arguments, **named)

        return call

    os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        started = time.monotonic()
        assert ended(lives(work / "whole", lambda rank: None)) == [0, 0]
        seconds = time.monotonic() - started
        found = {"updates": RECIPE.train.max_updates, "ranks": 2, "seconds_of_an_untouched_run": round(seconds, 1)}
        found["at_every_write"] = at_every_write(work, work / "whole")
        found["at_random_moments"] = random_kills(work, work / "whole", given.kills, seconds)
    print(json.dumps(found, indent=1))
    if given.out:
        write_json(given.out, found)


if __name__ == "__main__":
    main()
