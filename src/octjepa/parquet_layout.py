"""The footer of a Parquet file and the headers of its pages, read without unpacking anything.

pyarrow reads the header of a page only while it unpacks the page, and then believes it, whatever the footer of the file
says: a page of a few bytes may state billions of values in one run, or gigabytes of unpacked data. Its objects for the
metadata of a file end the process where the footer holds a number that it does not know. So `octjepa.parsing` reads
both with this module and compares them, before pyarrow reads a page.

In: an open file. Out: `RowGroup`s from its footer, and a `PageHeader` for each page of a column. Both are in the
compact protocol of Thrift (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md). The
numbers of the fields are those of parquet.thrift (https://github.com/apache/parquet-format). A field that occurs twice
is refused, because readers may take either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, NamedTuple

PHYSICAL_TYPES: Final = (
    "BOOLEAN",
    "INT32",
    "INT64",
    "INT96",
    "FLOAT",
    "DOUBLE",
    "BYTE_ARRAY",
    "FIXED_LEN_BYTE_ARRAY",
)
CODECS: Final = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4")
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_2 = 0, 2, 3
DELTA_BYTE_ARRAY: Final = 7  # an encoding in which every value repeats the start of the previous value
_MAGIC = b"PAR1"
_FOOTER_BYTES = 4 << 20  # of a table of octjepa: some ten thousand
_USUAL_BYTES, _MOST_BYTES = 16 << 10, 1 << 20  # of the header of a page with its statistics
_CONTENT = {DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_2: 8}  # the field that describes a page of each kind
_ENCODING = {DATA_PAGE: 2, DICTIONARY_PAGE: 2, DATA_PAGE_2: 4}  # the field with its encoding in that
# Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = range(1, 14)
_SIZES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8, _UUID: 16}  # of an element of a list, in bytes
_MAX_DEPTH = 12  # of structs and lists


class _Value(NamedTuple):
    """A value with its type in the compact protocol. Texts, maps and numbers with a fraction are read as None."""

    kind: int
    content: object


_Fields = dict[int, _Value]


@dataclass(frozen=True)
class ColumnChunk:
    """The values of a column in a row group, by the footer. `start` is the first byte of its pages.

    physical_type, codec: names of `PHYSICAL_TYPES` and `CODECS`.
    """

    physical_type: str
    codec: str
    values: int
    unpacked_bytes: int
    packed_bytes: int
    start: int


@dataclass(frozen=True)
class RowGroup:
    """Some rows of a file, with a chunk for each column in the order of the schema."""

    rows: int
    chunks: tuple[ColumnChunk, ...]


@dataclass(frozen=True)
class PageHeader:
    """The numbers that a page states. `kind` is DATA_PAGE, DICTIONARY_PAGE or DATA_PAGE_2."""

    kind: int
    unpacked_bytes: int
    packed_bytes: int
    values: int
    encoding: int


# -- the footer --


def read_row_groups(file: BinaryIO) -> list[RowGroup]:
    """The row groups in the footer of `file`. Raises ValueError: it is damaged or encrypted, or exceeds 4 MiB."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or length > size - 8:
        raise ValueError("it does not end as a Parquet file")
    if length > _FOOTER_BYTES:
        raise ValueError(f"its footer has {length:,} bytes, more than the {_FOOTER_BYTES:,} that are read")
    file.seek(size - 8 - length)
    try:
        fields, _ = _struct(file.read(length), 0, 1)
    except IndexError:
        raise ValueError("its footer is cut") from None
    if 8 in fields:
        raise ValueError("it is encrypted")
    return [_row_group(group) for group in _structs(fields, 4)]


def _row_group(fields: _Fields) -> RowGroup:
    return RowGroup(_number(fields, 3, _I64), tuple(_chunk(chunk) for chunk in _structs(fields, 1)))


def _chunk(fields: _Fields) -> ColumnChunk:
    about = fields.get(3)
    if 1 in fields or {8, 9} & fields.keys() or about is None or not isinstance(about.content, dict):
        raise ValueError("a column is encrypted, in another file, or not described")
    chunk: _Fields = about.content
    physical, codec = (_number(chunk, number, _I32) for number in (1, 4))
    if physical >= len(PHYSICAL_TYPES) or codec >= len(CODECS):
        raise ValueError("a column is of an unknown type or compression")
    values, unpacked, packed, start = (_number(chunk, number, _I64) for number in (5, 6, 7, 9))
    if 11 in chunk and 0 < (dictionary := _number(chunk, 11, _I64)) < start:
        start = dictionary
    return ColumnChunk(PHYSICAL_TYPES[physical], CODECS[codec], values, unpacked, packed, start)


