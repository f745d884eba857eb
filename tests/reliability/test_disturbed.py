"""Every verb that writes is killed, refused and limited, and begun again: it ends as if nothing had been.

A few writes of each here; all of them, and a hundred random kills, are those of tests/stress/kill_verbs.py.
"""

from __future__ import annotations

import errno
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from command_line import call
from disturbances import close_stdout, die_at_write, fail_from_write, few_open_files, start_life, wait_for
from verbs import Inputs

pytestmark = pytest.mark.slow

VERBS = ("ingest", "embed", "finetune", "segment", "expand", "leaderboard", "export", "report")
QUICK = ("embed", "expand", "export", "report")  # a second or two each
KILLS = {True: (2, 6, 11), False: (5,)}  # writes at which a quick verb is killed, and one of the others
every_verb = pytest.mark.parametrize("lives", VERBS, indirect=True)
quick_verbs = pytest.mark.parametrize("lives", QUICK, indirect=True)


@every_verb
def test_a_kill_at_a_write_changes_nothing(lives: Any) -> None:
    """A quick verb is killed early, in the middle and late, in one folder: each time more is left in it."""
    for number in KILLS[lives.verb.name in QUICK]:
        end = lives.life(partial(die_at_write, number=number))
        if end.code == 0:
            break
        assert end.code == -signal.SIGKILL
    lives.assert_ends_well()


@quick_verbs
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_kill_at_any_moment_changes_nothing(lives: Any, share: float) -> None:
    lives.life(after_seconds=share * lives.seconds)
    lives.assert_ends_well()


@quick_verbs
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=["full disk", "no rights"])
def test_a_refused_write_ends_with_one_line_and_changes_nothing(lives: Any, number: int) -> None:
    end = lives.life(partial(fail_from_write, number=3, error=number))
    assert end.clear, end.message
    lives.assert_ends_well()


@quick_verbs
def test_sixty_four_open_files(lives: Any) -> None:
    end = lives.life(lambda folder: few_open_files(64))
    assert end.code == 0 or end.clear, end.message
    lives.assert_ends_well()


@quick_verbs
def test_an_output_without_a_reader_changes_nothing(lives: Any) -> None:
    end = lives.life(lambda folder: close_stdout)
    assert "Traceback" not in end.message
    lives.assert_ends_well()


@quick_verbs
def test_a_closed_terminal_ends_it_in_order(lives: Any) -> None:
    end = lives.life(after_seconds=0.5 * lives.seconds, number=signal.SIGHUP)
    assert end.code in (143, -signal.SIGHUP, 0)
    assert "Traceback" not in end.message
    lives.assert_ends_well()


@pytest.mark.parametrize("lives", ["embed"], indirect=True)
def test_of_two_embeddings_into_one_table_the_second_is_refused(lives: Any, tmp_path: Path) -> None:
    """The first is held right before it writes its table, while it has the lock."""
    readable, held = os.pipe()
    first = start_life(
        lives.verb.command(lives.folder), partial(_stop_at_write, lives.folder, 12, held), tmp_path / "first.err"
    )
    assert os.read(readable, 1) == b"x"
    second = call(*lives.verb.command(lives.folder))
    assert second.code == 2
    assert f"another process is writing to {lives.folder / 'table.parquet'} (process {first} on" in second.err
    assert len(second.err.strip().splitlines()) == 1
    os.kill(first, signal.SIGCONT)
    assert wait_for(first) == 0
    lives.assert_ends_well()


def _stop_at_write(below: Path, number: int, held: int) -> None:
    from disturbances import at_writes

    def stop(count: int, _: str) -> None:
        if count == number:
            os.write(held, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)

    at_writes(below, stop)


@pytest.mark.parametrize("name", VERBS)
def test_no_verb_writes_where_another_process_does(inputs: Inputs, tmp_path: Path, name: str) -> None:
    from octjepa.locks import file_lock, writer_lock

    command = inputs.verbs()[name].command(tmp_path)
    out = next(
        Path(str(word)) for word in command if str(word).startswith(f"{tmp_path}{os.sep}") and "looks" not in str(word)
    )
    with (file_lock if out.suffix else writer_lock)(out):
        outcome = call(*command)
    assert (outcome.code, "another process is writing to" in outcome.err) == (2, True)
    assert not out.is_file()
