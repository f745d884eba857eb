"""Embedding tables side by side: cut to the volumes that all hold, named for the rows, each with its untrained twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from octjepa.embed.table import Embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.errors import UsageError
from octjepa.metrics.findings import BASELINES, Findings

Note = Callable[[str], None]
NamedTables = list[tuple[str, Embeddings]]


def align_tables(embeddings: Sequence[Embeddings], result: Findings) -> list[Embeddings]:
    """All tables cut to the volumes that every one of them holds, in one order, so that rows can be paired.

    Raises UsageError: no common volume, or tables that differ in person, eye or split.
    """
    places = [{volume: place for place, volume in enumerate(table.frame["volume_id"])} for table in embeddings]
    common = sorted(set(places[0]).intersection(*places[1:]))
    if not common:
        raise UsageError(f"the {len(embeddings)} embedding files share no volume, so their rows cannot be compared")
    for table in embeddings:
        if len(table) > len(common):
            result.add_fault(
                "different_labels",
                f"{table.encoder}: {len(table) - len(common)} volumes are not in every table and are left out: rows "
                "are compared on the volumes that all tables hold",
            )
    tables = [table.take(place[volume] for volume in common) for table, place in zip(embeddings, places, strict=True)]
    keys = ["person_id", "eye", "split"]
    for table in tables[1:]:
        differing = int((table.frame[keys] != tables[0].frame[keys]).any(axis=1).sum())
        if differing:
            raise UsageError(
                f"{table.encoder} and {tables[0].encoder} differ in person, eye or split for {differing} of "
                f"{len(common)} volumes; embed both from the same store"
            )
        if table.contract != tables[0].contract:
            result.add_note(
                f"{table.encoder} and {tables[0].encoder} saw differently preprocessed volumes (contracts "
                f"{table.contract[:12]} and {tables[0].contract[:12]}): the comparison holds that difference too"
            )
    return tables


def name_tables(tables: Sequence[Embeddings], note: Note) -> NamedTables:
    """Tables under the names of their rows; a name that is taken gets a number."""
    found: NamedTables = []
    taken = set(BASELINES)
    for table in tables:
        name, number = table.encoder or "encoder", 2
        while name in taken:
            name, number = f"{table.encoder}#{number}", number + 1
        if name != table.encoder:
            note(f"the name {table.encoder!r} is taken: table {len(found) + 1} stands in the rows as {name!r}")
        taken.add(name)
        found.append((name, table))
    return found


def untrained_name(tables: NamedTables, index: int) -> str:
    """Row name of the untrained twin of table `index`: "untrained" where it equals the first table's."""
    name, table = tables[index]
    return "untrained" if np.array_equal(table.untrained, tables[0][1].untrained) else f"untrained:{name}"


def feature_sets(
    tables: NamedTables, pools: Sequence[str]
) -> Iterator[tuple[str, str, Float[np.ndarray, "rows features"]]]:
    """(row name, pool, features) of every encoder and twin, one at a time; last what needs no network and no pool."""
    for name, index, view in _sources(tables):
        for pool in pools:
            yield name, pool, tables[index][1].features(view, pool)
    for view in tables[0][1].unpooled:
        yield view, "none", tables[0][1].features(view, "none")


def token_sets(tables: NamedTables, tokens: Sequence[TokenFolder]) -> Iterator[tuple[str, TokenFolder, str]]:
    """(row name, folder, view) of every encoder and twin.

    Raises UsageError where a folder is not of the encoder in whose place it was given.
    """
    if len(tokens) != len(tables):
        raise UsageError(
            f"the attentive probe reads tokens: {len(tokens)} folder(s) given for {len(tables)} table(s). Embed with "
            "--tokens FOLDER and give --tokens FOLDER here, one for each table in the same order"
        )
    for (name, table), folder in zip(tables, tokens, strict=True):
        if (folder.weights, folder.contract) != (table.weights, table.contract):
            raise UsageError(
                f"the tokens in {folder.folder} are of other weights or another preprocessing than the table of "
                f"{name}: give both from one octjepa embed"
            )
    for name, index, view in _sources(tables):
        yield name, tokens[index], view


def _sources(tables: NamedTables) -> Iterator[tuple[str, int, str]]:
    """(row name, index of the table, its feature view) of every encoder and every twin that differs."""
    seen: set[str] = set()
    for index, (name, _) in enumerate(tables):
        yield name, index, "vector"
        other = untrained_name(tables, index)
        if other not in seen:
            seen.add(other)
            yield other, index, "untrained"
