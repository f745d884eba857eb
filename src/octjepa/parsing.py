"""Readers of text and tables from other people: JSON, JSON lines, Parquet and safetensors headers.

Every loader reads these formats with the functions of this module, which bound size, depth, aliases and the memory of
the result before anything is built. In: bytes, or the path of a file. Out: plain data (dict, list, str, numbers) or a
pandas table. A file that breaks a limit or the format raises `Malformed`, a ValueError with a short reason; the caller
adds which file it is and what to do. `shown` cuts a foreign value before a message prints it, because `repr` of a few
hundred bytes of YAML aliases can fill the memory.

`octjepa.yaml_text` reads YAML in the same way. The limits are far above what octjepa writes: the largest files are
metrics.jsonl and manifests with one hash per training volume.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from octjepa.parquet_layout import RowGroup

MAX_DEPTH = 64  # nested lists and objects of JSON; Python's own limit is about 1,000 calls
JSON_BYTES = 256 << 20
JSON_ITEMS = 5_000_000  # an empty list takes 2 bytes in the file and 64 in memory
LINE_BYTES = 16 << 20
LINES_BYTES = 1 << 30
LINES_ITEMS = 30_000_000
PARQUET_FREE_BYTES = 128 << 20  # memory that a Parquet file of any size may take
PARQUET_EXPANSION = 40  # and times its size in addition; the index of a real store takes 5 to 10 times its size
SAFETENSORS_HEADER_BYTES = 16 << 20  # of 4,000 tensors: 0.5 MB
_INTEGER_DIGITS = 40
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)|[\[\]{}]', re.DOTALL)  # matches an unfinished string as well
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Malformed(ValueError):
    """Content that is not what its format allows, or exceeds a limit of this module; the text is a short reason."""


# -- values in messages --


class _Short(reprlib.Repr):
    """repr with at most four items per level and three levels; numbers of any length are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlong, self.maxother = 3, 40, 80
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 4

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 130 else f"an integer of {x.bit_length()} bits"


def shown(value: object, limit: int = 120) -> str:
    """`repr(value)` of at most `limit` characters, computed without the part that is cut."""
    short = _Short()
    short.maxstring = limit
    text = short.repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def printable(text: str, limit: int = 20_000) -> str:
    """`text` without control and bidirectional characters, which could rewrite a terminal; at most `limit` characters.

    Line ends and tabs stay.
    """
    text = text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit:,} more characters)"
    allowed = "\n\t"
    return "".join(
        character
        if character.isprintable() or character in allowed
        else character.encode("unicode_escape", "replace").decode()
        for character in text
    )


# -- files --


def read_limited(path: Path, limit: int) -> bytes:
    """The content of the regular file `path`.

    Raises Malformed: more than `limit` bytes, or a pipe or device, which might never end; OSError: it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer does not block
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(21, os.strerror(21), str(path))
        if not stat.S_ISREG(about.st_mode):
            raise Malformed("it is not a regular file")
        content = b"" if about.st_size > limit else file.read(limit + 1)
    if about.st_size > limit or len(content) > limit:
        raise Malformed(f"it has more than the {limit:,} bytes that are read of such a file")
    return content


def read_text(path: Path, limit: int) -> str:
    """The UTF-8 text of `path`. Raises Malformed: too long, or not UTF-8; OSError."""
    return _decoded(read_limited(path, limit))


def _decoded(content: bytes | str) -> str:
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed(f"byte {error.start:,} is not UTF-8") from None


# -- JSON --


def parse_json(content: bytes | str, items: int = JSON_ITEMS) -> Any:
    """JSON -> plain data.

    Raises Malformed: not UTF-8 or not JSON, more than `items` values, nested deeper than `MAX_DEPTH`, an integer of
    more than 40 digits, or text that no file could hold (half of a surrogate pair).
    """
    text = _decoded(content)
    opened = text.count("[") + text.count("{")
    if opened + text.count(",") > items:
        raise Malformed(f"it has more than {items:,} values")
    if opened > MAX_DEPTH:
        _check_depth(text)
    try:
        value = json.loads(text, parse_int=parse_integer)
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Malformed("a text in it holds half of a surrogate pair") from None
    return value


def parse_json_object(content: bytes | str) -> dict[str, Any]:
    """As `parse_json`; also raises Malformed where the value is not an object."""
    value = parse_json(content)
    if not isinstance(value, dict):
        raise Malformed(f"it holds {_kind(value)}, expected an object")
    return value


def read_json(path: Path) -> Any:
    """The JSON file `path`, as `parse_json`. Raises Malformed; OSError."""
    return parse_json(read_limited(path, JSON_BYTES))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, as `parse_json_object`. Raises Malformed; OSError."""
    return parse_json_object(read_limited(path, JSON_BYTES))


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    """(line number, object) of every line of `path` that is not empty; Malformed in place of a damaged line's object.

    A last line without a line end, which a crash cut short, is left out unless it is whole. Raises Malformed: the file
    exceeds the limits; OSError.
    """
    lines = read_limited(path, LINES_BYTES).split(b"\n")
    left = LINES_ITEMS
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if len(line) > LINE_BYTES:
                raise Malformed(f"more than {LINE_BYTES:,} bytes")
            left -= 1 + line.count(b",") + line.count(b"[") + line.count(b"{")
            if left < 0:
                raise Malformed(f"the file has more than {LINES_ITEMS:,} values")
            entry = parse_json_object(line)
        except Malformed as error:
            if left < 0:
                raise
            if number < len(lines):
                yield number, error
            continue
        yield number, entry


