"""The environment of a launcher: what it says about the processes."""

from __future__ import annotations

import pytest

from octjepa.distributed.runtime import distributed_context
from octjepa.errors import UsageError


@pytest.mark.parametrize("text", ["", "two", "0", "-2", "1.5"])
def test_a_world_size_that_is_no_number_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A job script may set it from a variable that is empty."""
    monkeypatch.setenv("WORLD_SIZE", text)
    words = f"WORLD_SIZE is '{text}', expected the number of processes"
    with pytest.raises(UsageError, match=words), distributed_context():
        pass
