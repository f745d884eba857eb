"""The entries of a leaderboard: what the user names, opened to its checkpoints, with an embedding table for each.

An entry is `PATH` or `NAME=PATH`: a run (all its checkpoints are candidates), a checkpoint, exported weights, weights
of the package by name, a folder of another project's encoder, or a table that `octjepa embed` wrote. Several entries of
one given name are seeds of one recipe. Tables are computed once: each is stored under the hash of weights, store,
splits and participants, so that another board over the same runs reads it again and a changed split or store never
meets an old table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from octjepa.checkpoint import load_encoder
from octjepa.checkpoint.encoder import EXPORTED, newest_checkpoint
from octjepa.checkpoint.folder import list_checkpoints
from octjepa.checkpoint.location import has_file, location_name, parse_location
from octjepa.checkpoint.pooling import pool_features
from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import add_participants, embed_store
from octjepa.embed.shard import intensity_histogram
from octjepa.embed.table import Embeddings, read_embeddings, write_embeddings
from octjepa.embed.token_folder import INDEX, TokenFolder
from octjepa.errors import UsageError
from octjepa.leaderboard.encoders import is_external, load_external
from octjepa.metrics.findings import BASELINES
from octjepa.progress import bar
from octjepa.shipped import shipped
from octjepa.store import Store
from octjepa.views import geometry

RESERVED = (*BASELINES, "macro")
TABLE = ".parquet"
PATTERNS = ("raster",)  # that external encoders are given; ours name theirs in their recipe
_TABLE_VERSION = 1


@dataclass(frozen=True)
class Candidate:
    """One set of weights to choose among. label: distinguishes it from the entry's other candidates, "" if alone."""

    source: str
    label: str


@dataclass(frozen=True)
class Entry:
    """One training: its row's name, shared by the seeds of a recipe, and its seed, counted from 1."""

    name: str
    seed: int
    candidates: tuple[Candidate, ...]

    @property
    def label(self) -> str:
        """The name, with the seed where there are several."""
        return self.name if self.seed == 1 else f"{self.name} (seed {self.seed})"


@dataclass(frozen=True)
class EmbeddedCandidate:
    """A candidate of an entry with its table, and its tokens where they are needed."""

    entry: Entry
    candidate: Candidate
    table: Embeddings
    external: bool
    tokens: TokenFolder | None = None


def read_entries(texts: Sequence[str]) -> list[Entry]:
    """Entries in the order given.

    Raises UsageError: none, a name that is taken by a baseline, the same path twice; CheckpointError: no checkpoint.
    """
    if not texts:
        raise UsageError("nothing to compare: give at least one run, checkpoint, weights folder or embedding table")
    entries: list[Entry] = []
    paths: set[str] = set()
    for text in texts:
        given, path = _split_name(text)
        if path in paths:
            raise UsageError(f"{path} is given twice: a figure twice is not two trainings")
        paths.add(path)
        name = given or _unused(_default_name(path), [entry.name for entry in entries])
        if name in RESERVED or name.partition(":")[0] in RESERVED:
            raise UsageError(
                f"{text}: the name {name!r} is that of a baseline row; write NAME={path} with another name"
            )
        seed = 1 + sum(entry.name == name for entry in entries)
        entries.append(Entry(name, seed, _candidates(path)))
    return entries


def _split_name(text: str) -> tuple[str, str]:
    """(name or "", path). A path that exists is a path, whatever signs it holds."""
    name, sign, path = text.partition("=")
    if not sign or Path(text).exists() or "/" in name:
        return "", text
    if not name.strip() or not path:
        raise UsageError(f"{text!r} is no entry: expected PATH or NAME=PATH")
    return name.strip(), path


def _default_name(path: str) -> str:
    name = location_name(parse_location(path)) or path
    if name.startswith("step-") and not path.endswith(TABLE):
        # a checkpoint is called after its run, two folders up
        name = f"{path.rstrip('/').split('/')[-3]}-{name}" if path.count("/") >= 2 else name
    return name.removesuffix(TABLE).removesuffix(".safetensors")


def _unused(name: str, taken: list[str]) -> str:
    unused, number = name, 2
    while unused in taken or unused in RESERVED:
        unused, number = f"{name}#{number}", number + 1
    return unused


