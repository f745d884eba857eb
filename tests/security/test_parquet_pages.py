"""A Parquet file whose page headers contradict its footer: refused before a page is unpacked, whoever reads it.

A table is written honestly, without compression, and the pages of one column are then replaced within their bytes. The
footer keeps its small numbers; the page states gigabytes or billions of values.
"""

from __future__ import annotations

import io
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command_line import call
from index_entries import index_entry, store_of
from octjepa.embed.embedding import embed_store
from octjepa.errors import UsageError
from octjepa.parquet_layout import DATA_PAGE, DATA_PAGE_2, DICTIONARY_PAGE, page_headers, read_row_groups
from octjepa.parsing import read_parquet
from octjepa.viewer.misread import CasePredictions
from planted import PlantedStore, write_encoder

MOST = 2**31 - 1
ALLOWED = 400 << 20  # bytes of a process that refuses the file, pandas and pyarrow imported


# -- pages, written here in the compact protocol --


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out + bytes([number]))


def struct_of(*numbers: int) -> bytes:
    """A struct of 32-bit numbers, fields 1, 2 ..."""
    return b"".join(b"\x15" + varint(number << 1) for number in numbers) + b"\0"


def header(kind: int, unpacked: int, packed: int, *content: int) -> bytes:
    field = {DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_2: 8}[kind]
    start = struct_of(kind, unpacked, packed)[:-1]
    return start + bytes([(field - 3) << 4 | 12]) + struct_of(*content) + b"\0"


def runs(*pairs: tuple[int, int]) -> bytes:
    """Levels as runs of (count, value), with their length before them."""
    packed = b"".join(varint(count << 1) + bytes([value]) for count, value in pairs)
    return struct.pack("<I", len(packed)) + packed


def page(room: int, kind: int, unpacked: int | None, content: tuple[int, ...], data: bytes) -> bytes:
    """A page that takes `room` bytes with its header; `unpacked`: what it states, None for the truth."""
    packed = room
    for _ in range(4):  # the header holds the length of what follows it
        made = header(kind, packed if unpacked is None else unpacked, packed, *content)
        packed = room - len(made)
    return made + data + bytes(packed - len(data))


def rewritten(path: Path, table: pa.Table, column: str, make: Callable[[int], bytes], codec: str = "none") -> None:
    """`table` at `path` with the pages of `column` replaced by `make(their bytes)`."""
    pq.write_table(table, path, compression=codec, use_dictionary=False, write_statistics=False)
    metadata = pq.ParquetFile(path).metadata
    chunks = [metadata.row_group(0).column(index) for index in range(metadata.num_columns)]
    chunk = next(chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column)
    start, length = chunk.data_page_offset, chunk.total_compressed_size
    content = path.read_bytes()
    made = make(length)
    assert len(made) == length
    path.write_bytes(content[:start] + made + content[start + length :])


TEXTS = pa.table({"volume_id": [f"volume{number:04d}" for number in range(200)]})
LISTS = pa.table({"volume_id": pa.array([[float(number)] * 4 for number in range(200)], pa.list_(pa.float32()))})


def a_page_of_gigabytes(path: Path) -> None:
    data = pa.compress(bytes(2000), "snappy", asbytes=True)
    rewritten(path, TEXTS, "volume_id", lambda room: page(room, DATA_PAGE, MOST, (200, 0, 3, 3), data), "snappy")


def a_run_of_a_billion_levels(path: Path) -> None:
    """One list of a billion missing numbers, in 20 bytes."""
    count = 2**30
    data = runs((1, 0), (count, 1)) + runs((count + 1, 2))
    rewritten(path, LISTS, "volume_id", lambda room: page(room, DATA_PAGE, None, (count + 1, 0, 3, 3), data))


def a_run_of_a_billion_levels_in_version_2(path: Path) -> None:
    count = 2**30
    repeated, defined = (level[4:] for level in (runs((1, 0), (count, 1)), runs((count + 1, 2))))
    content = (count + 1, count, 200, 0, len(defined), len(repeated))
    data = repeated + defined
    rewritten(path, LISTS, "volume_id", lambda room: page(room, DATA_PAGE_2, None, content, data))


def a_dictionary_of_billions(path: Path) -> None:
    def make(room: int) -> bytes:
        first = page(500, DICTIONARY_PAGE, None, (MOST, 0), b"\x01\0\0\0a" * 80)
        return first + page(room - 500, DATA_PAGE, None, (200, 8, 3, 3), runs((200, 1)) + b"\x01" + runs((200, 0))[4:])

    rewritten(path, TEXTS, "volume_id", make)


def texts_that_repeat_the_one_before(path: Path) -> None:
    """Each value states how much of the one before it begins with: 300 texts of 200 kB in a few hundred kB."""
    texts = pa.array(["x" * 200_000 + str(number) for number in range(300)])
    encoding = {"volume_id": "DELTA_BYTE_ARRAY"}
    pq.write_table(pa.table({"volume_id": texts}), path, use_dictionary=False, column_encoding=encoding)


BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a page of gigabytes": (a_page_of_gigabytes, "its pages state another size than the footer"),
    "a run of a billion levels": (a_run_of_a_billion_levels, "its pages state another size than the footer"),
    "the same in version 2": (a_run_of_a_billion_levels_in_version_2, "its pages state another size than the footer"),
    "a dictionary of billions": (a_dictionary_of_billions, "its dictionary states more values than fit into it"),
    "texts that repeat": (texts_that_repeat_the_one_before, "it is encoded by DELTA_BYTE_ARRAY"),
}

CHILD = """
import re, sys
from pathlib import Path
from octjepa.parsing import Malformed, read_parquet
try:
    read_parquet(Path(sys.argv[1]))
    print("accepted")
except Malformed as error:
    print(error)
print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.parametrize("kind", BOMBS)
def test_a_page_that_states_more_than_the_footer_is_refused(tmp_path: Path, kind: str) -> None:
    write, reason = BOMBS[kind]
    path = tmp_path / "volumes.parquet"
    write(path)
    assert path.stat().st_size < 1 << 20

    def limit() -> None:  # as ulimit -v
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr
    output, peak = done.stdout.splitlines()
    assert f"column 'volume_id': {reason}" in output
    assert int(peak) < ALLOWED, f"{int(peak) >> 20} MiB"


# -- the readers of octjepa --


def assert_one_line(outcome, *parts: str) -> None:
    assert outcome.code == 2, outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    for part in parts:
        assert part in outcome.err


def rewrite_column(path: Path, column: str) -> None:
    table = pq.read_table(path)
    rewritten(path, table, column, lambda room: page(room, DATA_PAGE, None, (MOST, 0, 3, 3), b""))


def test_the_index_of_a_store(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(1), index_entry(2)])
    assert call("inspect", store.path).code == 0
    rewrite_column(store.path / "volumes.parquet", "person_id")
    assert_one_line(
        call("inspect", store.path), "volumes.parquet", "column 'person_id': its pages state another size than"
    )


@pytest.mark.slow
@pytest.mark.parametrize("column", ["person_id", "vector"])
def test_embeddings(tmp_path: Path, column: str) -> None:
    path = tmp_path / "eyes.parquet"
    embed_store(write_encoder(tmp_path / "encoder.safetensors"), PlantedStore(), path)
    (tmp_path / "labels.tsv").write_text("person_id\tmark\n1000\t1\n")
    rewrite_column(path, column)
    outcome = call("probe", path, "--labels", tmp_path / "labels.tsv", "--target", "mark")
    assert_one_line(outcome, "eyes.parquet", "its pages state another size than the footer")


def test_a_list_of_misread_eyes(tmp_path: Path) -> None:
    names = ("level", "target", "split", "eye", "volume_id", "truth", "predicted", "classes", "scores")
    table = pa.table({name: ["a"] * 9 for name in names})
    rewritten(
        tmp_path / "predictions.parquet",
        table,
        "truth",
        lambda room: page(room, DATA_PAGE, None, (MOST, 0, 3, 3), b""),
    )
    with pytest.raises(UsageError, match="its pages state another size than the footer"):
        CasePredictions(tmp_path / "predictions.parquet")


# -- honest files --


def honest_tables() -> dict[str, pa.Table]:
    rng = np.random.default_rng(0)
    return {
        "texts": pa.table({"a": pa.array([None if n % 7 == 0 else f"text {n % 50}" for n in range(50_000)])}),
        "lists": pa.table({"a": pa.array([None if n % 5 == 0 else rng.random(n % 9) for n in range(20_000)])}),
        "numbers": pa.table({"a": rng.integers(0, 9, 60_000), "b": rng.random(60_000), "c": rng.random(60_000) > 0.5}),
        "nothing": pa.table({"a": pa.array([], pa.string()), "b": pa.array([], pa.list_(pa.float32()))}),
        "wide": pa.table({"a": pa.array([b"0123456789abcdef"] * 300, pa.binary(16))}),
    }


@pytest.mark.parametrize("name", honest_tables())
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"compression": "none", "use_dictionary": False},
        {"data_page_version": "2.0", "data_page_size": 4096},
        {"row_group_size": 7000, "write_page_index": True},
        {"use_dictionary": False, "write_page_checksum": True, "compression": "snappy"},
    ],
)
def test_files_of_other_writers_are_read(tmp_path: Path, name: str, options: dict) -> None:
    table = honest_tables()[name]
    pq.write_table(table, tmp_path / "t.parquet", **options)
    frame = read_parquet(tmp_path / "t.parquet")
    assert frame.equals(table.to_pandas())


@pytest.mark.parametrize("encoding", ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"])
def test_encodings_whose_values_do_not_grow_are_read(tmp_path: Path, encoding: str) -> None:
    table = pa.table({"a": np.arange(5000) % 77})
    pq.write_table(table, tmp_path / "t.parquet", use_dictionary=False, column_encoding={"a": encoding})
    assert read_parquet(tmp_path / "t.parquet").equals(table.to_pandas())


# -- the reader of footers and headers --


def test_the_footer_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for table in honest_tables().values():
        pq.write_table(table, path, row_group_size=9000)
        metadata = pq.ParquetFile(path).metadata
        with path.open("rb") as file:
            groups = read_row_groups(file)
        assert [group.rows for group in groups] == [metadata.row_group(n).num_rows for n in range(len(groups))]
        for number, group in enumerate(groups):
            for index, chunk in enumerate(group.chunks):
                other = metadata.row_group(number).column(index)
                assert (chunk.physical_type, chunk.codec) == (other.physical_type, other.compression)
                assert (chunk.values, chunk.unpacked_bytes) == (other.num_values, other.total_uncompressed_size)
                if not other.num_values:
                    continue  # pyarrow writes no true position
                start = other.dictionary_page_offset if other.has_dictionary_page else other.data_page_offset
                assert (chunk.start, chunk.packed_bytes) == (start, other.total_compressed_size)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (b"", "does not end as"),
        (struct.pack("<I", 7 << 20) + b"PAR1", "does not end as"),
        (struct.pack("<I", 5 << 20) + b"PAR1", "more than the"),
        (b"\x19" + struct.pack("<I", 1) + b"PAR1", "its footer is cut"),
        (b"\0" + struct.pack("<I", 1) + b"PAR1", "lacks a list"),
        (b"\x8c\0\0" + struct.pack("<I", 3) + b"PAR1", "encrypted"),
    ],
)
def test_damaged_footers_are_refused(end: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_row_groups(io.BytesIO(bytes(6 << 20) + end))


def test_headers_are_read_as_they_were_written() -> None:
    pages = [
        (header(DICTIONARY_PAGE, 900, 40, 7, 0), 40),
        (header(DATA_PAGE, 2_000_000, 90, 1000, 8, 3, 3), 90),
        (header(DATA_PAGE_2, 5, 5, 12, 3, 4, 0, 2, 2), 5),
    ]
    content = b"PAR1" + b"".join(head + bytes(length) for head, length in pages)
    read = list(page_headers(io.BytesIO(content), 4, len(content)))
    assert [(one.kind, one.unpacked_bytes, one.packed_bytes, one.values, one.encoding) for one in read] == [
        (DICTIONARY_PAGE, 900, 40, 7, 0),
        (DATA_PAGE, 2_000_000, 90, 1000, 8),
        (DATA_PAGE_2, 5, 5, 12, 0),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut or too long"),
        (header(DATA_PAGE, 9, 9, 1, 0, 3, 3)[:5], "cut or too long"),
        (header(DATA_PAGE, 9, 900, 1, 0, 3, 3), "longer than its column"),
        (b"\x15\x00\x15\x02\x15\x02\x00", "does not describe its values"),
        (b"\x15\x02\x15\x02\x15\x02\x00", "unknown kind"),
        (b"\x15\x00\x15\x01\x15\x02\x00", "one that no file has"),  # a negative size
        (b"\x15\x00\x05\x02\x00\x15\x02\x00", "twice"),
        (b"\x1e\x00\x00", "unknown type"),
        (b"\x1c" * 20, "nested too deeply"),
        (b"\x15" + b"\xff" * 12, "more than 64 bits"),
        (b"\x18\xff\xff\xff\xff\x0f", "cut or too long"),  # a text of 4 GiB
    ],
)
def test_damaged_headers_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        list(page_headers(io.BytesIO(content), 0, max(1, len(content))))


CHANGED = """
import sys
from pathlib import Path
import numpy as np
from octjepa.parsing import Malformed, read_parquet
path, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
honest, rng, refused = path.read_bytes(), np.random.default_rng(7), 0
for _ in range(count):
    changed = bytearray(honest)
    for at in rng.integers(first, len(honest) - 8, rng.integers(1, 4)):
        changed[at] = rng.integers(256)
    path.write_bytes(changed)
    try:
        read_parquet(path)
    except Malformed:
        refused += 1
print(refused)
"""


@pytest.mark.parametrize("part", ["pages", "footer"])
@pytest.mark.parametrize("name", ["texts", "lists", "wide"])
def test_random_bytes_end_in_a_table_or_one_reason(tmp_path: Path, name: str, part: str) -> None:
    """pyarrow's own objects for the metadata end the process at some of these footers."""
    path = tmp_path / "t.parquet"
    pq.write_table(honest_tables()[name].slice(0, 50), path, compression="snappy")
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    words = [sys.executable, "-W", "ignore", "-c", CHANGED, path, str(4 if part == "pages" else footer), "250"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40
