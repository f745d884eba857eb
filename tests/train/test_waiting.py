"""Ranks that wait for rank 0 hear that it is at work, however long that takes; one that is gone is still missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import BEGIN, finish, losses_of, start_ranks

pytestmark = pytest.mark.slow

IMPATIENT = """
import time
from datetime import timedelta
from octjepa.distributed import runtime
runtime.TIMEOUT, runtime.HEARTBEAT_SECONDS = timedelta(seconds=4), 0.5
"""

WORK = (
    IMPATIENT
    + """
from octjepa.errors import OctjepaError
def fail():
    time.sleep(5)
    raise OctjepaError("the disk is full")
with runtime.distributed_context() as here:
    here.run_on_rank_zero(lambda: time.sleep(5))
    print("first", here.broadcast_object("word" if here.rank == 0 else None), flush=True)
    try:
        here.run_on_rank_zero(fail)
    except OctjepaError as error:
        print(error, flush=True)
    runtime.HEARTBEAT_SECONDS = 60
    try:
        here.run_on_rank_zero(lambda: time.sleep(6))  # in silence
    except OctjepaError as error:
        print(error, flush=True)
"""
)

SLOW_SAVES = (
    BEGIN
    + IMPATIENT
    + """
honest_save = checkpointing.state.save
def slow(*arguments):
    time.sleep(5)
    return honest_save(*arguments)
checkpointing.state.save = slow
recipe = recipe_of(checkpoint={"every_updates": 3})
pretrain(recipe, MemoryStore(recipe.preprocessing), out / "slow")
"""
)


def test_rank_0_may_take_longer_than_a_silent_rank_is_waited_for() -> None:
    ended = finish(start_ranks(WORK))
    first, other = (out.splitlines() for _, out, _ in ended)
    assert first[:2] == ["first word", "the disk is full"], ended
    assert other[:2] == ["first word", "rank 0: the disk is full"], ended
    assert "lost the others" in other[2]


def test_checkpoints_may_take_longer_to_write_than_a_silent_rank_is_waited_for(tmp_path: Path) -> None:
    ended = finish(start_ranks(SLOW_SAVES, tmp_path))
    assert [code for code, *_ in ended] == [0, 0], ended[0][2] + ended[1][2]
    assert len(losses_of(tmp_path / "slow")) == 6
    assert len(list((tmp_path / "slow" / "checkpoints").glob("step-*"))) == 2
