"""Reads what a folder holds into one frozen object. Nothing is computed here.

A part that is absent or cannot be read becomes a `Missing` with the reason and the command that supplies it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octjepa.errors import OctjepaError, UsageError
from octjepa.evaluate.results import (
    ProbePaired,
    Row,
    SubgroupResult,
    WithFewerLabels,
    read_fewer_labels,
    read_row,
)
from octjepa.files import read_json_object
from octjepa.metrics.findings import Fault
from octjepa.outside import OutsideError, named_by
from octjepa.parsing import read_arrow
from octjepa.read.written_results import PAGE, is_segmentation_folder
from octjepa.recipe import Recipe
from octjepa.record import Record
from octjepa.remote import is_remote

if TYPE_CHECKING:
    from octjepa.store import Store
    from octjepa.tasks.finetune.result import FinetuneResult
    from octjepa.tasks.segment.result import SegmentationResult
    from octjepa.train.summary import RunSummary

Kind = Literal["run", "tuning", "segmentation", "store", "demo"]
Part = TypeVar("Part")
R = TypeVar("R", bound=Record)
DEMO_PARTS = ("store", "run", "phantom", "embeddings.parquet", "probe.json")
_log = logging.getLogger(__name__)
_REMEDY = "restore it from a copy, or make it anew"


@dataclass(frozen=True)
class Missing:
    """A part that the page cannot show: its name, the reason, and the command that supplies it."""

    part: str
    reason: str
    command: str


@dataclass(frozen=True)
class Training:
    """The trained object: a pretraining run, a fine-tuning or a segmentation head.

    about: run.json, or of a head its manifest. lines: of metrics.jsonl. summary, tuned, segmented: results of a
    pretraining, a fine-tuning and a segmentation; None while there are none. checkpoint: the final one. recipe: of a
    pretraining run.
    """

    path: Path
    about: dict[str, Any]
    recipe_text: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    recipe: Recipe | None = None
    summary: RunSummary | None = None
    tuned: FinetuneResult | None = None
    segmented: SegmentationResult | None = None
    checkpoint: str | None = None

    def lines_with(self, key: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in which `key` has a value."""
        return [line for line in self.lines if line.get(key) is not None]


@dataclass(frozen=True)
class ProbeContents:
    """probe.json or results.json: rows and the comparisons.

    `paired` is the comparison fixed before the test results were read, `comparisons` the same of every other row,
    `baselines` those of the same encoder to the other baselines. `labelled`: rows by number of labelled people.
    `subgroups`: results by the groups of a column.
    """

    rows: list[Row]
    paired: ProbePaired | None
    comparisons: list[ProbePaired]
    baselines: list[ProbePaired]
    faults: list[Fault]
    notes: list[str]
    labelled: dict[str, WithFewerLabels] = field(default_factory=dict)
    subgroups: list[SubgroupResult] = field(default_factory=list)


@dataclass(frozen=True)
class EmbeddingContents:
    """How much of the store was embedded; the vectors themselves stay in their file.

    leaked: people of val and test whom the encoder was pretrained on; in_two_splits: people in more than one split.
    weights: hash of the encoder's weights, "" if it has none.
    """

    volumes: int
    people: int
    dim: int
    encoder: str
    by_split: dict[str, int]
    leaked: int
    in_two_splits: int
    weights: str = ""


@dataclass(frozen=True)
class Contents:
    """Everything the page is made of; None where a part is missing. `compared` are runs to lay next to its own."""

    root: Path
    kind: Kind
    store: Store | None = None
    training: Training | None = None
    probe: ProbeContents | None = None
    embeddings: EmbeddingContents | None = None
    compared: tuple[Training, ...] = ()
    phantom: bool = False
    demo_seconds: float | None = None
    segmenter: Mapping[str, Any] | None = None  # of a demo: errors of the packaged segmenter
    missing: tuple[Missing, ...] = ()
    scans: tuple[str, ...] = ()  # folders that hold the files of the store, as the user named them

    @property
    def run(self) -> Training | None:
        """The pretraining run."""
        return self.training if self.kind in ("run", "demo") else None

    def missing_parts(self, *parts: str) -> list[Missing]:
        """Those of `parts` that are missing."""
        return [missing for missing in self.missing if missing.part in parts]


