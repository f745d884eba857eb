"""Prints the result of a command on stdout: a short text for people, or one JSON object.

The text has at most about 15 lines and ends with the path of the page or file to open. It leaves out counts of zero and
all but the most important metrics. `octjepa -v` prints everything. With `--json`, stdout holds one JSON object and
nothing else; values that are not finite are null.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

from octjepa.errors import NothingReadError, TooManyLostError, UsageError, counted
from octjepa.metrics.findings import BASELINES, FEWEST_TEST_PEOPLE
from octjepa.parsing import printable

if TYPE_CHECKING:
    from octjepa.convert.scans import ConvertedScans
    from octjepa.evaluate.results import ColumnScores
    from octjepa.ingest.refused_scan import RefusedScan
    from octjepa.tasks.segmenter.adapt_scans import AdaptedFolder
    from octjepa.tasks.segmenter.scan_segmentation import SegmentedScans
    from octjepa.tasks.segmenter.single_bscans import SegmentedBScans

_FIGURE = {"value", "low", "high"}  # keys of a metric with its interval
_MOST_TARGETS = 8  # lines of a table without -v
_OTHER_TABLES = {".csv", ".tsv", ".txt", ".xls", ".xlsx", ".ods", ".json", ".jsonl", ".feather", ".arrow", ".orc"}
_OTHER_TABLES |= {".npy", ".npz", ".h5", ".hdf5", ".mat", ".pkl", ".pickle", ".sqlite", ".db"}


def is_verbose() -> bool:
    """Whether the user requested all results with `octjepa -v`."""
    return logging.getLogger("octjepa").isEnabledFor(logging.INFO)


def print_result(payload: Mapping[str, Any], as_json: bool, rows: str = "", primary: Collection[str] = ()) -> None:
    """Prints the result of a command. `rows` is the key of the evaluation results, which become a table.

    The table shows the metrics in `primary`; JSON always has all metrics. Under torchrun only rank 0 prints, because
    all ranks have the same result.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(_plain(payload), allow_nan=False), flush=True)
        return
    if rows and not is_verbose():
        print_table(ranking_lines(payload[rows], primary))
    shown = {key: value for key, value in payload.items() if key != rows and not _is_left_out(value)}
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        print_text(f"{key:<{width}}  {_text(value)}")
    if rows and is_verbose():
        _print_probe_table(payload[rows], primary)
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Prints text that may hold words of other people's files, whose control characters would change the terminal."""
    print(printable(text, sys.maxsize))


def _is_left_out(value: Any) -> bool:
    """Empty values, and without -v also counts of zero."""
    is_zero_count = isinstance(value, int) and not isinstance(value, bool) and value == 0
    return value in ("", None, [], {}) or (is_zero_count and not is_verbose())


def print_probe(payload: Mapping[str, Any], rows: str, as_json: bool, page: Path | None = None) -> None:
    """Prints the primary metric of each target for the encoders and the baselines, and the paired difference.

    page: the file that holds all results, printed as the last line.
    """
    from octjepa.metrics.scores import PRIMARY_METRIC

    primary = set(PRIMARY_METRIC.values())
    paired = payload["paired"]
    if as_json:
        print_result(payload, as_json)
        return
    is_printing = os.environ.get("RANK", "0") == "0"
    if is_verbose():
        print_result({key: value for key, value in payload.items() if key != "paired"}, as_json, rows, primary)
    elif is_printing:
        print_table(comparison_lines(payload[rows], primary, paired))
    if is_printing:
        print("\n".join(conclusion_lines(payload[rows], paired)), flush=True)
    if page is not None:
        print(f"all results  {page}", flush=True)
    elif not is_verbose():
        print("all results: --out FILE.json, or -v before the command", file=sys.stderr)


