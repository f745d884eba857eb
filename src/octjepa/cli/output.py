"""A verb's result on stdout: figures and tables for people, or one JSON object.

With JSON, stdout holds that object and nothing else; a figure that is not finite is null there.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from octjepa.errors import UsageError
from octjepa.metrics.findings import BASELINES

if TYPE_CHECKING:
    from octjepa.convert.scans import ConvertedScans
    from octjepa.tasks.segmenter.scan_segmentation import SegmentedScans

_FIGURE = {"value", "low", "high"}  # the keys of one, with its interval


def print_result(payload: Mapping[str, Any], as_json: bool, rows: str = "", primary: Collection[str] = ()) -> None:
    """Prints a verb's result. `rows` names the key that holds probe results: as text they become a table.

    The table keeps the metrics of `primary`; JSON always holds everything. Of the processes of a launcher, which all
    hold the same result, rank 0 prints it.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(_plain(payload), allow_nan=False), flush=True)
        return
    shown = {key: value for key, value in payload.items() if key != rows and value not in ("", None, [], {})}
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        print(f"{key:<{width}}  {_text(value)}")
    if rows:
        _print_probe_table(payload[rows], primary)
    sys.stdout.flush()


def print_probe(payload: Mapping[str, Any], rows: str, as_json: bool) -> None:
    """Prints each target's primary metric as a table, then on stderr the paired difference and where the rest is."""
    from octjepa.metrics.scores import PRIMARY_METRIC

    primary = set(PRIMARY_METRIC.values())
    paired = payload["paired"]
    if as_json:
        print_result(payload, as_json)
        return
    print_result({key: value for key, value in payload.items() if key != "paired"}, as_json, rows, primary)
    if paired:
        pair = f"{paired['name']} minus {paired['reference']}, {paired['target']} {paired['metric']}"
        how = f"{paired['probe']}, {paired['pool']}; same {paired['n_people']} test people"
        print(f"{pair}: {interval(paired, 'difference')} ({how})", file=sys.stderr)
    other_metrics = sum(row["metric"] not in primary for row in payload[rows])
    if other_metrics:
        print(f"{other_metrics} more figures (other metrics) with --json", file=sys.stderr)


def print_checks(payload: Mapping[str, Any], as_json: bool) -> None:
    """Prints the checks of `doctor`: a line each, and below those that are not ok what was expected and what to do."""
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
    sys.stdout.flush()


def check_output_file(out: Path) -> None:
    """Raises UsageError before the work where its result could not be written to the file `out`."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give --out the name of a file")
    if not out.parent.is_dir():
        raise UsageError(f"no folder {out.parent} to write {out.name} into: create it first")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"{out.parent} may not be written to: give --out a file elsewhere")


def check_output_folder(out: Path, instead: str = "a folder") -> None:
    """Raises UsageError where `out` is a file."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give --out {instead}")


def interval(figure: Mapping[str, Any], key: str = "value") -> str:
    """`0.873 [0.81, 0.92]`; without an honest interval the figure alone, without a figure `none`."""
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


def print_subgroups(scored: Sequence[Mapping[str, Any]], primary: Collection[str]) -> None:
    """A table of the figures by group; a group that is too small to be measured has the reason instead."""
    lines: list[Sequence[str]] = [("name", "target", "subgroup", "metric", "value [95 %]", "people")]
    for one in scored:
        if one["metric"] in primary:
            head, column = (one["name"], one["target"]), one["column"]
            for group, figure in one["groups"].items():
                cells = (f"{column} {group}", one["metric"], interval(figure), str(figure["n_people"]))
                lines.append((*head, *cells))
            lines += [
                (*head, f"{column} {group}", one["metric"], reason, "") for group, reason in one["left_out"].items()
            ]
    if len(lines) > 1:
        print_table(lines)


def print_converted(made: ConvertedScans) -> None:
    """Prints a line for each scan, its notes below it, and the refused scans."""
    lines: list[Sequence[str]] = [("file", "shape", "spacing mm", "eye", "device")]
    for one in made.scans:
        shape = " x ".join(map(str, one.shape))
        lines.append((one.file, shape, ", ".join(f"{mm:.4g}" for mm in one.spacing_mm), one.eye or "-", one.device))
    if made.scans:
        print_table(lines)
    for one in made.scans:
        for note in one.notes:
            print(f"note on {one.scan}: {note}")
    for refused in made.refused:
        print(f"refused {refused.scan}: {refused.reason}: {refused.detail}; {refused.to_do}")
    sys.stdout.flush()


def print_segmented(made: SegmentedScans, page: Path) -> None:
    """Prints a line for each scan, its notes below it, the refused scans, and where the page is."""
    lines: list[Sequence[str]] = [("scan", "eye", "central um", "intraretinal mm3", "subretinal mm3", "sub-RPE mm3")]
    for one in made.scans:
        central = one.thickness_um["central"]
        volumes = ["-" if value is None else f"{value:.3f}" for value in one.fluid_mm3.values()]
        lines.append((one.scan, one.eye or "-", "-" if central is None else f"{central:.0f}", *volumes))
    if made.scans:
        print_table(lines)
    for one in made.scans:
        for note in one.notes:
            print(f"note on {one.scan}: {note}")
    for refused in made.refused:
        print(f"refused {refused.scan}: {refused.reason}: {refused.detail}; {refused.to_do}")
    print(f"page  {page}", flush=True)


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
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


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