def read_contents(source: str | Path) -> Contents:
    """The content of `source`: a run, fine-tuning, segmentation, store (also in a bucket) or demo folder.

    Raises UsageError when it is none of these, OctjepaError when its own head is damaged.
    """
    if is_remote(source):
        return Contents(Path(str(source).partition("://")[2]), "store", _open_store(str(source)))
    root = Path(source).resolve()
    kind = _kind(root, Path(source))
    if kind == "store":
        return Contents(root, kind, _open_store(root))
    missing: list[Missing] = []

    def attempt(part: str, path: Path | str, read: Callable[[Any], Part], command: str) -> Part | None:
        """`read(path)`, or None with the reason added to `missing`."""
        if isinstance(path, Path) and not path.exists():
            missing.append(Missing(part, f"there is no {path.name} here", command))
            return None
        try:
            return read(path)
        except OctjepaError as error:
            missing.append(Missing(part, str(error), command))
            return None

    if kind == "demo":
        training = attempt("the run", root / "run", _read_run, "octjepa pretrain")
    else:
        training = {"run": _read_run, "tuning": _read_tuning, "segmentation": _read_segmentation}[kind](root)
    store = None
    try:
        location = _store_location(root, kind, training)
    except OutsideError as error:
        _log.warning("%s", error)
        missing.append(Missing("the store", str(error), "octjepa report --allow-outside"))
    else:
        if location is not None:
            store = attempt("the store", location, _open_store, "octjepa ingest")
        else:
            owner = "results.json" if kind == "segmentation" else "run.json"
            missing.append(Missing("the store", f"{owner} names none", "octjepa ingest"))
    embeddings = None
    if kind in ("run", "demo"):
        embeddings = attempt("the embeddings", root / "embeddings.parquet", _read_embeddings, "octjepa embed")
    file, command = {
        "tuning": ("results.json", "octjepa finetune --resume"),
        "segmentation": ("results.json", "octjepa segment into a new --out"),
    }.get(kind, ("probe.json", "octjepa probe"))
    probe = attempt("the probe", root / file, _read_probe, command)
    phantom = kind == "demo" and (root / "phantom").is_dir()
    demo = root / "demo.json"
    recorded = read_json_object(demo, _REMEDY) if kind == "demo" and demo.is_file() else {}
    return Contents(
        root,
        kind,
        store,
        training,
        probe,
        embeddings,
        (),
        phantom,
        recorded.get("seconds"),
        recorded.get("segmenter"),
        tuple(missing),
    )


def read_run(source: str | Path) -> Training:
    """The pretraining run of a run or demo folder. Raises UsageError (it holds none) and OctjepaError (it is
    damaged).
    """
    root = Path(source).resolve()
    if _kind(root, Path(source)) == "demo":
        root = root / "run"
    if _kind(root, Path(source)) != "run":
        raise UsageError(f"{source} is not a pretraining run: only those can be compared here")
    return _read_run(root)


def holds_contents(path: Path) -> bool:
    """Whether `read_contents` knows what kind of folder `path` is."""
    try:
        _kind(path.resolve(), path)
    except UsageError:
        return False
    return True


def _kind(root: Path, shown: Path) -> Kind:
    if not root.is_dir():
        raise UsageError(f"no folder {shown}: give a run, a fine-tuning, a segmentation, a store or a demo folder")
    if (root / "run.json").is_file():
        return "run" if "kind" not in read_json_object(root / "run.json", _REMEDY) else "tuning"
    if (root / "store.json").is_file():
        return "store"
    if any((root / name).exists() for name in DEMO_PARTS):
        return "demo"
    if (root / "head").is_dir():
        return "segmentation"
    if (root / PAGE).is_file() and is_segmentation_folder(root):
        raise UsageError(
            f"{shown} holds results of `octjepa segment`, which already wrote their page: open {shown / PAGE}"
        )
    raise UsageError(
        f"{shown} holds nothing to show: expected a run or fine-tuning (run.json), a segmentation (head), a store "
        f"(store.json) or a demo ({', '.join(DEMO_PARTS)})"
    )


def _read_run(path: Path) -> Training:
    """A run folder. Raises OctjepaError when run.json or recipe.yaml is absent or damaged."""
    from octjepa.config import load_run_recipe
    from octjepa.train.summary import RunSummary

    about = read_json_object(path / "run.json", _REMEDY)
    recipe = load_run_recipe(path / "recipe.yaml")
    summary = path / "summary.json"
    finished = RunSummary.from_json(read_json_object(summary, _REMEDY)) if summary.is_file() else None
    checkpoint = None if finished is None else finished.checkpoint
    return Training(
        path,
        about,
        _read_text(path / "recipe.yaml"),
        _read_lines(path),
        recipe,
        summary=finished,
        checkpoint=checkpoint,
    )