def _structs(fields: _Fields, number: int) -> list[_Fields]:
    """The structs of a list; a required field. Raises ValueError: it is something else."""
    value = fields.get(number)
    entries = value.content if value is not None and value.kind == _LIST else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("its footer lacks a list")
    return entries


# -- pages --


def page_headers(file: BinaryIO, start: int, end: int) -> Iterator[PageHeader]:
    """The headers of all pages between the bytes `start` and `end` of `file`, in order.

    Raises ValueError: a header is damaged, of an unknown kind, states a negative number, or its page goes beyond `end`.
    """
    while start < end:
        header, length = _read_header(file, start, end)
        start += length + header.packed_bytes
        if start > end:
            raise ValueError("a page is longer than its column")
        yield header


def _read_header(file: BinaryIO, start: int, end: int) -> tuple[PageHeader, int]:
    """(the header at byte `start`, its length in bytes). Raises ValueError as `page_headers`."""
    for most in (_USUAL_BYTES, _MOST_BYTES):
        file.seek(start)
        data = file.read(min(most, end - start))
        try:
            fields, length = _struct(data, 0, 1)
        except IndexError:
            continue
        return _page_header(fields), length
    raise ValueError("the header of a page is cut or too long")


def _page_header(fields: _Fields) -> PageHeader:
    kind, unpacked, packed = (_number(fields, number, _I32) for number in (1, 2, 3))
    if kind not in _CONTENT:
        raise ValueError("a page is of an unknown kind")
    about = fields.get(_CONTENT[kind])
    if about is None or not isinstance(about.content, dict):
        raise ValueError("the header of a page does not describe its values")
    content: _Fields = about.content
    return PageHeader(kind, unpacked, packed, _number(content, 1, _I32), _number(content, _ENCODING[kind], _I32))


# -- the compact protocol --


def _number(fields: _Fields, number: int, kind: int) -> int:
    """A required field that is a count of this type. Raises ValueError: it is absent, negative or something else.

    A reader of Thrift skips a field of another type, so that such a field must not count here.
    """
    value = fields.get(number)
    limit = 1 << (31 if kind == _I32 else 63)
    if value is None or value.kind != kind or not isinstance(value.content, int) or not 0 <= value.content < limit:
        raise ValueError("a number is absent, or one that no file has")
    return value.content


def _struct(data: bytes, at: int, depth: int) -> tuple[_Fields, int]:
    """(the fields of the struct at byte `at` by their numbers, the position after it).

    Raises IndexError: the data end before the struct; ValueError: it is damaged.
    """
    fields: _Fields = {}
    number = 0
    while (head := data[at]) != 0:
        at += 1
        kind, step = head & 15, head >> 4
        if step:
            number += step
        else:
            number, at = _signed(data, at)
        if number in fields:
            raise ValueError("something is stated twice")
        content: object = None
        if kind not in (_TRUE, _FALSE):  # whose value is their type
            content, at = _value(data, at, kind, depth)
        fields[number] = _Value(kind, content)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[object, int]:
    """(the value of a type at byte `at`, the position after it). Raises IndexError, ValueError as `_struct`."""
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if kind in (_I16, _I32, _I64):
        return _signed(data, at)
    if kind in _SIZES:
        return None, at + _SIZES[kind]
    if kind == _BINARY:
        length, at = _unsigned(data, at)
        return None, at + length
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind in (_LIST, _SET):
        count, element = data[at] >> 4, data[at] & 15
        at += 1
        if count == 15:
            count, at = _unsigned(data, at)
        entries = []
        for _ in range(count):
            data[at]  # each element takes a byte at least
            entry, at = _value(data, at, element, depth + 1)
            entries.append(entry)
        return entries, at
    if kind == _MAP:
        count, at = _unsigned(data, at)
        kinds = data[at] if count else 0
        at += count > 0
        for _ in range(count):
            for part in (kinds >> 4, kinds & 15):
                data[at]
                _, at = _value(data, at, part, depth + 1)
        return None, at
    raise ValueError("a value is of an unknown type")


def _signed(data: bytes, at: int) -> tuple[int, int]:
    """(the zigzag number at byte `at`, the position after it). Raises IndexError, ValueError as `_struct`."""
    value, at = _unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """(the number of seven bits a byte at byte `at`, the position after it). Raises as `_struct`."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number has more than 64 bits")
