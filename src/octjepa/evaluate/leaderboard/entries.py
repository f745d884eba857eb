"""The entries of a leaderboard: what the user names, opened to its checkpoints, with an embedding table for each.

An entry is `PATH` or `NAME=PATH`: a run (all its checkpoints are candidates), a checkpoint, exported weights, weights
of the package by name, another project's encoder (a folder or `NAME:PATH`), or a table that `octjepa embed` wrote.
Several entries of one stated name are seeds of one recipe. A name that comes from a path gets a number if another
entry has this name. Tables are computed once: each is stored under the hash of weights, store, splits and participants,
so that another board over the same runs reads it again and a changed split or store never meets an old table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octjepa.checkpoint.folder import list_checkpoints
from octjepa.checkpoint.location import has_file, location_name, parse_location
from octjepa.checkpoint.weights import EXPORTED, newest_checkpoint
from octjepa.config import science_hash
from octjepa.embed.embedding import embed_store
from octjepa.embed.parts import discard_leftovers
from octjepa.embed.table import Embeddings, check_split, read_embeddings
from octjepa.embed.token_folder import INDEX, TokenFolder
from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.external import is_external
from octjepa.encoders.external.base import ENCODERS, split_address
from octjepa.encoders.locate import open_encoder
from octjepa.errors import UsageError
from octjepa.metrics.findings import BASELINES
from octjepa.shipped import is_segmenter, shipped
from octjepa.store import Store

RESERVED = (*BASELINES, "macro")
TABLE = ".parquet"
_TABLE_VERSION = 4


@dataclass(frozen=True)
class Candidate:
    """One set of weights to choose among. label: distinguishes it from the entry's other candidates, "" if it is the
    only candidate."""

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
        """The name, with the seed if there are several."""
        return self.name if self.seed == 1 else f"{self.name} (seed {self.seed})"


@dataclass(frozen=True)
class EmbeddedCandidate:
    """A candidate of an entry with its table, and its tokens if they are needed.

    about: what is known of another project's encoder (source, licence, checksum); None for ours and for tables.
    """

    entry: Entry
    candidate: Candidate
    table: Embeddings
    about: Mapping[str, str] | None
    tokens: TokenFolder | None = None


def read_entries(texts: Sequence[str]) -> list[Entry]:
    """Entries in the order given.

    Raises UsageError (none, a name that is taken by a baseline, the same path twice) and CheckpointError (no
    checkpoint).
    """
    if not texts:
        raise UsageError("nothing to compare: give at least one run, checkpoint, weights folder or embedding table")
    entries: list[Entry] = []
    paths: set[str] = set()
    stated_names = [_split_name(text)[0] for text in texts]
    for text in texts:
        stated_name, path = _split_name(text)
        location = str(Path(path).resolve()) if Path(path).exists() else path
        if location in paths:
            raise UsageError(f"{path} is given twice: one training cannot count as two")
        paths.add(location)
        name = stated_name or _unused(_default_name(path), [*stated_names, *(entry.name for entry in entries)])
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
    if not sign or Path(text).exists() or "/" in name or "#" in name:
        return "", text
    if not name.strip() or not path:
        raise UsageError(f"{text!r} is not an entry: expected PATH or NAME=PATH")
    return name.strip(), path


def _default_name(path: str) -> str:
    address = split_address(path)
    if address is not None:
        return address[0]
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
    single = (Candidate(path, ""),)
    if path.endswith(TABLE) or shipped(path) is not None or is_segmenter(path) or is_external(path):
        return single
    location = parse_location(path)
    if isinstance(location, Path) and not location.exists():
        raise UsageError(
            f"nothing at {path}: give a run, a checkpoint, weights, a table of octjepa embed, or NAME:PATH of another "
            f"encoder ({', '.join(ENCODERS.names())})"
        )
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
    """The tables of all candidates, and their tokens with `with_tokens`; computed embeddings are stored in `folder`.

    Raises UsageError: an entry needs a store and none was given, tokens of an entry that has none, two seeds of a name
    with the same weights, and what reading and embedding raise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    embedded: list[EmbeddedCandidate] = []
    for entry in entries:
        for candidate in entry.candidates:
            about, tokens = None, None
            if with_tokens and candidate.source.endswith(TABLE):
                raise UsageError(
                    f"{candidate.source} has no tokens to read: the attentive probe works on boards of runs, "
                    "checkpoints, weights and encoders of others"
                )
            if candidate.source.endswith(TABLE):
                table = read_embeddings(candidate.source)
                check_split(candidate.source, table)
            elif store is None:
                raise UsageError(f"{candidate.source} is not a table of octjepa embed: name the store with --store")
            else:
                table, tokens, about = _embed(candidate, store, folder, with_tokens)
            label = entry.label + (f" {candidate.label}" if candidate.label else "")
            for other in embedded:
                if (
                    other.entry.name == entry.name
                    and other.entry != entry
                    and table.weights == other.table.weights != ""
                ):
                    raise UsageError(
                        f"{other.candidate.source} and {candidate.source} of {entry.name} have the same weights: one "
                        "training cannot count as two"
                    )
            embedded.append(EmbeddedCandidate(entry, candidate, replace(table, encoder=label), about, tokens))
    return embedded


def _embed(
    candidate: Candidate, store: Store, folder: Path, with_tokens: bool
) -> tuple[Embeddings, TokenFolder | None, Mapping[str, str] | None]:
    """The table of the weights and of the same network untrained, computed if it is not stored yet; `origin`."""
    encoder = open_encoder(candidate.source, store.preprocessing)
    path = folder / f"{_table_key(encoder, store)}{TABLE}"
    tokens = path.with_suffix(".tokens") if with_tokens else None
    if not path.is_file() or (tokens is not None and not (tokens / INDEX).is_file()):
        embed_store(encoder, store, path, tokens=tokens)
    discard_leftovers(path, tokens)
    return read_embeddings(path), None if tokens is None else TokenFolder.open(tokens), encoder.origin


def _table_key(encoder: FrozenEncoder, store: Store) -> str:
    """Hash of the weights and of all of the store that a table holds or depends on."""
    digest = hashlib.sha256(f"{_TABLE_VERSION}{encoder.weights_hash()}{science_hash(store.preprocessing)}".encode())
    identity = ["volume_id", "content_hash", "chunk_hash", "person_id"]
    columns = [*identity, "eye", "visit", "device", "pattern", "quality", "split"]
    digest.update(store.table.sort_values("volume_id")[columns].to_csv(index=False).encode())
    digest.update(store.participants.to_csv(index=False).encode())
    return digest.hexdigest()[:32]