def _read_tuning(path: Path) -> Training:
    """The folder of a fine-tuning. Raises OctjepaError when run.json or recipe.yaml is absent or damaged."""
    from octjepa.tasks.finetune.result import FinetuneResult

    about, tuned = read_json_object(path / "run.json", _REMEDY), _read_results(path, FinetuneResult)
    checkpoint = None if tuned is None else tuned.checkpoint
    recipe_text, lines = _read_text(path / "recipe.yaml"), _read_lines(path)
    return Training(path, about, recipe_text, lines, tuned=tuned, checkpoint=checkpoint)


def _read_segmentation(path: Path) -> Training:
    """The folder of a segmentation head. Raises UsageError (no head in it), OctjepaError (its manifest is damaged)."""
    from octjepa.checkpoint.folder import read_manifest
    from octjepa.config import to_yaml
    from octjepa.tasks.segment.folder import find_head
    from octjepa.tasks.segment.recipe import RECIPES
    from octjepa.tasks.segment.result import SegmentationResult

    folder = find_head(path)
    if folder is None:
        raise UsageError(f"{path / 'head'} holds no segmentation head: give the folder that octjepa segment wrote")
    manifest = read_manifest(folder)
    settings = RECIPES.read(manifest["settings"], f"of {folder}")
    segmented = _read_results(path, SegmentationResult)
    about = {
        "name": settings.name,
        "head": settings.head,
        "classes": manifest["classes"],
        "encoder": manifest["encoder_recipe"]["name"],
        "store": None if segmented is None else segmented.store,
        **{key: manifest["contract"][key] for key in ("contract_hash", "weights")},
    }
    return Training(path, about, to_yaml(settings), segmented=segmented, checkpoint=str(folder))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _read_results(path: Path, kind: type[R]) -> R | None:
    """results.json; None if it is absent or damaged, which the probe's section reports."""
    try:
        return kind.from_json(read_json_object(path / "results.json", _REMEDY))
    except (OctjepaError, KeyError, TypeError, AttributeError):
        return None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    from octjepa.files import read_json_lines

    journal = path / "metrics.jsonl"
    return read_json_lines(journal) if journal.is_file() else []


def _store_location(root: Path, kind: Kind, training: Training | None) -> Path | str | None:
    if kind == "demo" and (root / "store").exists():
        return root / "store"
    if training is not None and training.about.get("store"):
        named = named_by(training.path, "run.json", str(training.about["store"]))
        return named.resolve() if isinstance(named, Path) else named
    return root / "store" if kind == "demo" else None


def _open_store(path: Path | str) -> Store:
    from octjepa.store import Store

    return Store.open(path)


def _read_probe(path: Path) -> ProbeContents:
    data = read_json_object(path, _REMEDY)
    rows = data.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise UsageError(f"{path} holds no list of named rows under 'rows': write it with octjepa probe")
    paired = data.get("paired") or None
    try:
        return ProbeContents(
            rows=[read_row(row) for row in rows],
            paired=ProbePaired.from_json(paired) if isinstance(paired, dict) else None,
            comparisons=[ProbePaired.from_json(pair) for pair in data.get("comparisons") or ()],
            baselines=[ProbePaired.from_json(pair) for pair in data.get("baselines") or ()],
            faults=[Fault.from_json(fault) for fault in data.get("faults") or ()],
            notes=data.get("notes") or [],
            labelled=_read_labelled(data.get("labelled")),
            subgroups=[SubgroupResult.from_json(entry) for entry in data.get("subgroups") or ()],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}): write it with octjepa probe") from None


def _read_labelled(data: Any) -> dict[str, WithFewerLabels]:
    """By number of people; a segmentation's `labelled`, which counts volumes by split, has no results."""
    is_known = isinstance(data, dict) and all(isinstance(entry, dict) and "rows" in entry for entry in data.values())
    return read_fewer_labels(data) if is_known else {}


def _read_embeddings(path: Path) -> EmbeddingContents:
    try:
        table = read_arrow(path, ["person_id", "split"])
        metadata = table.schema.metadata or {}
        dim, encoder = int(metadata[b"octjepa.dim"]), metadata[b"octjepa.encoder"].decode()
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(f"{path} is not a table of embeddings ({str(error).splitlines()[0]})") from None
    people, splits = table.column("person_id").to_pylist(), table.column("split").to_pylist()
    assigned = {(person, split) for person, split in zip(people, splits, strict=True) if split}
    in_two_splits = sum(count > 1 for count in Counter(person for person, _ in assigned).values())
    leaked = int(metadata.get(b"octjepa.leaked", b"0"))
    by_split = {split: splits.count(split) for split in sorted(set(splits))}
    weights = metadata.get(b"octjepa.weights", b"").decode()
    return EmbeddingContents(len(splits), len(set(people)), dim, encoder, by_split, leaked, in_two_splits, weights)
