"""Canonical volumes on disk, with an index, a ledger of what was refused, and a split by person.

In come `OCTVolume`s of `octjepa.ingest`; out come memory-mapped uint8 volumes of one fixed size with a tissue
band. A store is made with one preprocessing contract and refuses another (ContractError); a file that cannot be made
canonical becomes a row of the ledger.
"""

from octjepa.store.build import build_store
from octjepa.store.canonical import CanonicalVolume, canonicalise
from octjepa.store.folder import Store

__all__ = ["CanonicalVolume", "Store", "build_store", "canonicalise"]
