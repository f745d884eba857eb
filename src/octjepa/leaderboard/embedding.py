"""Every candidate's features of the store, computed once: tables of our own encoders and of others, kept by content.

A table is kept in a folder under the hash of weights, store, splits and participants, so that another board over the
same runs reads it again and a changed split or store never meets an old table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from octjepa.checkpoint import load_encoder
from octjepa.checkpoint.encoder import pooled
from octjepa.checkpoint.location import place_of
from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import add_participants, embed_store
from octjepa.embed.shard import intensity_histogram
from octjepa.embed.table import Embeddings, read_embeddings, write_embeddings
from octjepa.embed.token_folder import INDEX, TokenFolder
from octjepa.errors import UsageError
from octjepa.leaderboard.adapters import Adapter, is_foreign, load_adapter
from octjepa.leaderboard.entries import TABLE, Candidate, Entry
from octjepa.progress import bar
from octjepa.store import Store
from octjepa.views import geometry

PATTERNS = ("raster",)  # what encoders of others are shown; ours say it in their recipe
_VERSION = 1  # of what a kept table holds


@dataclass(frozen=True)
class Featured:
    """A candidate of an entry with its table."""

    entry: Entry
    candidate: Candidate
    table: Embeddings
    foreign: bool
    tokens: TokenFolder | None = None


def featured(entries: list[Entry], store: Store | None, folder: Path, with_tokens: bool = False) -> list[Featured]:
    """The tables of all candidates, and their tokens where these are asked for; computed ones go to `folder`.

    Raises UsageError: an entry needs a store and none was given, tokens of an entry that keeps none, and what reading
    and embedding raise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for entry in entries:
        for candidate in entry.candidates:
            foreign = is_foreign(place_of(candidate.source))
            tokens = None
            if with_tokens and (foreign or candidate.source.endswith(TABLE)):
                raise UsageError(
                    f"{candidate.source} has no tokens to read: the attentive probe stands on boards of runs, "
                    "checkpoints and weights of octjepa alone"
                )
            if candidate.source.endswith(TABLE):
                table = read_embeddings(candidate.source)
            elif store is None:
                raise UsageError(f"{candidate.source} is no table of octjepa embed: name the store with --store")
            elif foreign:
                table = _of_others(candidate, store, folder)
            else:
                table, tokens = _of_ours(candidate, store, folder, with_tokens)
            label = entry.name + (f" {candidate.label}" if candidate.label else "")
            found.append(Featured(entry, candidate, replace(table, encoder=label), foreign, tokens))
    return found


def _of_ours(
    candidate: Candidate, store: Store, folder: Path, with_tokens: bool
) -> tuple[Embeddings, TokenFolder | None]:
    encoder = load_encoder(candidate.source)
    kept = folder / f"{_key(encoder.encoder, store)}{TABLE}"
    tokens = kept.with_suffix(".tokens") if with_tokens else None
    if not kept.is_file() or (tokens is not None and not (tokens / INDEX).is_file()):
        embed_store(candidate.source, store, kept, tokens=tokens)
    return read_embeddings(kept), None if tokens is None else TokenFolder.open(tokens)


def _of_others(candidate: Candidate, store: Store, folder: Path) -> Embeddings:
    """Mean, spread and maximum over the tokens of each volume, of the weights and of the same network untrained."""
    device = Runtime("fp32").device
    encoder = load_adapter(candidate.source).to(device)
    kept = folder / f"{_key(encoder.network, store)}{TABLE}"
    if kept.is_file():
        return read_embeddings(kept)
    untrained = encoder.untrained().to(device)
    rows = store.table[store.table["pattern"].isin(PATTERNS)].sort_values("volume_id")
    if rows.empty:
        raise UsageError(f"store {store.location} holds no {' or '.join(PATTERNS)} volume to embed")
    frame = add_participants(rows, store.participants)
    blocks: dict[str, list[np.ndarray]] = {"vector": [], "untrained": [], "histogram": []}
    width = 0
    with bar("embed", len(rows), "volume") as progress:
        for volume_id in rows["volume_id"]:
            volume = store.read(volume_id)
            view = geometry.apply_geometry(
                volume.pixels, geometry.center_crop(store.preprocessing), store.preprocessing.image_size
            )
            for name, network in (("vector", encoder), ("untrained", untrained)):
                tokens = _tokens(network, view)
                width = tokens.shape[1]
                blocks[name].append(pooled(tokens, "mean_std_max").astype(np.float32))
            blocks["histogram"].append(intensity_histogram(volume, store.preprocessing))
            progress.advance()
    for name, values in blocks.items():
        frame[name] = list(np.stack(values))
    write_embeddings(kept, frame, width, encoder.name, science_hash(store.preprocessing))
    return read_embeddings(kept)


def _tokens(encoder: Adapter, view: np.ndarray) -> np.ndarray:
    tokens: np.ndarray = encoder.tokens(view)
    return tokens


def _key(network: nn.Module, store: Store) -> str:
    """Hash of the weights and of all of the store that a table holds or depends on."""
    digest = hashlib.sha256(f"{_VERSION}{type(network).__name__}{science_hash(store.preprocessing)}".encode())
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(value.detach().cpu().float().numpy()).tobytes())
    columns = ["volume_id", "content_hash", "person_id", "eye", "device", "pattern", "split"]
    digest.update(store.table.sort_values("volume_id")[columns].to_csv(index=False).encode())
    digest.update(store.participants.to_csv(index=False).encode())
    return digest.hexdigest()[:32]
