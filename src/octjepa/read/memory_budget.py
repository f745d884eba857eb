"""One memory budget per process for everything that is read from a file of another person.

A header of a few bytes can declare an array of many gigabytes, and a few megabytes of deflate can unpack to thousands
of times their size. Every reader therefore passes through the functions here before it allocates or unpacks anything:

- `check_memory` compares a declared size with the budget of this process, and with what its packed bytes can unpack to.
- `inflate` unpacks deflate, zlib and gzip data and stops at the budget, or earlier where the caller knows the size.

The budget is an equal share of the machine's memory for each worker process; a quarter of that share is the limit of a
single array, because reading and resampling hold several copies. `share_memory` tells a process how many workers there
are; a process that never calls it counts as the only one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from octjepa.machine import memory_limit_bytes
from octjepa.reasons import rejection

LARGEST_BYTES = 4 << 30  # of one array on any machine; the largest known cube is 512 x 992 x 512 = 0.26 GB
LEAST_BYTES = 512 << 20  # of one array on the smallest machine: the largest known cube, as 16-bit values
DEFLATE_RATIO = 1032  # bytes that one byte of a deflate stream can unpack to
RUN_LENGTH_RATIO = 64  # bytes that one byte of PackBits or DICOM RLE can unpack to
SCAN_RATIO = 64  # to which speckle never compresses, even with loss; blank frames do
_ARRAYS_PER_WORKER = 4  # copies of a scan that a worker holds at once: raw values, 8 bit, resampled, temporary
_CHUNK_BYTES = 1 << 20  # that are unpacked at a time
RAW, ZLIB, GZIP = -zlib.MAX_WBITS, zlib.MAX_WBITS, zlib.MAX_WBITS + 16  # the containers of deflate

_workers = 1


def share_memory(workers: int) -> None:
    """Declares that `workers` processes read files on this machine, this one included."""
    global _workers
    _workers = max(1, workers)


def budget_bytes() -> int:
    """Bytes that one array of this process may take."""
    share = memory_limit_bytes() // _workers // _ARRAYS_PER_WORKER
    return min(LARGEST_BYTES, max(LEAST_BYTES, share))


def check_memory(
    needed_bytes: int, what: str, packed_bytes: int | None = None, ratio: int = 1, is_scan: bool = True
) -> None:
    """Checks a declared size before anything of that size is allocated.

    `needed_bytes` is the declared size of an array or a text, and `what` names it in the message ("its header
    declares 9 x 9 values"); `what` holds no text of the file. `packed_bytes` are the bytes that it is stored in, each
    of which can unpack to `ratio` bytes at most (1 for uncompressed values, `DEFLATE_RATIO`, `RUN_LENGTH_RATIO`).
    Above `LEAST_BYTES` a scan (`is_scan`: no label volume) is stored in more than 1 / `SCAN_RATIO` of its size.
    Raises VolumeRejected: size_implausible, beyond the budget; truncated, where the packed bytes cannot hold that much.
    """
    limit = budget_bytes()
    if needed_bytes > limit:
        beside = f" to each of {_workers} workers: fewer workers get more" if _workers > 1 else ""
        advice = beside if limit < LARGEST_BYTES else ""
        raise rejection("size_implausible", f"{what}: {_size(needed_bytes)}; the limit is {_size(limit)}{advice}")
    if packed_bytes is not None and needed_bytes > packed_bytes * ratio:
        raise rejection(
            "truncated", f"{what}: {_size(needed_bytes)}, and the {_size(packed_bytes)} that follow cannot hold that"
        )
    if is_scan and packed_bytes is not None and needed_bytes > max(LEAST_BYTES, packed_bytes * SCAN_RATIO):
        raise rejection(
            "size_implausible", f"{what}: {_size(needed_bytes)} in {_size(packed_bytes)}; no scan compresses so far"
        )


def array_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array, in whole numbers of any size: NumPy's own product overflows."""
    return math.prod(int(length) for length in shape) * int(itemsize)


def inflate(packed: bytes | memoryview, what: str, container: int = ZLIB, most_bytes: int | None = None) -> bytes:
    """The unpacked bytes of a deflate stream in a `container` (RAW, ZLIB or GZIP), `most_bytes` of them at most.

    Without `most_bytes` the whole stream is unpacked. Raises VolumeRejected: size_implausible, as soon as it exceeds
    the budget; truncated, where the stream is damaged or ends early.
    """
    if most_bytes is not None:
        check_memory(most_bytes, what)
        limit = most_bytes
    else:
        limit = min(budget_bytes(), max(LEAST_BYTES, SCAN_RATIO * len(packed)))
    unpacked = bytearray()
    decompressor = zlib.decompressobj(container)
    data: bytes | memoryview = packed
    try:
        while len(unpacked) < limit:
            part = decompressor.decompress(data, min(_CHUNK_BYTES, limit - len(unpacked)))
            unpacked += part
            data = decompressor.unconsumed_tail
            if decompressor.eof:
                return bytes(unpacked)
            if not (part or data):
                raise rejection("truncated", f"{what}: the compressed data end early")
        more = decompressor.decompress(data, 1)  # at the end of the stream its checksum is compared
    except zlib.error:
        raise rejection("truncated", f"{what}: the compressed data are damaged or cut") from None
    if more and most_bytes is None:
        raise rejection("size_implausible", f"{what}: more than {_size(limit)} unpacked from {_size(len(packed))}")
    if not more and not decompressor.eof:
        raise rejection("truncated", f"{what}: the compressed data end early")
    return bytes(unpacked)


def inflated_chunks(file: BinaryIO, what: str, container: int = ZLIB) -> Iterator[bytes]:
    """Unpacks the rest of `file` piece by piece, a megabyte at a time; gzip members that follow one another count.

    Raises VolumeRejected truncated, where a stream is damaged or ends early. Zeros may follow a gzip member.
    """
    decompressor = zlib.decompressobj(container)
    data = b""
    while data or (data := file.read(_CHUNK_BYTES)):
        try:
            part = decompressor.decompress(data, _CHUNK_BYTES)
        except zlib.error:
            raise rejection("truncated", f"{what}: the compressed data are damaged or cut") from None
        if part:
            yield part
        data = decompressor.unconsumed_tail
        if decompressor.eof:
            data = decompressor.unused_data.lstrip(b"\0") or file.read(_CHUNK_BYTES).lstrip(b"\0")
            if not data or container != GZIP:
                return
            decompressor = zlib.decompressobj(container)
    raise rejection("truncated", f"{what}: the compressed data end early")


def _size(count: int) -> str:
    """A number of bytes in words: "512 bytes", "3.0 MiB", "12.5 GiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
