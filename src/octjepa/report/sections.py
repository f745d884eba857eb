"""The sections of the page, in order. A section is one function that is registered with its title and kinds of folder.

It returns the values its part of the template reads and the parts that are missing; without values the page shows only
what is missing and which command supplies it. An OctjepaError in one section leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from octjepa.cohort import examples
from octjepa.errors import OctjepaError
from octjepa.evaluate.results import ProbePaired
from octjepa.evaluate.subgroups import subgroup_tables
from octjepa.progress import bar
from octjepa.report import occlusion, supervised
from octjepa.report.cohort import accepted_files, refused_files, run_flow, summarise_cohort
from octjepa.report.comparison import compare_runs
from octjepa.report.contents import Contents, Kind, Missing
from octjepa.report.figures import curves, eyes, forest, masks, tokens
from octjepa.report.headlines import PREDICTORS
from octjepa.report.label_curve import label_curve
from octjepa.store import Store

_ALL: tuple[Kind, ...] = get_args(Kind)
_PRETRAINED: tuple[Kind, ...] = ("run", "demo")
_FEWEST_MASKS = 16
_MASK_TOKENS = 8192  # that the picture of the masks may cost, over all its samples: about a second
_TOKEN_MAPS = 4


@dataclass(frozen=True)
class Section:
    """One section of a page: its title in the navigation, its values (None: nothing), and what is missing."""

    title: str
    values: Mapping[str, object] | None
    missing: list[Missing] = field(default_factory=list)


Built = tuple[Mapping[str, object] | None, list[Missing]]
Builder = Callable[[Contents], Built]


@dataclass(frozen=True)
class _Registered:
    title: str
    what: str
    kinds: tuple[Kind, ...]
    build: Builder


_SECTIONS: dict[str, _Registered] = {}


def section(name: str, title: str, what: str, kinds: tuple[Kind, ...] = _ALL) -> Callable[[Builder], Builder]:
    """Registers the function that builds section `name` of the pages of `kinds`; `what` names it when it is missing."""

    def add(build: Builder) -> Builder:
        _SECTIONS[name] = _Registered(title, what, kinds, build)
        return build

    return add


def build_sections(contents: Contents) -> dict[str, Section]:
    """Every section of the page about `contents`, by name and in order."""
    sections: dict[str, Section] = {}
    registered = {name: section for name, section in _SECTIONS.items() if contents.kind in section.kinds}
    if not contents.compared:
        registered.pop("comparison", None)
    with bar("report", len(registered), "section") as progress:
        for name, part in registered.items():
            title = "Test" if name == "probe" and contents.kind not in _PRETRAINED else part.title
            try:
                sections[name] = Section(title, *part.build(contents))
            except OctjepaError as error:
                sections[name] = Section(title, None, [Missing(part.what, str(error), "see the message")])
            progress.advance()
    return sections


@section("cohort", "Cohort", "the cohort")
def _cohort(contents: Contents) -> Built:
    about = contents.run.about if contents.run is not None else {}
    values = {
        "summary": None if contents.store is None else summarise_cohort(contents.store),
        "run_flow": run_flow(about),
        "domains": about.get("domains", {}),
    }
    return values, contents.missing_parts("the store")


@section("eyes", "Eyes", "the eyes")
def _eyes(contents: Contents) -> Built:
    if contents.store is None:
        return None, contents.missing_parts("the store")
    store = contents.store
    is_store = contents.kind == "store"
    rows = (examples.all_if_few if is_store else examples.one_per_device)(store.table)
    pictures = [eyes.eye_picture(store, row) for row in rows]
    if not pictures:
        return None, [Missing("the eyes", "the store holds no raster volume", "octjepa ingest")]
    extremes = {
        which: [(row, eyes.central_picture(store, row)) for row in rows]
        for which, rows in eyes.extreme_volumes(store.table).items()
    }
    every = is_store and len(rows) == int((store.table["pattern"] == "raster").sum())
    return {"pictures": pictures, "extremes": extremes, "every": every}, []


@section("layers", "Layers", "the layers", ("store",))
def _layers(contents: Contents) -> Built:
    from octjepa.tasks.segmenter.store_layers import layers_of_store  # loads torch

    if contents.store is None:
        return None, contents.missing_parts("the store")
    shown = layers_of_store(contents.store, contents.scans)
    if not shown.scans:
        reason = shown.left_out[0].reason if shown.left_out else "the store holds no raster volume"
        return None, [Missing("the layers", reason, "octjepa report STORE --scans FOLDER")]
    return {"shown": shown}, []


@section("masks", "Masks", "the masks", _PRETRAINED)
def _masks(contents: Contents) -> Built:
    store, run = contents.store, contents.run
    if store is None or run is None or run.recipe is None:
        return None, contents.missing_parts("the store", "the run")
    if different := _different_contract(contents, store, "the masks"):
        return None, different
    entries = examples.one_per_device(store.table)
    if not entries:
        why = "the store holds no raster volume to draw them on"
        return None, [Missing("the masks", why, "octjepa ingest")]
    volume = store.read(entries[0].volume_id)
    samples = _MASK_TOKENS // run.recipe.token_count
    values: dict[str, object] = {
        "volume": eyes.volume_title(entries[0]),
        "families": [masks.mask_picture(volume, run.recipe, family) for family in masks.FAMILIES],
        "chart": None,
        "samples": samples,
    }
    if samples < _FEWEST_MASKS:
        why = f"at {run.recipe.token_count} tokens a volume it takes longer than a page may"
        command = "octjepa plan RECIPE --store STORE --masks DIR"
        return values, [Missing("the metric of all masks", why, command)]
    from octjepa.train.mask_statistics import measure_store

    rasters = store.table[store.table["pattern"] == "raster"]
    train = rasters[rasters["split"] == "train"]
    ids = list((train if len(train) else rasters)["volume_id"])
    measured = measure_store(run.recipe, store, ids[:samples], samples)
    return {**values, "chart": masks.mask_chart(measured), "samples": measured.samples}, []


def _different_contract(contents: Contents, store: Store, what: str) -> list[Missing]:
    """Why `what` is missing where the store was not preprocessed as the run's recipe asks; else nothing."""
    from octjepa.store.contract import contract_differences

    run = contents.run
    assert run is not None  # the callers' own check
    assert run.recipe is not None
    differences = contract_differences(store.preprocessing, run.recipe.preprocessing)
    if not differences:
        return []
    why = "the store was prepared otherwise than the run: " + "; ".join(differences)
    return [Missing(what, why, "octjepa ingest with the run's recipe")]


