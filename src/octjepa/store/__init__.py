"""Canonical volumes on disk or in a bucket, with an index, a quarantine list and a split by person.

Input: `OCTVolume`s of `octjepa.ingest`. Output: memory-mapped uint8 volumes of one fixed size with a tissue band. A
store is made with one preprocessing contract and refuses another (ContractError); a file that cannot be canonicalised
gets an entry in the quarantine list.
"""

from octjepa.store.build import build_store
from octjepa.store.canonical import CanonicalVolume, canonicalise
from octjepa.store.folder import Store

__all__ = ["CanonicalVolume", "Store", "build_store", "canonicalise"]
