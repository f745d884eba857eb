"""Canonical volumes on disk or in a bucket, with an index, a quarantine list and a split by person.

A store is made with one preprocessing contract and refuses another (ContractError). `octjepa.ingest` writes it.
"""

from octjepa.store.folder import Store

__all__ = ["Store"]