@section("training", "Training", "the training curves", (*_PRETRAINED, "tuning"))
def _training(contents: Contents) -> Built:
    training = contents.training
    if training is None:
        return None, contents.missing_parts("the run")
    values: dict[str, object] = {"alarms": [], "predictors": [], "rankme": None, "update": None}
    if contents.kind == "tuning":
        updates, validations = training.lines_with("loss"), training.lines_with("val_loss")
        charts = curves.training_charts(updates, validations, charts=curves.TUNING_CHARTS)
        missing = [Missing("the curves", "metrics.jsonl holds no update", "octjepa finetune --resume")]
        return {**values, "charts": charts}, [] if charts else missing
    validations, monitored = training.lines_with("val/loss"), training.lines_with("monitor/lidar")
    charts = curves.training_charts(training.lines_with("train/loss"), validations, monitored)
    values |= {
        "charts": charts,
        "alarms": [
            (line["update"], name, message) for line in monitored for name, message in line.get("alarms", {}).items()
        ],
    }
    missing = [
        Missing(what, f"metrics.jsonl holds no {lines}", "octjepa pretrain")
        for what, lines, present in (
            ("the training curves", "update", charts),
            ("the validation", "validation", validations),
        )
        if not present
    ]
    if validations:
        last = validations[-1]
        values |= {
            "predictors": learned_and_trivial_predictors(last),
            "rankme": last.get("val/rankme"),
            "update": last["update"],
        }
    return values, missing


@dataclass(frozen=True)
class Predictor:
    """The learned predictor or a trivial one in the last validation. share: length of its bar, of the longest.

    cosine: None if it is not finite, as after a divergence.
    """

    name: str
    ours: bool
    cosine: float | None
    loss: float | None
    centred: float | None
    share: float
    sees: str


def learned_and_trivial_predictors(validation: Mapping[str, Any]) -> list[Predictor]:
    """The learned predictor and the trivial predictors, best first, with the share of the longest bar.

    One without a finite cosine comes last and has no bar.
    """
    keys = {"learned": ("val/cosine", "val/loss", "val_centred/loss")}
    for name in PREDICTORS:
        keys[name] = (
            f"val/baseline/{name}",
            f"val/baseline_loss/{name}",
            f"val_centred/baseline_loss/{name}",
        )
    rows = []
    for name, (cosine, loss, centred) in keys.items():
        if cosine in validation:
            value = forest.finite(validation[cosine])
            rows.append(
                Predictor(
                    name,
                    name == "learned",
                    value,
                    validation.get(loss),
                    validation.get(centred),
                    0.0 if value is None else max(0.0, min(1.0, value)),
                    PREDICTORS.get(name, "the context tokens of this eye"),
                )
            )
    return sorted(rows, key=lambda row: (row.cosine is None, -(row.cosine or 0.0)))


@section("tokens", "Token maps", "the token maps", _PRETRAINED)
def _tokens(contents: Contents) -> Built:
    store, run = contents.store, contents.run
    if store is None or run is None:
        return None, contents.missing_parts("the store", "the run")
    if different := _different_contract(contents, store, "the token maps"):
        return None, different
    rows = examples.one_per_device(store.table, splits=("test", "val"))[:_TOKEN_MAPS]
    if not rows:
        return None, [Missing("the token maps", "the store holds no held-out raster volume", "octjepa split")]
    from octjepa.encoders import load_encoder

    return {"maps": tokens.token_maps(store, rows, load_encoder(run.path))}, []