def print_demo(payload: Mapping[str, Any], as_json: bool) -> None:
    """Prints the results of the demo: the packaged models first, then the pretraining, last the page to open."""
    if as_json:
        print_result(payload, as_json)
        return
    from octjepa.metrics.scores import PRIMARY_METRIC

    segmenter = payload["segmenter"]
    dice = "" if segmenter["fluid_dice"] is None else f", fluid Dice {segmenter['fluid_dice']:.2f}"
    eyes = counted(segmenter["eyes"], "synthetic eye")
    print(f"packaged segmenter, {eyes}: boundary error {segmenter['boundary_error_um']:.1f} um{dice}")
    baseline, loss = min(payload["baseline_loss"].items(), key=lambda item: float(item[1]))
    trivial = f"best trivial predictor {loss:.3f} ({baseline.replace('_', ' ')})"
    print(f"pretraining, {counted(payload['updates'], 'update')}: loss {payload['loss']:.3f}, {trivial}")
    if is_verbose():
        _print_probe_table(payload["probe"], set(PRIMARY_METRIC.values()))
    else:
        print_table(comparison_lines(payload["probe"], set(PRIMARY_METRIC.values()), payload["paired"]))
    print("\n".join(conclusion_lines(payload["probe"], payload["paired"])))
    print(f"page  {payload['report']}", flush=True)


def comparison_lines(
    results: Sequence[Mapping[str, Any]], primary: Collection[str], paired: Mapping[str, Any] | None
) -> list[Sequence[str]]:
    """One line per target, one column per encoder and for the two strongest baselines.

    All columns have the probe and the pooling of the paired comparison. A baseline without a pooling that this probe
    did not read has its first probe.
    """
    chosen = [result for result in results if result["metric"] in primary]
    probe = paired["probe"] if paired else chosen[-1]["probe"] if chosen else ""
    pool = paired["pool"] if paired else chosen[-1]["pool"] if chosen else ""
    cells: dict[tuple[str, str], Mapping[str, Any]] = {}
    for result in chosen:
        matches = result["probe"] in (probe, "constant") or result["pool"] == "none"
        key = result["name"], result["target"]
        if matches and result["pool"] in (pool, "none") and (key not in cells or result["probe"] == probe):
            cells[key] = result
    targets = sorted(dict.fromkeys(target for _, target in cells), key=lambda target: target != "macro")
    names = list(dict.fromkeys(name for name, _ in cells))
    trained = [name for name in names if name.partition(":")[0] not in BASELINES]
    untrained = [name for name in names if name.partition(":")[0] == "untrained"][:1]
    others = [name for name in names if name not in trained and not name.startswith("untrained")]
    first = targets[0] if targets else ""
    others.sort(key=lambda name: -_sortable(cells.get((name, first))))
    columns = [*trained[:3], *untrained, *others[:1]]
    metrics = list(dict.fromkeys(result["metric"] for result in cells.values()))
    head = f"{' or '.join(metrics)} ({probe} probe, {pool})"
    lines: list[Sequence[str]] = [(head, *columns)]
    for target in targets[:_MOST_TARGETS]:
        row = (cells.get((name, target)) for name in columns)
        lines.append((target, *("" if cell is None else interval(cell) for cell in row)))
    if len(targets) > _MOST_TARGETS:
        lines.append((f"and {counted(len(targets) - _MOST_TARGETS, 'more target')}", *("" for _ in columns)))
    return lines


def conclusion_lines(results: Sequence[Mapping[str, Any]], paired: Mapping[str, Any] | None) -> list[str]:
    """The paired difference, or that the test set is too small to conclude anything."""
    people = max((result.get("n_people") or 0 for result in results), default=0)
    lines = []
    if paired and paired["difference"] is not None:
        pair = f"{paired['name']} minus {paired['reference']}, {paired['target']} {paired['metric']}"
        lines.append(f"{pair}: {interval(paired, 'difference')}, same {counted(paired['n_people'], 'test person')}")
        people = paired["n_people"]
    if people < FEWEST_TEST_PEOPLE:
        lines.append(
            f"{counted(people, 'test person')}: too few to conclude anything; a probe needs at least "
            f"{FEWEST_TEST_PEOPLE} test people"
        )
    return lines


