"""Files to `OCTVolume`s: pixels, spacing with provenance, laterality, device, pattern, ids, hash.

In come DICOM files, folders of them, or an AI-READI-shaped manifest; out come volumes in native geometry.
What cannot be read correctly raises `VolumeRejected` with a code of the closed list in `reasons`.
"""

from octjepa.ingest.one_frame import read_one_frame
from octjepa.ingest.reader import describe_file, read_volume
from octjepa.ingest.reasons import REASONS
from octjepa.ingest.sources import Discovery, SourceFile, discover

__all__ = ["REASONS", "Discovery", "SourceFile", "describe_file", "discover", "read_one_frame", "read_volume"]