def _candidates(path: str) -> tuple[Candidate, ...]:
    location = parse_location(path)
    single = (Candidate(path, ""),)
    if path.endswith(TABLE) or shipped(path) is not None or is_external(location):
        return single
    if isinstance(location, Path) and not location.exists():
        raise UsageError(f"nothing at {path}: give a run, a checkpoint, weights, or a table of octjepa embed")
    if (
        (isinstance(location, Path) and location.is_file())
        or path.endswith(".safetensors")
        or has_file(location, EXPORTED)
    ):
        return single
    last = newest_checkpoint(location)
    if last == location:
        return single
    checkpoints = last.rpartition("/")[0] if isinstance(last, str) else last.parent
    return tuple(Candidate(str(folder), location_name(folder)) for folder in list_checkpoints(checkpoints))


def embed_entries(
    entries: Sequence[Entry], store: Store | None, folder: Path, with_tokens: bool = False
) -> list[EmbeddedCandidate]:
    """The tables of all candidates, and their tokens with `with_tokens`; computed ones are stored in `folder`.

    Raises UsageError: an entry needs a store and none was given, tokens of an entry that has none, and what reading and
    embedding raise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    embedded = []
    for entry in entries:
        for candidate in entry.candidates:
            external = is_external(parse_location(candidate.source))
            tokens = None
            if with_tokens and (external or candidate.source.endswith(TABLE)):
                raise UsageError(
                    f"{candidate.source} has no tokens to read: the attentive probe works on boards of runs, "
                    "checkpoints and weights of octjepa alone"
                )
            if candidate.source.endswith(TABLE):
                table = read_embeddings(candidate.source)
            elif store is None:
                raise UsageError(f"{candidate.source} is no table of octjepa embed: name the store with --store")
            elif external:
                table = _embed_external(candidate, store, folder)
            else:
                table, tokens = _embed(candidate, store, folder, with_tokens)
            label = entry.label + (f" {candidate.label}" if candidate.label else "")
            embedded.append(EmbeddedCandidate(entry, candidate, replace(table, encoder=label), external, tokens))
    return embedded


def _embed(
    candidate: Candidate, store: Store, folder: Path, with_tokens: bool
) -> tuple[Embeddings, TokenFolder | None]:
    encoder = load_encoder(candidate.source)
    path = folder / f"{_table_key(encoder.encoder, store)}{TABLE}"
    tokens = path.with_suffix(".tokens") if with_tokens else None
    if not path.is_file() or (tokens is not None and not (tokens / INDEX).is_file()):
        embed_store(candidate.source, store, path, tokens=tokens)
    return read_embeddings(path), None if tokens is None else TokenFolder.open(tokens)


def _embed_external(candidate: Candidate, store: Store, folder: Path) -> Embeddings:
    """Mean, spread and maximum over the tokens of each volume, of the weights and of the same network untrained."""
    device = Runtime("fp32").device
    encoder = load_external(candidate.source).to(device)
    path = folder / f"{_table_key(encoder.network, store)}{TABLE}"
    if path.is_file():
        return read_embeddings(path)
    networks = {"vector": encoder, "untrained": encoder.untrained().to(device)}
    rasters = store.table[store.table["pattern"].isin(PATTERNS)].sort_values("volume_id")
    if rasters.empty:
        raise UsageError(f"store {store.location} holds no {' or '.join(PATTERNS)} volume to embed")
    frame = add_participants(rasters, store.participants)
    blocks: dict[str, list[np.ndarray]] = {"vector": [], "untrained": [], "histogram": []}
    dim, preprocessing = 0, store.preprocessing
    with bar("embed", len(rasters), "volume") as progress:
        for volume_id in rasters["volume_id"]:
            volume = store.read(volume_id)
            view = geometry.apply_transform(
                volume.pixels, geometry.center_crop(preprocessing), preprocessing.image_size
            )
            for name, network in networks.items():
                tokens: np.ndarray = network.tokens(view)  # [tokens, dim]
                dim = tokens.shape[1]
                blocks[name].append(pool_features(tokens, "mean_std_max").astype(np.float32))
            blocks["histogram"].append(intensity_histogram(volume, preprocessing))
            progress.advance()
    for name, values in blocks.items():
        frame[name] = list(np.stack(values))
    write_embeddings(path, frame, dim, encoder.name, science_hash(preprocessing))
    return read_embeddings(path)


def _table_key(network: nn.Module, store: Store) -> str:
    """Hash of the weights and of all of the store that a table holds or depends on."""
    digest = hashlib.sha256(f"{_TABLE_VERSION}{type(network).__name__}{science_hash(store.preprocessing)}".encode())
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(value.detach().cpu().float().numpy()).tobytes())
    columns = ["volume_id", "content_hash", "person_id", "eye", "device", "pattern", "split"]
    digest.update(store.table.sort_values("volume_id")[columns].to_csv(index=False).encode())
    digest.update(store.participants.to_csv(index=False).encode())
    return digest.hexdigest()[:32]
