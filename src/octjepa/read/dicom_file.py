"""Opens DICOM files from outside: the only place where pydicom parses a file that octjepa did not write.

In: a path. Out: a `DicomStream`, from which the header and the pixel data are read as pydicom datasets.

A file may be built to exhaust memory. Two of pydicom's habits allow that: it allocates as many bytes as an element
announces, and it inflates a deflated data set as a whole. Both are done here with limits instead, and pydicom's
`dcmread` and `read_partial` are not called. A second parser that only looks for the transfer syntax could be deceived,
so the file meta information is parsed once, and the same result decides how the data set is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, BytesIO, FileIO
from os import fstat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from octjepa.read.memory_budget import RAW, inflate
from octjepa.reasons import error_origin, rejection

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_T = TypeVar("_T")
_MAGIC_AT = 128
_MAX_INFLATED_HEADER = 64 << 20  # bytes of it that are unpacked when only the header is wanted
_META_BYTES = 1 << 20  # of the file meta information; longer file meta information is refused
_ENCODINGS = {  # transfer syntaxes that are not explicit VR, little endian: (implicit, little endian)
    "1.2.840.10008.1.2": (True, True),
    "1.2.840.10008.1.2.2": (False, False),
}
_DEFLATED = ("1.2.840.10008.1.2.1.99", "1.2.840.10008.1.2.4.95")  # the second names JPIP Referenced Deflate
PIXEL_GROUP = 0x7FE00001


class BoundedReader(BufferedReader):
    """A file whose `read` allocates no more bytes than are left: a broken element may announce 4 GiB."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > 1 << 20:
            size = min(size, max(0, fstat(self.fileno()).st_size - self.tell()))
        return super().read(size)


class DicomStream:
    """The data set of an open file: `read` continues from the position where the last `read` stopped.

    `meta` is the file meta information, `syntax` its transfer syntax UID, "" if it is absent.
    """

    def __init__(self, file: BinaryIO, header_only: bool) -> None:
        from pydicom.dataset import FileMetaDataset
        from pydicom.filereader import read_dataset

        file.seek(_MAGIC_AT + 4)
        meta = _parsed(lambda: read_dataset(file, False, True, stop_when=lambda tag, *_: tag >> 16 != 2))
        if file.tell() > _META_BYTES:
            raise rejection("broken_header", f"its file meta information is longer than {_META_BYTES >> 20} MiB")
        self.meta = _parsed(lambda: FileMetaDataset(meta))
        self.syntax = _parsed(lambda: str(self.meta.get("TransferSyntaxUID") or "")).strip(" \0")
        if self.syntax in _DEFLATED:
            most = _MAX_INFLATED_HEADER if header_only else None
            file = BytesIO(inflate(file.read(), "the deflated data set", RAW, most))
        self._file = file
        self._implicit, self._little = _ENCODINGS.get(self.syntax, (False, True))
        if not self.syntax:
            self._little = not _looks_big_endian(file)

    def read(self, stop_when: Callable[[int], bool] | None = None, keywords: Sequence[str] | None = None) -> Dataset:
        """The elements up to the first tag for which `stop_when` is true, or only those called `keywords`.

        Raises VolumeRejected: unreadable_file, broken_header.
        """
        from pydicom.filereader import read_dataset
        from pydicom.tag import Tag

        tags = None if keywords is None else [Tag(name) for name in keywords]
        stop = None if stop_when is None else lambda tag, *_: stop_when(int(tag))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values out of standard, which are checked one by one
            parsed = _parsed(
                lambda: read_dataset(self._file, self._implicit, self._little, stop_when=stop, specific_tags=tags)
            )
        parsed.file_meta = self.meta
        return parsed


def _parsed(parse: Callable[[], _T]) -> _T:
    """The result of `parse`; its errors are translated. Raises VolumeRejected: unreadable_file, broken_header."""
    try:
        return parse()
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # pydicom raises what the broken element made of its parser
        raise rejection("broken_header", error_origin(error)) from None


def _looks_big_endian(file: BinaryIO) -> bool:
    """Whether the first group number is one only if its bytes are swapped; the position does not change."""
    start = file.tell()
    group = int.from_bytes(file.read(2), "little")
    file.seek(start)
    return group >= 0x0400


@contextmanager
def open_dicom(path: Path, header_only: bool = False) -> Iterator[DicomStream]:
    """A file with the mark of DICOM, opened with limits; `header_only` unpacks only the begin of a deflated file.

    Raises VolumeRejected: unreadable_file, not_dicom, broken_header, truncated, size_implausible.
    """
    try:
        with BoundedReader(FileIO(str(path))) as file:
            if file.read(_MAGIC_AT + 4)[_MAGIC_AT:] != b"DICM":
                raise rejection("not_dicom", f"no DICM mark at byte {_MAGIC_AT}")
            yield DicomStream(file, header_only)
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None


def read_header(path: Path, keywords: Sequence[str] | None = None, last_tag: int = PIXEL_GROUP - 1) -> Dataset:
    """The elements up to `last_tag` that precede the pixel data, or those of them called `keywords`.

    Raises VolumeRejected: unreadable_file, not_dicom, broken_header, truncated.
    """
    with open_dicom(path, header_only=True) as stream:
        return stream.read(lambda tag: tag > last_tag, keywords)