def ranking_lines(results: Sequence[Mapping[str, Any]], primary: Collection[str]) -> list[Sequence[str]]:
    """One line per encoder or baseline, in the order of the results, and a column for each of the first targets."""
    chosen = [result for result in results if result["metric"] in primary]
    targets = sorted(dict.fromkeys(result["target"] for result in chosen), key=lambda target: target != "macro")[:3]
    names = list(dict.fromkeys(result["name"] for result in chosen))
    lines: list[Sequence[str]] = [("", *targets)]
    for name in names[:_MOST_TARGETS]:
        row = (
            next((selected for selected in chosen if (selected["name"], selected["target"]) == (name, target)), None)
            for target in targets
        )
        lines.append((name, *("" if cell is None else f"{cell['metric']} {interval(cell)}" for cell in row)))
    if len(names) > _MOST_TARGETS:
        lines.append((f"and {len(names) - _MOST_TARGETS} more", *("" for _ in targets)))
    return lines


def _sortable(result: Mapping[str, Any] | None) -> float:
    """The value of a result, for sorting; lowest without a value."""
    value = None if result is None else result["value"]
    return -math.inf if value is None or not math.isfinite(value) else float(value)


def print_checks(payload: Mapping[str, Any], as_json: bool) -> None:
    """Prints the checks of `doctor`, below each problem what to do, and last whether the machine is ready."""
    if as_json:
        print_result(payload, as_json)
        return
    lines: list[Sequence[str]] = []
    for check in payload["checks"]:
        lines.append((check["state"], check["name"], check["found"]))
        if check["state"] != "ok":
            lines.append(("", "", f"expected: {check['expected']}"))
        if check["to_do"]:
            lines.append(("", "", check["to_do"]))
    print_table(lines)
    if payload["ok"]:
        warnings = sum(check["state"] != "ok" for check in payload["checks"])
        print("Ready." if not warnings else f"Ready, with {counted(warnings, 'warning')} above.")
    sys.stdout.flush()


def check_output_file(out: Path, *inputs: Path | None) -> None:
    """Raises UsageError before the work where its result could not be written to the file `out`, or would replace one
    of the files `inputs` that it is made from."""
    if out.exists() and any(path is not None and path.exists() and out.samefile(path) for path in inputs):
        raise UsageError(f"{out} is read by this command, and its result would replace it: give --out another name")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give --out the name of a file")
    if not out.parent.is_dir():
        raise UsageError(f"no folder {out.parent} to write {out.name} into: create it first")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"{out.parent} may not be written to: give --out a file elsewhere")


def check_parquet_file(out: Path, *inputs: Path | None) -> None:
    """As `check_output_file`, for a Parquet file. Also raises UsageError if the suffix of `out` names another format
    of tables."""
    if out.suffix.lower() in _OTHER_TABLES:
        raise UsageError(
            f"{out} would hold a Parquet table, not {out.suffix}: give --out {out.with_suffix('.parquet')}"
        )
    check_output_file(out, *inputs)


