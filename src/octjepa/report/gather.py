"""Reads what a folder holds into one frozen object. Nothing is computed here, and nothing is made up.

A part that is absent or cannot be read becomes a `Missing` with the reason and what would supply it; the page says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octjepa.errors import OctjepaError, UsageError
from octjepa.files import read_json_object
from octjepa.recipe import Recipe
from octjepa.remote import is_remote

if TYPE_CHECKING:
    from octjepa.store import Store

Kind = Literal["run", "tuning", "segmentation", "store", "demo"]
Part = TypeVar("Part")
_ANEW = "restore it from a copy, or make it anew"
DEMO_PARTS = ("store", "run", "phantom", "embeddings.parquet", "probe.json")


@dataclass(frozen=True)
class Missing:
    """A part that the page cannot show: which, why, and the command that would supply it."""

    part: str
    why: str
    supply: str


@dataclass(frozen=True)
class RunContents:
    """A run folder: `about` is run.json, `updates`, `validations` and `monitored` the kinds of metrics lines."""

    path: Path
    recipe: Recipe
    recipe_text: str
    about: dict[str, Any]
    updates: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    monitored: list[dict[str, Any]]
    summary: dict[str, Any] | None


@dataclass(frozen=True)
class TuningContents:
    """The folder of a fine-tuning: `updates` and `looks` are the kinds of metrics lines; None while it is not finished.

    paired: the tuned encoder minus each of what stands beside it. choices: of the weights, and of every frozen probe.
    """

    path: Path
    about: dict[str, Any]
    recipe_text: str
    updates: list[dict[str, Any]]
    looks: list[dict[str, Any]]
    paired: list[dict[str, Any]]
    choices: list[dict[str, Any]]
    targets: list[dict[str, Any]]
    checkpoint: str | None


@dataclass(frozen=True)
class SegmentationContents:
    """The folder of a segmentation head. about: what its manifest says; results: empty where they cannot be read."""

    path: Path
    about: dict[str, Any]
    recipe_text: str
    results: dict[str, Any]
    checkpoint: str


@dataclass(frozen=True)
class ProbeContents:
    """Rows {name, target, probe, pool, metric, value, low, high, n}; paired difference, faults, notes where there are.

    `paired` is the comparison named before the test figures were seen, `comparisons` the same of every other row.
    """

    rows: list[dict[str, Any]]
    paired: dict[str, Any] | None
    comparisons: list[dict[str, Any]]
    faults: list[dict[str, str]]
    notes: list[str]


@dataclass(frozen=True)
class EmbeddingContents:
    """How much of the store was embedded; the vectors themselves stay in their file.

    leaked: people of val and test whom the encoder was pretrained on; two_sides: people in more than one split.
    """

    volumes: int
    people: int
    dim: int
    encoder: str
    by_split: dict[str, int]
    leaked: int
    two_sides: int


@dataclass(frozen=True)
class Contents:
    """Everything the page is made of; None where a part is missing."""

    root: Path
    kind: Kind
    store: Store | None
    run: RunContents | None
    probe: ProbeContents | None
    embeddings: EmbeddingContents | None
    phantom: bool
    demo_seconds: float | None
    missing: tuple[Missing, ...]
    tuning: TuningContents | None = None
    segmentation: SegmentationContents | None = None

    @property
    def made(self) -> RunContents | TuningContents | SegmentationContents | None:
        """What was trained."""
        return self.run or self.tuning or self.segmentation


def gather(source: str | Path) -> Contents:
    """What `source` holds.

    Raises UsageError when it is no run, fine-tuning, segmentation, store or demo folder, OctjepaError when its own head
    is damaged.
    """
    if is_remote(source):
        return _gather_remote(str(source))
    root = Path(source).resolve()
    kind = kind_of(root, Path(source))
    missing: list[Missing] = []
    run: RunContents | None = None
    tuning: TuningContents | None = None
    segmentation: SegmentationContents | None = None
    if kind == "run":
        run = read_run(root)
    elif kind == "tuning":
        tuning = read_tuning(root)
    elif kind == "segmentation":
        segmentation = read_segmentation(root)
    elif kind == "demo":
        run = _try(missing, "the run", root / "run", read_run, "octjepa pretrain")
    store_path = _store_path(root, kind, run or tuning or segmentation)
    store: Store | None = None
    if kind == "store":
        store = _open_store(root)
    elif store_path is None:
        named_by = "results.json" if kind == "segmentation" else "run.json"
        missing.append(Missing("the store", f"{named_by} names none", "octjepa ingest"))
    elif isinstance(store_path, str):
        try:
            store = _open_store(store_path)
        except OctjepaError as error:
            missing.append(Missing("the store", str(error), "octjepa ingest"))
    else:
        store = _try(missing, "the store", store_path, _open_store, "octjepa ingest")
    probe: ProbeContents | None = None
    embeddings: EmbeddingContents | None = None
    if kind == "store":
        missing.append(Missing("masks, training, token maps and probe", "this is a store", "octjepa pretrain"))
    elif kind == "tuning":
        probe = _try(missing, "the probe", root / "results.json", _read_probe, "octjepa finetune --resume")
    elif kind == "segmentation":
        probe = _try(missing, "the probe", root / "results.json", _read_probe, "octjepa segment into a new --out")
    else:
        embeddings = _try(missing, "the embeddings", root / "embeddings.parquet", _read_embeddings, "octjepa embed")
        probe = _try(missing, "the probe", root / "probe.json", _read_probe, "octjepa probe")
    phantom = kind == "demo" and (root / "phantom").is_dir()
    demo = root / "demo.json"
    seconds = read_json_object(demo, _ANEW).get("seconds") if kind == "demo" and demo.is_file() else None
    return Contents(root, kind, store, run, probe, embeddings, phantom, seconds, tuple(missing), tuning, segmentation)


def _gather_remote(url: str) -> Contents:
    """A store in a bucket; runs are kept on disks."""
    missing = Missing("masks, training, token maps and probe", "this is a store", "octjepa pretrain")
    return Contents(Path(url.partition("://")[2]), "store", _open_store(url), None, None, None, False, None, (missing,))


def kind_of(root: Path, shown: Path) -> Kind:
    if not root.is_dir():
        raise UsageError(f"no folder {shown}: give a run, a fine-tuning, a segmentation, a store or a demo folder")
    if (root / "run.json").is_file():
        return "run" if "kind" not in read_json_object(root / "run.json", _ANEW) else "tuning"
    if (root / "store.json").is_file():
        return "store"
    if any((root / name).exists() for name in DEMO_PARTS):
        return "demo"
    if (root / "head").is_dir():
        return "segmentation"
    raise UsageError(
        f"{shown} is no run or fine-tuning (run.json), no segmentation (head), no store (store.json) and no demo "
        f"folder ({', '.join(DEMO_PARTS)}): there is nothing to report on"
    )


def read_run(path: Path) -> RunContents:
    """A run folder. Raises OctjepaError when run.json or recipe.yaml is absent or damaged."""
    from octjepa.config import load_recipe

    about = read_json_object(path / "run.json", _ANEW)
    recipe = load_recipe(path / "recipe.yaml")
    text = (path / "recipe.yaml").read_text(encoding="utf-8")
    lines = _journal(path)
    summary = path / "summary.json"
    return RunContents(
        path,
        recipe,
        text,
        about,
        [line for line in lines if "train/loss" in line],
        [line for line in lines if "val/loss" in line],
        [line for line in lines if "monitor/lidar" in line],
        read_json_object(summary, _ANEW) if summary.is_file() else None,
    )


def read_tuning(path: Path) -> TuningContents:
    """The folder of a fine-tuning. Raises OctjepaError when run.json or recipe.yaml is absent or damaged."""
    about = read_json_object(path / "run.json", _ANEW)
    try:
        text = (path / "recipe.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path / 'recipe.yaml'} cannot be read: {error}") from None
    lines, results = _journal(path), _results(path)
    return TuningContents(
        path,
        about,
        text,
        [line for line in lines if "loss" in line],
        [line for line in lines if line.get("val_loss") is not None],
        results.get("paired") or [],
        results.get("choices") or [],
        results.get("targets") or [],
        results.get("checkpoint"),
    )


def read_segmentation(path: Path) -> SegmentationContents:
    """The folder of a segmentation head. Raises UsageError (no head in it), OctjepaError (its manifest is damaged)."""
    from octjepa.checkpoint.folder import read_manifest
    from octjepa.config import to_yaml
    from octjepa.tasks.segment.folder import find_head
    from octjepa.tasks.segment.recipe import RECIPES

    folder = find_head(path)
    if folder is None:
        raise UsageError(f"{path / 'head'} holds no segmentation head: give the folder that octjepa segment wrote")
    manifest = read_manifest(folder)
    settings = RECIPES.read(manifest["settings"], f"of {folder}")
    results = _results(path)
    about = {
        "name": settings.name, "head": settings.head, "classes": manifest["classes"],
        "encoder": manifest["encoder_recipe"]["name"], "store": results.get("store"),
        **{key: manifest["contract"][key] for key in ("contract_hash", "weights")},
    }  # fmt: skip
    return SegmentationContents(path, about, to_yaml(settings), results, str(folder))


def _results(path: Path) -> dict[str, Any]:
    """results.json; empty where it is absent or damaged, which the probe's section says."""
    try:
        return read_json_object(path / "results.json", _ANEW)
    except OctjepaError:
        return {}


