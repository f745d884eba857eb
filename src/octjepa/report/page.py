"""Puts what was gathered on the page and writes it in one piece.

Every section that a part is missing for says so in its place, with the command that would supply it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from octjepa.errors import OctjepaError, UsageError
from octjepa.progress import bar
from octjepa.remote import is_remote
from octjepa.report import occlusion, segmentation, tuning, wording
from octjepa.report.card import card_of
from octjepa.report.cohort import Cohort, cohort, run_flow
from octjepa.report.every_file import Accepted, RefusedFor, accepted, refused
from octjepa.report.faults import FAULT_KINDS, faults
from octjepa.report.figures import curves, eyes, forest, mask_report, masks, tokens
from octjepa.report.figures.eyes import EyePicture
from octjepa.report.figures.forest import Difference, ForestGroup
from octjepa.report.figures.masks import MaskPicture
from octjepa.report.figures.tokens import TokenMaps
from octjepa.report.findings import findings
from octjepa.report.gather import Contents, Missing, gather
from octjepa.report.occlusion import OcclusionPage
from octjepa.report.segmentation import SegmentationPage

_LONG_TABLE = 12  # rows beyond which a table starts folded
# Sections that a page of its kind does without.
_WITHOUT = {"tuning": ("masks", "tokens"), "segmentation": ("masks", "training", "tokens", "occlusion")}
_EYES_OF_TOKENS = 4
_FEWEST_MASKS = 16
_TOKENS_OF_MASKS = 8192  # that the mask figure may cost, over all its samples: about a second


@dataclass
class Page:
    """What the template shows. A section whose value is None stands in `absent` with the reason."""

    contents: Contents
    made: str
    title: str
    faults: list[dict[str, str]] = field(default_factory=list)
    findings: list[wording.Finding] = field(default_factory=list)
    absent: dict[str, list[Missing]] = field(default_factory=dict)
    cohort: Cohort | None = None
    run_flow: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    refused: list[RefusedFor] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    eyes: list[EyePicture] = field(default_factory=list)
    masks: list[MaskPicture] = field(default_factory=list)
    mask_volume: str = ""
    mask_chart: Any = None
    mask_samples: int = 0
    charts: list[Any] = field(default_factory=list)
    alarms: list[tuple[int, str, str]] = field(default_factory=list)
    baselines: list[dict[str, Any]] = field(default_factory=list)
    rankme: float | None = None
    tokens: TokenMaps | None = None
    occlusion: OcclusionPage | None = None
    groups: list[ForestGroup] = field(default_factory=list)
    all_rows: list[dict[str, Any]] = field(default_factory=list)
    paired: dict[str, Any] | None = None
    paired_drawing: Any = None
    differences: list[Difference] = field(default_factory=list)
    segmentation: SegmentationPage | None = None
    commands: list[str] = field(default_factory=list)

    def lacks(self, section: str, *missing: Missing) -> None:
        self.absent.setdefault(section, []).extend(missing)


def write_report(source: str | Path, out: Path | None = None, card: Path | None = None) -> Path:
    """Writes the page about `source` to `out`; default: `report.html` in it.

    With `card` the data card of its store is written there, too: Markdown.

    `source` is a run, a fine-tuning, a segmentation, a store or a demo folder. It may be a store in a bucket; the page
    is then written to the working folder by default.

    The file appears whole or not at all. Raises UsageError (no such folder, none of these, `out` is a folder) and
    OctjepaError (the disk refuses).
    """
    contents = gather(source)
    out = (Path() if is_remote(source) else Path(source)) / "report.html" if out is None else Path(out)
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give --out the name of an HTML file")
    beside = {} if card is None else {card: card_of(contents, card, out)}
    for place, text in {out: render(contents), **beside}.items():  # both are made before the first is written
        _write(place, text)
    return out


def render(contents: Contents) -> str:
    """The HTML text. Raises UsageError or another OctjepaError only where the folder's own head is damaged."""
    name = contents.made.about.get("name", "") if contents.made else ""
    page = Page(contents, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), str(name) or contents.root.name)
    builders: tuple[tuple[str, Callable[[Page], None]], ...] = (
        ("cohort", _cohort),
        ("eyes", _eyes),
        ("masks", _masks),
        ("training", _training),
        ("tokens", _tokens),
        ("probe", _probe),
        ("occlusion", _occlusion),
        ("reproduce", _reproduce),
    )
    builders = tuple(one for one in builders if one[0] not in _WITHOUT.get(contents.kind, ()))
    with bar("report", len(builders), "part") as progress:
        for section, build in builders:
            try:
                build(page)
            except OctjepaError as error:
                page.lacks(section, Missing(_MISSING_NAMES[section], str(error), "see the message"))
            progress.advance()
    page.faults = faults(contents, page.cohort)
    page.findings = findings(contents, page.cohort, page.paired)
    return _template().render(
        page=page,
        contents=contents,
        run=contents.run,
        long_table=_LONG_TABLE,
        number=wording.number,
        signed=wording.signed,
        duration=wording.duration,
        scrub=lambda text: wording.without_paths(str(text), contents.root),
        predictors=wording.PREDICTORS,
        kinds=FAULT_KINDS,
        version=version("octjepa"),
    )