def parse_integer(text: str) -> int:
    """A decimal integer. Raises Malformed: it has more than 40 digits, which Python converts slowly."""
    if (digits := len(text.lstrip("-"))) > _INTEGER_DIGITS:
        raise Malformed(f"an integer of {digits:,} digits")
    return int(text)


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STRUCTURE.finditer(text):
        sign = match[0]
        if sign in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise Malformed(f"it is nested more than {MAX_DEPTH} deep")
        elif sign in "]}":
            depth -= 1


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), "an object")


# -- Parquet --


def read_parquet(path: Path, columns: Sequence[str] | None = None, filters: Any = None) -> pd.DataFrame:
    """The Parquet file `path` as a pandas table, all `columns` or those named.

    Its memory is bounded by `PARQUET_FREE_BYTES` and `PARQUET_EXPANSION` times its size: a file of 3 MB whose columns
    repeat one long text would take 8 GB. The headers of its pages may not contradict its footer
    (`octjepa.parquet_layout`). filters: as in pyarrow, applied to the table that was read. Raises Malformed: damaged or
    too large, a column is absent; OSError.
    """
    table = read_arrow(path, columns)
    if filters is not None:
        import pyarrow.parquet as pq

        table = table.filter(pq.filters_to_expression(filters))
    frame: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    return frame


