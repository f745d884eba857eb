"""Every verb that writes, on inputs of seconds, and what must be equal after a disturbance: all files it left."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pandas as pd

from index_entries import index_entry
from octjepa.cohort.split import apply_split
from octjepa.config import to_yaml
from octjepa.files import replace_folder
from octjepa.ingest import build_store
from octjepa.phantom import CohortDesign, write_cohort
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from octjepa.store.storage import chunk_hash, stage_chunk
from planted import QUICK, RECIPE, PlantedStore, write_encoder, write_labels

# What tells when, how long and by how many steps, and not what.
_TIMES = {
    "when",
    "started",
    "seconds",
    "volumes_per_second",
    "data_wait_share",
    "cpu_cores_busy",
    "memory/process_bytes",
    "file_mtime_ns",
    "continued",
    "use",
}
_EYES = 12  # of each split of the small store
_DATES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")


@dataclass(frozen=True)
class Verb:
    """`words(life)` is its command with results below the folder `life`; `again(life)` is added where it was begun."""

    name: str
    words: Callable[[Path], list[object]]
    again: Callable[[Path], list[object]] = lambda life: []

    def command(self, life: Path) -> list[object]:
        """The command to begin with, or to continue."""
        return [*self.words(life), *self.again(life), "--quiet"]


@dataclass(frozen=True)
class Inputs:
    """What the verbs read, made once in `root`."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Inputs:
        """Files to ingest and to expand, two stores with labels, encoders."""
        write_cohort(root / "eyes", 3, 1, ("topcon_maestro2", "zeiss_cirrus"), design=CohortDesign(broken=2))
        with ZipFile(root / "eyes.zip", "w") as archive:
            for path in sorted((root / "eyes").rglob("*.dcm")):
                archive.write(path, path.relative_to(root / "eyes"))
        (root / "recipe.yaml").write_text(to_yaml(RECIPE), encoding="utf-8")
        _planted_store(root / "store")
        write_labels(root / "labels.tsv")
        write_encoder(root / "encoder.safetensors")
        write_cohort(root / "phantom", 5, 5, ("topcon_maestro2", "zeiss_cirrus"), split_shares=(0.4, 0.2, 0.4))
        build_store([root / "phantom"], root / "layers", RECIPE.preprocessing, workers=1)
        apply_split(Store.open(root / "layers"), "recommended", 0)
        one_eye = next((root / "phantom").rglob("*.dcm"))  # the report of a small store takes seconds for every eye
        build_store([one_eye], root / "few", RECIPE.preprocessing, workers=1)
        return cls(root)

    def verbs(self) -> dict[str, Verb]:
        """By name, with two workers where there are workers."""
        root = self.root
        labels = ("--labels", root / "labels.tsv", "--target", "mark", "--store", root / "store")
        encoder = root / "encoder.safetensors"
        verbs = [
            Verb(
                "ingest",
                lambda life: [
                    "ingest",
                    root / "eyes",
                    "--recipe",
                    root / "recipe.yaml",
                    "--workers",
                    2,
                    "--max-lost",
                    1,
                    "--store",
                    life / "store",
                ],
            ),
            Verb(
                "embed",
                lambda life: [
                    "embed",
                    encoder,
                    "--store",
                    root / "store",
                    "--out",
                    life / "table.parquet",
                    "--tokens",
                    life / "tokens",
                    "--per-bscan",
                ],
            ),
            Verb(
                "finetune",
                lambda life: [
                    "finetune",
                    "finetune",
                    *QUICK,
                    "stages.head=2",
                    "stages.last=2",
                    "stages.all=4",
                    "validate_every=4",
                    "save_every=4",
                    "resamples=20",
                    "--from",
                    encoder,
                    *labels,
                    "--ledger",
                    life / "looks",
                    "--out",
                    life / "tuned",
                ],
                lambda life: ["--resume"] if (life / "tuned" / "run.json").is_file() else [],
            ),
            Verb(
                "segment",
                lambda life: [
                    "segment",
                    "segment_linear",
                    "resamples=20",
                    "--from",
                    encoder,
                    "--store",
                    root / "layers",
                    "--labels",
                    root / "phantom" / "truth",
                    "--ledger",
                    life / "looks",
                    "--out",
                    life / "head",
                ],
            ),
            Verb("expand", lambda life: ["expand", root / "eyes.zip", life / "tree"]),
            Verb(
                "leaderboard",
                lambda life: ["leaderboard", encoder, *labels, "--ledger", life / "looks", "--out", life / "board"],
            ),
            Verb("export", lambda life: ["export", encoder, "--format", "safetensors", "--out", life / "weights"]),
            Verb(
                "report", lambda life: ["report", root / "few", "--out", life / "page.html", "--card", life / "card.md"]
            ),
        ]
        return {verb.name: verb for verb in verbs}

    def predict(self) -> Verb:
        """`predict` on scans, with the network that the verb `finetune` leaves if its life is `root`."""
        root = self.root
        return Verb(
            "predict",
            lambda life: [
                "predict",
                root / "tuned",
                root / "eyes",
                "--max-lost",
                1,
                "--workers",
                2,
                "--out",
                life / "predicted",
            ],
        )