def check_output_folder(out: Path, instead: str = "a folder") -> None:
    """Raises UsageError where `out` is a file."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give --out {instead}")


class ScanResults(Protocol):
    """The results of a command on scans: those of `scans`, and what was refused."""

    @property
    def scans(self) -> Sequence[object]: ...

    @property
    def refused(self) -> Sequence[RefusedScan]: ...

    @property
    def lost_share(self) -> float: ...

    def to_json(self) -> Mapping[str, Any]: ...


def check_lost(results: ScanResults, noun: str, done: str, max_lost: float, where: str = "") -> None:
    """Raises NothingReadError if no scan has a result, and TooManyLostError if more than `max_lost` were lost.

    noun, done: such as "scan" and "segmented". where: the end of the message, which says where the reasons are.
    """
    if not results.scans:
        raise NothingReadError(
            f"none of {counted(len(results.refused), noun)} could be {done}{where}", results.to_json()
        )
    if results.lost_share > max_lost:
        raise TooManyLostError(
            f"{results.lost_share:.0%} of the {noun}s were refused, more than --max-lost {max_lost:.0%}{where}",
            results.to_json(),
        )


def interval(figure: Mapping[str, Any], key: str = "value") -> str:
    """`0.873 [0.81, 0.92]`; without an honest interval only the value, without a value `none`."""
    if figure[key] is None or not math.isfinite(figure[key]):
        return "none"
    if figure["low"] is None or figure["high"] is None:
        return f"{figure[key]:.3f}"
    return f"{figure[key]:.3f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def _print_probe_table(results: Sequence[Mapping[str, Any]], primary: Collection[str]) -> None:
    """Target by target with the macro average first, encoders above the baselines."""
    targets = list(dict.fromkeys(result["target"] for result in results))
    chosen = [result for result in results if result["metric"] in primary]

    def order(result: Mapping[str, Any]) -> tuple[bool, int, int]:
        family = result["name"].partition(":")[0]
        rank = 1 + BASELINES.index(family) if family in BASELINES else 0
        return result["target"] != "macro", targets.index(result["target"]), rank

    columns = ("name", "target", "probe", "pool", "metric")
    cells = [
        (*(str(result[key]) for key in columns), interval(result), str(result["n"]))
        for result in sorted(chosen, key=order)
    ]
    print_table([(*columns, "value [95 %]", "n"), *cells])


def print_subgroups(scored: Iterable[tuple[tuple[str, str], ColumnScores]], primary: Collection[str]) -> None:
    """Prints a table of the metrics by group, with (name, target) of each. An unmeasured group has a reason instead."""
    lines: list[Sequence[str]] = [("name", "target", "subgroup", "metric", "value [95 %]", "people")]
    for head, result in scored:
        if result.metric in primary:
            for group, value in result.groups.items():
                cells = (f"{result.column} {group}", result.metric, interval(value.to_json()), str(value.n_people))
                lines.append((*head, *cells))
            lines += [
                (*head, f"{result.column} {group}", result.metric, reason, "")
                for group, reason in result.left_out.items()
            ]
    if len(lines) > 1:
        print_table(lines)


def _print_notes_and_refused(results: ConvertedScans | SegmentedScans) -> None:
    """Prints each note once, with the scan or the number of scans that have it, and the refused scans."""
    scans_of: dict[str, list[str]] = {}
    for scan in results.scans:
        for note in scan.notes:
            scans_of.setdefault(note, []).append(scan.shown)
    for note, scans in scans_of.items():
        print_text(f"note on {scans[0] if len(scans) == 1 else counted(len(scans), 'scan')}: {note}")
    for refused in results.refused:
        print_text(f"refused {refused.text}")


def print_converted(converted: ConvertedScans) -> None:
    """Prints a line for each scan, its notes below it, and the refused scans."""
    lines: list[Sequence[str]] = [("file", "shape", "spacing mm", "eye", "device")]
    for scan in converted.scans:
        shape = " x ".join(map(str, scan.shape))
        lines.append((scan.file, shape, ", ".join(f"{mm:.4g}" for mm in scan.spacing_mm), scan.eye or "-", scan.device))
    if any(scan.position for scan in converted.scans):  # of masked names
        positions = ["position", *(scan.position or "-" for scan in converted.scans)]
        lines = [(*line, position) for line, position in zip(lines, positions, strict=True)]
    if converted.scans:
        print_table(lines)
    _print_notes_and_refused(converted)
    sys.stdout.flush()


def print_segmented(segmented: SegmentedScans, page: Path) -> None:
    """Prints a line for each scan, its notes below it, the refused scans, and where the page is."""
    lines: list[Sequence[str]] = [("scan", "eye", "central um", "intraretinal mm3", "subretinal mm3", "sub-RPE mm3")]
    for scan in segmented.scans:
        central = scan.thickness_um["central"]
        volumes = ["-" if value is None else f"{value:.3f}" for value in scan.fluid_mm3.values()]
        lines.append((scan.shown, scan.eye or "-", "-" if central is None else f"{central:.0f}", *volumes))
    if segmented.scans:
        print_table(lines)
    _print_notes_and_refused(segmented)
    for note in segmented.notes:
        print_text(f"note: {note}")
    print(f"page  {page}", flush=True)


def print_adapted(adapted: AdaptedFolder, as_json: bool, images: bool = False) -> None:
    """Prints the scores of the networks on the held-out B-scans, the notes, and how to use the adapted network."""
    if as_json:
        print_result(adapted.to_json(), as_json)
        return
    lines: list[Sequence[str]] = [("network", "mean um", "fluid Dice", "step", "CPU seconds")]
    for candidate in adapted.candidates:
        um, dice = (math.nan, math.nan) if candidate.score is None else (candidate.score.mean_um, candidate.score.dice)
        shown = (f"{um:.1f}" if math.isfinite(um) else "-", f"{dice:.3f}" if math.isfinite(dice) else "-")
        lines.append((candidate.name, *shown, str(candidate.step), f"{candidate.cpu_seconds:.0f}"))
    print_table(lines)
    learned = counted(adapted.training_bscans, "B-scan")
    print(f"learned from {learned}; measured on {adapted.held_out_bscans} that were held out")
    for note in adapted.notes:
        print_text(f"note: {note}")
    what = "PICTURES --images" if images else "SCAN..."
    print(f"use it: octjepa segment {what} --model {shlex.quote(str(adapted.folder))} --out DIR", flush=True)


def print_segmented_bscans(segmented: SegmentedBScans) -> None:
    """Prints the first lines of the table, each note with its number of B-scans, the refused images, and the table."""
    lines: list[Sequence[str]] = [("image", "retina", "fluid share", "measured")]
    for image in segmented.images[:_MOST_TARGETS]:
        thickness, share = image.thickness["retina"], image.fluid_share
        retina = "-" if thickness is None else f"{thickness:.0f} {image.unit}"
        fluid = "-" if share is None else f"{share:.1%}"
        lines.append((image.shown, retina, fluid, f"{image.measured_share:.0%}"))
    if segmented.images:
        print_table(lines)
    if (more := len(segmented.images) - _MOST_TARGETS) > 0:
        print(f"... and {more} more")
    texts_of: dict[str, Counter[str]] = {}  # by the words before the colon: the numbers after it differ
    for image in segmented.images:
        for note in image.notes:
            texts_of.setdefault(note.partition(":")[0], Counter())[note] += 1
    for subject, texts in sorted(texts_of.items(), key=lambda item: -item[1].total()):
        text = next(iter(texts)) if len(texts) == 1 else subject
        print_text(f"note on {texts.total()} of {len(segmented.images)}: {text}")
    for refused in segmented.refused:
        print_text(f"refused {refused.text}")
    print(f"table  {segmented.table}", flush=True)


def print_table(lines: Iterable[Sequence[str]]) -> None:
    """Aligned columns, never wrapped: the output may be piped."""
    lines = list(lines)
    from rich.console import Console
    from rich.table import Table

    table = Table(*lines[0], box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for line in lines:
        table.add_row(*line)
    text = io.StringIO()
    Console(file=text, width=10_000, markup=False, highlight=False, emoji=False).print(table)
    print_text("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _plain(value: Any) -> Any:
    """Plain JSON data. Raises TypeError for what is none: nothing is turned into text unseen."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays, without importing it
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    """A value of a result as text for a terminal."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        if value.keys() >= _FIGURE:
            return interval(value)
        if value and all(isinstance(item, Mapping) and item.keys() >= _FIGURE for item in value.values()):
            width = max(map(len, value))
            return "".join(f"\n  {key:<{width}}  {_text(item)}" for key, item in value.items())
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], Mapping):
            return "".join("\n  " + "; ".join(map(_text, item.values())) for item in value)
        return f"[{', '.join(map(_text, value))}]" if value else "none"
    return str(value)