def read_arrow(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """As `read_parquet`, the arrow table with the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from octjepa.parquet_layout import read_row_groups

    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise Malformed("it is not a regular file")
        budget = PARQUET_FREE_BYTES + PARQUET_EXPANSION * about.st_size
        limits = {"thrift_string_size_limit": 64 << 20, "thrift_container_size_limit": 4_000_000}
        try:
            groups = read_row_groups(file)
            file.seek(0)
            table_file = pq.ParquetFile(file, **limits)
            wanted = list(table_file.schema_arrow.names if columns is None else columns)
            if absent := [name for name in wanted if name not in table_file.schema_arrow.names]:
                raise Malformed(f"column {shown(absent[0])} is absent")
            texts = _check_declared(groups, table_file.schema, budget)
            _check_pages(file, groups, table_file.schema)
            file.seek(0)
            # Texts are read as numbers into a list of different texts: a million equal texts take the memory of one
            # text.
            table = pq.ParquetFile(file, read_dictionary=texts, **limits).read(wanted)
            return _without_dictionaries(table, budget)
        except Malformed:
            raise
        except (pa.ArrowException, NotImplementedError, MemoryError, ValueError, OverflowError, KeyError) as error:
            raise Malformed(" ".join(str(error).split())[:200] or type(error).__name__) from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise Malformed(" ".join(str(error).split())[:200]) from None  # damaged pages, in pyarrow's words


def _check_declared(groups: Sequence[RowGroup], schema: Any, budget: int) -> list[str]:
    """The paths of the text columns. `groups` are those of the footer, and `schema` is that of pyarrow.

    Raises Malformed: the footer does not fit the schema, promises more than `budget` bytes, or names another
    compression than snappy, which expands 21 times at most.
    """
    columns = [schema.column(index) for index in range(len(schema))]
    taken, others = 0, set()
    for group in groups:
        if [chunk.physical_type for chunk in group.chunks] != [column.physical_type for column in columns]:
            raise Malformed("its footer does not describe the columns of its schema")
        for chunk, column in zip(group.chunks, columns, strict=True):
            if chunk.codec not in ("SNAPPY", "UNCOMPRESSED"):
                others.add(chunk.codec)
            taken += chunk.unpacked_bytes + max(8, _value_bytes(column)) * max(chunk.values, group.rows)
    if taken > budget:
        raise Malformed(f"its table would take {taken / 2**20:,.0f} MiB of memory, more than its size allows")
    if others:
        raise Malformed(f"it is compressed by {', '.join(sorted(others))}: write it with snappy, as octjepa does")
    return sorted(column.path for column in columns if column.physical_type == "BYTE_ARRAY")


def _check_pages(file: BinaryIO, groups: Sequence[RowGroup], schema: Any) -> None:
    """Compares the headers of all pages with the footer, before pyarrow unpacks a page and believes its header.

    Then `_check_declared` bounds what the pages take. An encoding in which each value repeats the start of the
    previous value is refused, because its values take any multiple of its bytes. Raises Malformed.
    """
    from octjepa.parquet_layout import DELTA_BYTE_ARRAY, DICTIONARY_PAGE, page_headers

    for group in groups:
        for index, chunk in enumerate(group.chunks):
            column = schema.column(index)
            if not chunk.values:
                continue  # pyarrow reads no page of such a column, and writes no true position for it
            values = unpacked = 0
            try:
                for page in page_headers(file, chunk.start, chunk.start + chunk.packed_bytes):
                    if page.encoding == DELTA_BYTE_ARRAY:
                        raise ValueError("it is encoded by DELTA_BYTE_ARRAY, which octjepa does not write")
                    unpacked += page.unpacked_bytes
                    if page.kind != DICTIONARY_PAGE:
                        values += page.values
                    elif page.values * max(1, _value_bytes(column)) > page.unpacked_bytes:
                        raise ValueError("its dictionary states more values than fit into it")
                if values != chunk.values or unpacked > chunk.unpacked_bytes:
                    raise ValueError("its pages state another size than the footer of the file")
            except (ValueError, OverflowError) as error:
                raise Malformed(f"column {shown(column.path.partition('.')[0])}: {error}") from None


def _value_bytes(column: Any) -> int:
    """Bytes that a value of a column of pyarrow's schema takes in a page, at least."""
    return int(column.length) if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 4


def _without_dictionaries(table: pa.Table, budget: int) -> pa.Table:
    """The table with plain texts. Raises Malformed if they would exceed `budget` bytes, or are in nested lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    taken = 0
    for index, name in enumerate(table.column_names):
        parts = []
        for part in table.column(index).chunks:
            is_list = pa.types.is_list(part.type) or pa.types.is_large_list(part.type)
            values = part.values if is_list else part
            if pa.types.is_nested(values.type):
                raise Malformed(f"column {shown(name)} holds nested values")
            if pa.types.is_dictionary(values.type):
                if pa.types.is_string(values.type.value_type) or pa.types.is_binary(values.type.value_type):
                    taken += pc.sum(pc.binary_length(values.dictionary).take(values.indices)).as_py() or 0
                if taken > budget:
                    raise Malformed(f"its texts would take more than {budget / 2**20:,.0f} MiB of memory")
                values = values.cast(values.type.value_type)
                part = type(part).from_arrays(part.offsets, values, mask=part.is_null()) if is_list else values
            parts.append(part)
        kind = None if parts else _plain(table.field(index).type)
        table = table.set_column(index, name, pa.chunked_array(parts, kind))
    return table


def _plain(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    return kind.value_type if pa.types.is_dictionary(kind) else kind


# -- safetensors --


def check_safetensors(path: Path) -> None:
    """Raises Malformed where the header of a safetensors file is longer than any of ours could be; OSError.

    The library parses a header of up to 100 MB, which takes over a gigabyte.
    """
    with path.open("rb") as file:
        start = file.read(8)
        size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise Malformed("it is shorter than its header says")
    if length > SAFETENSORS_HEADER_BYTES:
        raise Malformed(f"its header has {length:,} bytes, more than the {SAFETENSORS_HEADER_BYTES:,} that are read")