def _planted_store(path: Path) -> None:
    planted = PlantedStore()
    store = Store.create(path, RECIPE.preprocessing)
    splits = dict(zip(planted.table["person_id"], planted.table["split"], strict=True))
    table = planted.table.groupby("split").head(_EYES)  # what is written matters here, not what is learned
    with store.writing():
        for number, row in enumerate(table.to_dict("records")):
            volume = planted.read(row["volume_id"])
            folder = store.chunk_folder(volume.volume_id)
            replace_folder(stage_chunk(folder, replace(volume)), folder)
            store.add(
                IndexEntry(
                    **index_entry(
                        number,
                        volume_id=volume.volume_id,
                        person_id=row["person_id"],
                        eye=row["eye"],
                        split=splits[row["person_id"]],
                        tissue_mean=volume.tissue_mean,
                        tissue_std=volume.tissue_std,
                        chunk_hash=chunk_hash({name: folder / name for name in ("pixels.npy", "geometry.npz")}),
                    )
                )
            )
        store.consolidate()


def state(life: Path) -> dict[str, str]:
    """{path below `life`: hash of its content without times}; the content of tables and JSON is compared, not bytes."""
    return {str(path.relative_to(life)): _content(path) for path in sorted(life.rglob("*")) if path.is_file()}


def differences(life: Path, whole: Path) -> list[str]:
    """Files that differ, that are missing, or that are left over from a disturbance."""
    ours, theirs = state(life), state(whole)
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def left_over(life: Path) -> list[str]:
    """Hidden files and folders: nothing that a verb means to leave is hidden."""
    return [str(path.relative_to(life)) for path in life.rglob(".*")]


def _content(path: Path) -> str:
    if path.suffix == ".parquet":
        table = pd.read_parquet(path)
        table = table.drop(columns=[name for name in table if name in _TIMES])
        order = [name for name in ("volume_id", "person_id", "slice") if name in table]
        data = "\n".join(map(str, table.sort_values(order).to_dict("list").items() if order else [table.to_csv()]))
        data = data.encode()
    elif path.suffix in (".json", ".jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        values = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else [json.loads("\n".join(lines))]
        data = "\n".join(sorted(json.dumps(_without_times(value), sort_keys=True) for value in values)).encode()
    elif path.suffix in (".html", ".md"):
        data = _DATES.sub("", path.read_text(encoding="utf-8")).encode()
    else:
        data = path.read_bytes()
    return hashlib.sha256(data).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in _TIMES}
    return (
        [_without_times(item) for item in value]
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )


def import_all() -> None:
    """Imports what the verbs import, so that lives which are forked from here begin at once."""
    for name in (
        "cli",
        "encoders.export",
        "embed.embedding",
        "ingest.archive",
        "evaluate.leaderboard.board",
        "evaluate.probe",
        "report",
        "report.leaderboard",
        "tasks.finetune.fit",
        "tasks.segment.fit",
    ):
        import_module(f"octjepa.{name}")
    for name in ("matplotlib.figure", "monai.metrics", "sklearn.linear_model", "pyarrow.parquet", "rich.progress"):
        import_module(name)