@section("probe", "Probe", "the probe", ("run", "demo", "tuning", "segmentation"))
def _probe(contents: Contents) -> Built:
    probe, training = contents.probe, contents.training
    if probe is None:
        return None, contents.missing_parts("the probe", "the embeddings")
    if contents.kind == "segmentation" and training is not None:
        values, missing = supervised.segmentation_section(training, probe)
        return {"paired": None, "paired_drawing": None, **values}, missing
    if contents.kind == "tuning" and training is not None:
        values = {"paired": None, "paired_drawing": None, **supervised.tuning_section(training, probe)}
    else:
        comparisons = [pair for pair in probe.comparisons if _same_reading(pair, probe.paired)]
        drawing = forest.paired_difference("", probe.paired).drawing if probe.paired else None
        values = {
            "groups": forest.forest(forest.planned_results(probe.rows, probe.paired), comparisons),
            "all_rows": probe.rows,
            "differences": [],
            "paired": probe.paired,
            "paired_drawing": drawing,
            "label_curve": label_curve(probe.labelled, probe.rows, probe.paired),
        }
    values["subgroups"] = subgroup_tables(probe.subgroups)
    missing = [] if values["groups"] else [Missing("the probe", "probe.json holds no row", "octjepa probe")]
    if _has_other_weights(contents):
        why = "embeddings.parquet was made with other weights than the run has now, and the results below are of those"
        missing.append(Missing("a probe of the run's weights", why, "octjepa embed, then octjepa probe"))
    return values, missing


def _has_other_weights(contents: Contents) -> bool:
    """Whether the embeddings are of another checkpoint than the run is loaded as, for example of an earlier one."""
    if contents.run is None or contents.embeddings is None or not contents.embeddings.weights:
        return False
    from octjepa.encoders import load_encoder

    try:
        return load_encoder(contents.run.path).weights_hash() != contents.embeddings.weights
    except OctjepaError:  # no checkpoint, which other sections report
        return False


def _same_reading(pair: ProbePaired, paired: ProbePaired | None) -> bool:
    return paired is not None and (pair.name, pair.probe, pair.pool, pair.reference) == (
        paired.name,
        paired.probe,
        paired.pool,
        paired.reference,
    )


@section("comparison", "Comparison", "the comparison of runs", _PRETRAINED)
def _comparison(contents: Contents) -> Built:
    if contents.run is None or not contents.compared:
        return None, []
    return vars(compare_runs([contents.run, *contents.compared])), []


@section("occlusion", "Occlusion", "the occlusion maps", (*_PRETRAINED, "tuning"))
def _occlusion(contents: Contents) -> Built:
    store, training, what = contents.store, contents.training, "the occlusion maps"
    if store is None or training is None:
        return None, contents.missing_parts("the store", "the run")
    if contents.kind == "tuning":
        if not (contents.root / "predictions.parquet").is_file():
            return None, [Missing(what, "there is no predictions.parquet here", "octjepa finetune --resume")]
        maps = occlusion.tuning_maps(store, contents.root)
        if maps is None:
            return None, [Missing(what, "no test volume has a label", "octjepa finetune with more labels")]
    else:
        if different := _different_contract(contents, store, what):
            return None, different
        maps = occlusion.run_maps(store, training.path)
        if maps is None:
            return None, [Missing(what, "the store holds no held-out raster volume", "octjepa split")]
    return {"maps": maps}, []


@section("files", "Files", "the files")
def _files(contents: Contents) -> Built:
    if contents.store is None:
        return None, contents.missing_parts("the store")
    store = contents.store
    values = {
        "refused": refused_files(store, contents.root),
        "accepted": accepted_files(store),
        "volumes": len(store.table),
    }
    return values, []


@section("reproduce", "Reproduce", "the commands")
def _reproduce(contents: Contents) -> Built:
    commands: list[str] = []
    about = contents.training.about if contents.training is not None else {}
    if contents.kind == "demo" and contents.phantom:
        commands.append("octjepa demo --out DIR")
    if contents.run is not None:
        commands += [
            "octjepa ingest FILES --store STORE --recipe recipe.yaml",
            "octjepa pretrain recipe.yaml --store STORE --out RUN",
        ]
        if contents.embeddings:
            commands.append("octjepa embed RUN --store STORE --out embeddings.parquet")
        if contents.probe:
            targets = sorted({row.target for row in contents.probe.rows} - {"macro", ""})
            options = " ".join(f"--target {target}" for target in targets)
            commands.append(f"octjepa probe embeddings.parquet --labels LABELS.tsv {options}".rstrip())
    elif contents.kind == "tuning":
        columns = dict.fromkeys(target["target"].partition("=")[0] for target in about.get("targets", ()))
        options = "".join(f" --target {column}" for column in columns)
        commands.append(
            f"octjepa finetune recipe.yaml{options} --from ENCODER --store STORE --labels LABELS.tsv --out OUT"
        )
    elif contents.kind == "segmentation":
        commands.append(
            "octjepa segment recipe.yaml --from ENCODER --store STORE --labels LABELS --classes "
            f"{','.join(about['classes'])} --out OUT"
        )
    elif contents.kind == "store":
        commands.append("octjepa ingest FILES --store STORE")
    return {"commands": commands}, []