_MISSING_NAMES = {
    "cohort": "the cohort",
    "eyes": "the eyes",
    "masks": "the masks",
    "training": "the training curves",
    "tokens": "the token maps",
    "probe": "the probe",
    "occlusion": "the occlusion maps",
    "reproduce": "the commands",
}


def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    text = files("octjepa.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    environment.filters["spaced"] = lambda value: str(value).replace("_", " ")
    return environment.from_string(text)


def _breakable(name: str) -> Markup:
    """A long file name that may break after a slash or an underscore; copied, it is the name itself."""
    return Markup("<wbr>").join(re.split(r"(?<=[/_])", name))


def _write(out: Path, text: str) -> None:
    hidden = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_text(text, encoding="utf-8")
        hidden.replace(out)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise OctjepaError(f"could not write {out}: {error.strerror}. Free space, or name another place.") from None


def _of(contents: Contents, *parts: str) -> list[Missing]:
    return [one for one in contents.missing if one.part in parts]


def _cohort(page: Page) -> None:
    store = page.contents.store
    if page.contents.run is not None:
        page.run_flow = run_flow(page.contents.run.about)
    if store is None:
        for section in ("cohort", "eyes", "files"):
            page.lacks(section, *_of(page.contents, "the store"))
        return
    page.cohort = cohort(store)
    page.refused = refused(store, page.contents.root)
    page.accepted = accepted(store)


def _eyes(page: Page) -> None:
    store = page.contents.store
    if store is None:
        return
    page.eyes = [eyes.eye_picture(store, row) for row in eyes.one_per_device(store.table)]
    if not page.eyes:
        page.lacks("eyes", Missing("the eyes", "the store holds no raster volume", "octjepa ingest"))


def _masks(page: Page) -> None:
    store, run = page.contents.store, page.contents.run
    if store is None or run is None:
        page.lacks("masks", *_of(page.contents, "the store"), *_of(page.contents, "the run"))
        return
    if not _fits(page, "masks"):
        return
    rows = eyes.one_per_device(store.table)
    if not rows:
        page.lacks("masks", Missing("the masks", "the store holds no raster volume to draw them on", "octjepa ingest"))
        return
    volume = store.read(str(rows[0]["volume_id"]))
    page.mask_volume = f"{rows[0]['device']}, {rows[0]['eye'] or 'eye unknown'}, volume {rows[0]['volume_id']}"
    page.masks = [masks.mask_picture(volume, run.recipe, family) for family in masks.FAMILIES]
    page.mask_samples = _TOKENS_OF_MASKS // run.recipe.token_count
    if page.mask_samples < _FEWEST_MASKS:
        why = f"at {run.recipe.token_count} tokens a volume it takes longer than a page may"
        page.lacks("masks", Missing("the figure of all masks", why, "octjepa plan RECIPE --store STORE --masks DIR"))
        return
    from octjepa.report.mask_statistics import measure_store

    trained = store.table[(store.table["pattern"] == "raster") & (store.table["split"] == "train")]["volume_id"]
    chosen = list(trained if len(trained) else store.table[store.table["pattern"] == "raster"]["volume_id"])
    measured = measure_store(run.recipe, store, chosen[: page.mask_samples], page.mask_samples)
    page.mask_chart = mask_report.mask_chart(measured)
    page.mask_samples = measured["samples"]


def _fits(page: Page, section: str) -> bool:
    """Whether the store was prepared as the run's recipe asks; says so on the page where it was not."""
    from octjepa.store.contract import contract_differences

    store, run = page.contents.store, page.contents.run
    assert store is not None  # the callers' own check
    assert run is not None
    differences = contract_differences(store.preprocessing, run.recipe)
    if differences:
        why = "the store was prepared otherwise than the run: " + "; ".join(differences)
        page.lacks(section, Missing(_MISSING_NAMES[section], why, "octjepa ingest with the run's recipe"))
    return not differences


def _training(page: Page) -> None:
    run, tuned = page.contents.run, page.contents.tuning
    if tuned is not None:
        page.charts = curves.training_charts(tuned.updates, tuned.looks, wanted=curves.TUNING_CHARTS)
        if not page.charts:
            page.lacks("training", Missing("the curves", "metrics.jsonl holds no update", "octjepa finetune --resume"))
        return
    if run is None:
        page.lacks("training", *_of(page.contents, "the run"))
        return
    page.charts = curves.training_charts(run.updates, run.validations, run.monitored)
    page.alarms = [
        (line["update"], name, message) for line in run.monitored for name, message in line.get("alarms", {}).items()
    ]
    if not page.charts:
        page.lacks("training", Missing("the training curves", "metrics.jsonl holds no update", "octjepa pretrain"))
    if not run.validations:
        page.lacks("training", Missing("the validation", "metrics.jsonl holds no validation", "octjepa pretrain"))
        return
    page.baselines, page.rankme = _baselines(run.validations[-1])


def _baselines(last: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None]:
    """The learned predictor and the trivial ones, best first, with the share of the longest bar."""
    found = [
        {
            "name": "learned",
            "ours": True,
            "cosine": last["val/cosine"],
            "loss": last["val/loss"],
            "centred": last.get("val_centred/loss"),
        }
    ]
    found += [
        {
            "name": name,
            "ours": False,
            "cosine": last[f"val/baseline/{name}"],
            "loss": last.get(f"val/baseline_loss/{name}"),
            "centred": last.get(f"val_centred/baseline_loss/{name}"),
        }
        for name in wording.PREDICTORS
        if f"val/baseline/{name}" in last
    ]
    found.sort(key=lambda row: -row["cosine"])
    for row in found:
        row["share"] = max(0.0, min(1.0, row["cosine"]))
    return found, last.get("val/rankme")


def _tokens(page: Page) -> None:
    store, run = page.contents.store, page.contents.run
    if store is None or run is None:
        page.lacks("tokens", *_of(page.contents, "the store"), *_of(page.contents, "the run"))
        return
    if not _fits(page, "tokens"):
        return
    rows = eyes.one_per_device(store.table, splits=("test", "val"))[:_EYES_OF_TOKENS]
    if not rows:
        page.lacks("tokens", Missing("the token maps", "the store holds no held-out raster volume", "octjepa split"))
        return
    from octjepa.checkpoint import load_encoder

    page.tokens = tokens.token_maps(store, rows, load_encoder(run.path))


def _occlusion(page: Page) -> None:
    contents, name = page.contents, _MISSING_NAMES["occlusion"]
    if contents.store is None or (contents.run is None and contents.tuning is None):
        page.lacks("occlusion", *_of(contents, "the store"), *_of(contents, "the run"))
    elif contents.tuning is not None:
        if not (contents.root / "predictions.parquet").is_file():
            page.lacks("occlusion", Missing(name, "there is no predictions.parquet here", "octjepa finetune --resume"))
            return
        page.occlusion = occlusion.of_tuning(contents.store, contents.root)
        if page.occlusion is None:
            page.lacks("occlusion", Missing(name, "no test volume has a label", "octjepa finetune with more labels"))
    elif contents.run is not None and _fits(page, "occlusion"):
        page.occlusion = occlusion.of_run(contents.store, contents.run.path)
        if page.occlusion is None:
            page.lacks("occlusion", Missing(name, "the store holds no held-out raster volume", "octjepa split"))


def _probe(page: Page) -> None:
    probe = page.contents.probe
    if probe is None:
        page.lacks("probe", *_of(page.contents, "the probe", "the embeddings"))
        return
    tuned, segmented = page.contents.tuning, page.contents.segmentation
    page.all_rows = probe.rows
    if segmented is not None:
        try:
            page.segmentation = segmentation.build(segmented, lambda one: page.lacks("probe", one))
            page.all_rows = segmentation.forest_rows(segmented, probe.rows)
            page.groups = segmentation.groups(page.all_rows)
            page.differences = segmentation.differences(segmented)
        except KeyError as error:
            raise OctjepaError(f"results.json is damaged: something lacks {error}") from None
        return
    if tuned is not None:
        page.groups = forest.forest(tuning.rows(tuned, probe), tuning.against_frozen(tuned.paired))
        page.differences = tuning.differences(tuned.paired)
        return
    compared = forest.headline(probe.comparisons, probe.paired) if probe.paired else []
    page.groups = forest.forest(forest.headline(probe.rows, probe.paired), compared)
    page.paired = probe.paired
    if probe.paired and (value := forest.finite(probe.paired.get("difference"))) is not None:
        low, high = (forest.finite(probe.paired.get(key)) for key in ("low", "high"))
        page.paired_drawing = forest.difference_drawing(value, low, high)
    if not page.groups:
        page.lacks("probe", Missing("the probe", "probe.json holds no row", "octjepa probe"))


def _reproduce(page: Page) -> None:
    contents = page.contents
    if contents.kind == "demo":
        page.commands = ["octjepa demo --out DIR"] if contents.phantom else []
    run = contents.run
    if run is not None:
        page.commands += [
            "octjepa ingest FILES --store STORE --recipe recipe.yaml",
            "octjepa pretrain recipe.yaml --store STORE --out RUN",
        ]
        if contents.embeddings:
            page.commands.append("octjepa embed RUN --store STORE --out embeddings.parquet")
        if contents.probe:
            targets = sorted({str(row.get("target")) for row in contents.probe.rows} - {"macro", "None"})
            asked = " ".join(f"--target {target}" for target in targets)
            page.commands.append(f"octjepa probe embeddings.parquet --labels LABELS.tsv {asked}".rstrip())
    elif contents.tuning is not None:
        columns = dict.fromkeys(one["target"].partition("=")[0] for one in contents.tuning.about.get("targets", ()))
        asked = "".join(f" --target {column}" for column in columns)
        page.commands = [
            f"octjepa finetune recipe.yaml{asked} --from ENCODER --store STORE --labels LABELS.tsv --out OUT"
        ]
    elif contents.segmentation is not None:
        asked = ",".join(contents.segmentation.about["classes"])
        page.commands = [
            f"octjepa segment recipe.yaml --from ENCODER --store STORE --labels LABELS --classes {asked} --out OUT"
        ]
    elif contents.kind == "store":
        page.commands = ["octjepa ingest FILES --store STORE"]