def _journal(path: Path) -> list[dict[str, Any]]:
    from octjepa.files import read_json_lines

    journal = path / "metrics.jsonl"
    return read_json_lines(journal) if journal.is_file() else []


def _store_path(
    root: Path, kind: Kind, run: RunContents | TuningContents | SegmentationContents | None
) -> Path | str | None:
    if kind == "demo" and (root / "store").exists():
        return root / "store"
    if run is not None and run.about.get("store"):
        named = str(run.about["store"])
        return named if is_remote(named) else (run.path / named).resolve()
    return root / "store" if kind == "demo" else None


def _open_store(path: Path | str) -> Store:
    from octjepa.store import Store

    return Store.open(path)


def _read_probe(path: Path) -> ProbeContents:
    data = read_json_object(path, _ANEW)
    rows = data.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise UsageError(f"{path} holds no list of named rows under 'rows': write it with octjepa probe")
    compared, faults, notes = (data.get(name) or [] for name in ("comparisons", "faults", "notes"))
    paired = data.get("paired") or None
    return ProbeContents(rows, paired if isinstance(paired, dict) else None, compared, faults, notes)


def _read_embeddings(path: Path) -> EmbeddingContents:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["person_id", "split"])
        metadata = pq.read_schema(path).metadata or {}
        dim, encoder = int(metadata[b"octjepa.dim"]), metadata[b"octjepa.encoder"].decode()
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise UsageError(f"{path} is no table of embeddings ({str(error).splitlines()[0]})") from None
    splits = table.column("split").to_pylist()
    person_ids = table.column("person_id").to_pylist()
    people = set(person_ids)
    sides = {(person, split) for person, split in zip(person_ids, splits, strict=True) if split}
    two_sides = sum(count > 1 for count in Counter(person for person, _ in sides).values())
    by_split = {split: splits.count(split) for split in sorted(set(splits))}
    leaked = int(metadata.get(b"octjepa.leaked", b"0"))
    return EmbeddingContents(len(splits), len(people), dim, encoder, by_split, leaked, two_sides)


def _try(missing: list[Missing], part: str, path: Path, read: Callable[[Path], Part], supply: str) -> Part | None:
    """`read(path)`, or None with the reason entered in `missing`."""
    if not path.exists():
        missing.append(Missing(part, f"there is no {path.name} here", supply))
        return None
    try:
        return read(path)
    except OctjepaError as error:
        missing.append(Missing(part, str(error), supply))
        return None
