"""Read one scan that a search found, on a disk or in a bucket."""

from __future__ import annotations

from octjepa.ingest.source_file import SourceFile
from octjepa.read.personal_data import StatedPerson
from octjepa.read.reader import SpacingOption, read_volume
from octjepa.volume import OCTVolume


def read_source(
    source: SourceFile, spacing_mm: SpacingOption = None, people: list[StatedPerson] | None = None
) -> OCTVolume:
    """The volume of `source`. `spacing_mm` (slice, depth, column) takes precedence over the file.

    people: the person that the file states is appended, also if the scan is refused. Raises VolumeRejected: it cannot
    be read. UsageError: the file went away.
    """
    given = None if spacing_mm == "file" else spacing_mm
    with source.local(people) as path:
        return read_volume(
            path, source.row, given, dataset_path=source.dataset_path, member=source.member, people=people
        )
