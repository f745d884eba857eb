"""The memory budget: declared sizes are checked before anything is allocated, and unpacking stops at the budget."""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zlib

import pytest

from octjepa.errors import VolumeRejected
from octjepa.read import memory_budget
from octjepa.read.memory_budget import (
    DEFLATE_RATIO,
    GZIP,
    LARGEST_BYTES,
    LEAST_BYTES,
    RAW,
    array_bytes,
    budget_bytes,
    check_memory,
    inflate,
    inflated_chunks,
    share_memory,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _machine_of_16_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "memory_limit_bytes", lambda: 16 << 30)
    monkeypatch.setattr(memory_budget, "_workers", 1)


def test_the_budget_is_a_share_of_the_memory_for_each_worker() -> None:
    assert budget_bytes() == LARGEST_BYTES == 4 << 30
    share_memory(4)
    assert budget_bytes() == 1 << 30
    share_memory(1000)
    assert budget_bytes() == LEAST_BYTES  # the largest known scan can still be read


def test_a_declared_size_beyond_the_budget_is_refused() -> None:
    check_memory(1 << 30, "values")
    share_memory(8)
    with pytest.raises(VolumeRejected, match=r"size_implausible: values: 1\.0 GiB; the limit is 512\.0 MiB.*8 workers"):
        check_memory(1 << 30, "values")
    assert array_bytes((1 << 40, 1 << 40), 8) == 8 << 80  # NumPy would wrap around


def test_packed_bytes_cannot_hold_more_than_their_compression_allows() -> None:
    check_memory(1000 * DEFLATE_RATIO, "values", 1000, DEFLATE_RATIO)
    with pytest.raises(VolumeRejected, match=r"truncated: values: .* cannot hold"):
        check_memory(1000 * DEFLATE_RATIO + 1, "values", 1000, DEFLATE_RATIO)
    with pytest.raises(VolumeRejected, match="truncated"):
        check_memory(1001, "values", 1000)


def test_inflate_stops_at_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "budget_bytes", lambda: 4 * MIB)
    bomb = zlib.compress(bytes(64 * MIB), 9)
    tracemalloc.start()
    with pytest.raises(VolumeRejected, match="size_implausible"):
        inflate(bomb, "a stream")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * MIB
    assert inflate(zlib.compress(bytes(4 * MIB)), "a stream") == bytes(4 * MIB)  # exactly the budget
    assert inflate(bomb, "a stream", most_bytes=10) == bytes(10)


@pytest.mark.parametrize("container", [RAW, memory_budget.ZLIB, GZIP])
def test_inflate_reads_each_container_and_names_damage(container: int) -> None:
    packer = zlib.compressobj(wbits=container)
    packed = packer.compress(b"abc" * 1000) + packer.flush()
    assert inflate(packed, "a stream", container) == b"abc" * 1000
    with pytest.raises(VolumeRejected, match=r"truncated: a stream: .* end early"):
        inflate(packed[:-9], "a stream", container)
    with pytest.raises(VolumeRejected, match="truncated"):
        inflate(b"\xff" * 40, "a stream", container)


def test_gzip_members_that_follow_one_another_are_one_stream() -> None:
    packed = gzip.compress(b"one") + gzip.compress(b"two") + bytes(3)
    assert b"".join(inflated_chunks(io.BytesIO(packed), "a stream", GZIP)) == b"onetwo"
    with pytest.raises(VolumeRejected, match="truncated"):
        list(inflated_chunks(io.BytesIO(packed[:20] + b"\xff" * 20), "a stream", GZIP))
    with pytest.raises(VolumeRejected, match=r"truncated: a stream: .* end early"):
        list(inflated_chunks(io.BytesIO(packed[:-9]), "a stream", GZIP))
