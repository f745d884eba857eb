"""The `octjepa ingest` job: it finds scans, reads them in worker processes or on Ray, and writes a store.

Input: files, folders, globs, manifests or buckets. Output: a `Store` and its quarantine list. The package also expands
ZIP archives and audits a source before anything is read.
"""

from octjepa.ingest.build import IngestOptions, build_store
from octjepa.ingest.source_file import Discovery, SourceFile
from octjepa.ingest.sources import discover

__all__ = ["Discovery", "IngestOptions", "SourceFile", "build_store", "discover"]
