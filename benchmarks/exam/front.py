"""The front page of the exam: one answer, one table, one plot, for the encoders that users get.

In go the records of `benchmarks/records` (`measured.py`), out come `README.md`, `packaged.md` with every interval, and
`objectives.svg`. The same records give the same bytes. Rows of the first exam are on another page (`page.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.svg import save_svg

from octjepa.files import write_atomic

from .measured import (
    BASELINES,
    COMMANDS,
    COSTS,
    ENCODERS,
    MEAN,
    OBJECTIVES,
    OWN_RANDOM,
    RANDOM,
    TOKENS,
    Measured,
    Part,
    Records,
    Task,
    not_measured,
    tasks_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = Path(__file__).with_name("front.md")
DETAILS = Path(__file__).with_name("packaged.md")
FIRST = ENCODERS[0]  # the encoder to try first, which the verdicts are about
NAMES = {
    "random_unet": "random, U-Net",
    "random_init": "random, transformer",
    "position": "`position`",
    "context": "`context`",
    "intensity": "`intensity`",
}


def write_front_page(records: Records, folder: Path) -> None:
    """README.md, packaged.md and objectives.svg in `folder`. Raises UsageError for a record that is not there."""
    tasks = tasks_of(records)
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "README.md": TEMPLATE.read_text(encoding="utf-8").format(
            answer=answer(tasks), table=table(tasks), not_measured=_not_measured(records)
        ),
        "packaged.md": DETAILS.read_text(encoding="utf-8").format(sections="\n\n".join(map(section, tasks))),
    }
    for name, text in pages.items():
        write_atomic(folder / name, lambda file, text=text: file.write(text.encode()))
    plot_objectives(records, folder / "objectives.svg")


def answer(tasks: Sequence[Task]) -> str:
    """How many tasks each encoder leads, against each baseline, and the goals that are met and missed."""
    lines = []
    for encoder in ENCODERS:
        counts = []
        for baseline in (*BASELINES, OWN_RANDOM[encoder]):
            pairs = [task.times_better(encoder, baseline) for task in tasks]
            better, compared = (sum(pair[k] for pair in pairs) for k in (0, 1))
            if not compared:
                continue
            name = "its random weights" if baseline in RANDOM else f"`{baseline}`"
            counts.append(f"{name} in {better} of {compared}")
        met, missed = goals(tasks, encoder)
        lines.append(
            f"- `{encoder}` is clearly ahead of {', of '.join(counts)} comparisons. "
            f"Goals met: {len(met)} of {len(met) + len(missed)}."
        )
    return "\n".join(lines)


def _not_measured(records: Records) -> str:
    missing = not_measured(records)
    return f"Not measured yet: {', '.join(missing)}. " if missing else ""


def goals(tasks: Sequence[Task], encoder: str) -> tuple[list[Task], list[Task]]:
    """The tasks whose goal the encoder meets, and misses."""
    requested = [(task, task.goal.is_met(task, encoder)) for task in tasks if task.goal is not None]
    return [task for task, met in requested if met], [task for task, met in requested if met is False]


def table(tasks: Sequence[Task]) -> str:
    """A line for each task."""
    columns = (*ENCODERS, *BASELINES, *RANDOM)
    heads = ["task and metric", *(NAMES.get(one, f"`{one}`") for one in columns), "dense"]
    heads += [f"`{FIRST}` is", "goal"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for task in tasks:
        cells = [f"{task.text}; {task.metric}"]
        cells += [_cell(task, one, with_interval=one == FIRST) for one in columns]
        cells += ["-" if task.reference is None else f"{task.reference:.{task.digits}f}", verdict(task), _goal(task)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(task: Task, row: str, with_interval: bool) -> str:
    value = task.value(row)
    if value is None and row == "position":
        row, value = "outline", task.value("outline")  # of surfaces: which patches hold tissue
    if value is None:
        return "-"
    interval = task.interval(row)
    return f"{value:.{task.digits}f}" + (_range(task, interval) if with_interval and interval else "")


def _range(task: Task, interval: Measured, clip: bool = True) -> str:
    """The interval in parentheses after a space; "" if there is none."""
    low, high = interval.low, interval.high
    if low is None or high is None:
        return ""
    if clip and task.metric in ("AP", "AUROC"):
        low, high = max(low, 0.0), min(high, 1.0)  # Student's t knows no limits
    return f" ({low:.{task.digits}f} to {high:.{task.digits}f})"


def verdict(task: Task, row: str = FIRST) -> str:
    """Which baselines `row` is clearly ahead of."""
    random = task.random_of(row)
    found = {one: task.times_better(row, one) for one in (*BASELINES, "outline", *([random] if random else []))}
    tested = {baseline: pair for baseline, pair in found.items() if pair[1]}
    own = ""
    if random != OWN_RANDOM[row]:
        own = f"; random weights of {'the transformer, not its own' if random else 'its network not compared'}"
    if len(task.parts) > 1:
        counts = ", ".join(f"{_short(name)} {better} of {compared}" for name, (better, compared) in tested.items())
        mean = ""
        if task.mean is not None and task.mean.values[row].low is not None:
            mean = f"by its mean {_of_mean(task, task.mean, row, list(tested))}; each: "
        return f"{mean}ahead of {counts}{own}"
    behind = [_short(name) for name, (better, _) in tested.items() if not better]
    if not behind:
        return "ahead of all" + own
    if len(behind) == len(tested):
        return "not clearly ahead" + own
    return f"ahead of all but {', '.join(behind)}" + own


def _of_mean(task: Task, mean: Part, row: str, baselines: Sequence[str]) -> str:
    """Which of the baselines the mean over parts is clearly ahead of."""
    ahead = [_short(one) for one in baselines if mean.less[row, one].is_better(task.lower_is_better)]
    return f"ahead of {', '.join(ahead)}" if ahead else "not clearly ahead"


def _short(baseline: str) -> str:
    return "random" if baseline in RANDOM else "position" if baseline == "outline" else baseline


def _goal(task: Task) -> str:
    if task.goal is None:
        return ""
    found = {row: task.goal.is_met(task, row) for row in ENCODERS}
    met = [f"`{row}`" for row, reached in found.items() if reached]
    unknown = [f"`{row}`" for row, reached in found.items() if reached is None]
    text = "met" if len(met) == len(ENCODERS) else f"met by {', '.join(met)}" if met else "**missed**"
    if len(unknown) == len(ENCODERS):
        text = "not measured"
    elif unknown:
        text += f", not measured for {', '.join(unknown)}"
    return f"{task.goal.text}: {text}"


def section(task: Task) -> str:
    """The part of packaged.md on a task: values, then differences, of every metric."""
    parts = dict(task.parts) if task.mean is None else {**task.parts, MEAN: task.mean}
    names = list(parts)
    single = len(names) == 1
    heads = [""] + ([task.metric] if single else [f"{name}, {task.metric}" for name in names])
    rows = list(next(iter(parts.values())).values)
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        lines.append("| " + " | ".join([f"`{row}`", *(_full(task, parts[name].values[row]) for name in names)]) + " |")
    for pair in next(iter(parts.values())).less:
        cells = [_full(task, parts[name].less[pair], clip=False) for name in names]
        lines.append("| " + " | ".join([f"`{pair[0]}` less `{pair[1]}`", *cells]) + " |")
    return f"## {task.text[:1].upper()}{task.text[1:]}\n\n" + "\n".join(lines)


def _full(task: Task, one: Measured, clip: bool = True) -> str:
    return f"{one.value:.{task.digits}f}{_range(task, one, clip)}"


# --- the plot

_PANELS = (("exam", "phantoms of the exam's kind"), ("shifted", "`shifted` phantoms"))
_LINES = {"context": "--", "random_init": ":", "random_unet": "-."}


def plot_objectives(records: Records, path: Path) -> None:
    """Average precision by token against CPU-hours: each run of each objective, and the packaged encoders."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for axes, (cohort, title) in zip(panels, _PANELS, strict=True):
        _plot_cohort(axes, records, cohort)
        axes.set_title(title.replace("`", ""), fontsize="medium")
        axes.set_xlabel("CPU-hours of training")
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
    panels[0].set_ylabel("average precision by token")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    save_svg(figure, path)


def hours_of(run: Mapping[str, Any], seconds: Mapping[str, float]) -> float:
    """CPU-hours of the updates of a run on the machine of `seconds`: of an update, by setting.

    A setting that was not timed is that of a longer run, whose updates cost what those of the first setting cost.
    """
    return run["updates"] * seconds.get(run["setting"], next(iter(seconds.values()))) / 3600


def _plot_cohort(axes: Axes, records: Records, cohort: str) -> None:
    runs = list(records.at(OBJECTIVES, COMMANDS[OBJECTIVES], "test"))
    if records.has(OBJECTIVES, COMMANDS[OBJECTIVES], "longer"):
        runs += records.at(OBJECTIVES, COMMANDS[OBJECTIVES], "longer")
    seconds = records.at(OBJECTIVES, COMMANDS[OBJECTIVES], "seconds_of_update")
    objectives = list(dict.fromkeys(run["objective"] for run in runs))
    for number, objective in enumerate(objectives):
        mine = [run for run in runs if run["objective"] == objective]
        hours = [hours_of(run, seconds[objective]) for run in mine]
        values = [run["values"][cohort]["with_drusen"]["value"] for run in mine]
        axes.plot(hours, values, "os^DvP*X"[number % 8], color=f"C{number}", label=objective, ms=5)
    costs = records.json(COSTS, COMMANDS[COSTS])
    where = ("linear", cohort, "values")
    for number, encoder in enumerate(ENCODERS):
        if not records.has(TOKENS, COMMANDS[TOKENS], *where, encoder):
            continue
        value = records.measured(TOKENS, COMMANDS[TOKENS], *where, encoder, "with_drusen")
        hours = float(costs[encoder]["cpu_hours"])
        assert value.low is not None
        assert value.high is not None
        error = [[max(value.value - value.low, 0)], [max(value.high - value.value, 0)]]
        color = ("black", "0.35", "0.6")[number]
        fill = "white" if "gpu_seconds" in costs[encoder] else color  # hours of a CPU are not all that it took
        axes.errorbar([hours], [value.value], error, fmt="*", ms=10, color=color, mfc=fill, capsize=3, label=encoder)
    for name, style in _LINES.items():
        if not records.has(TOKENS, COMMANDS[TOKENS], *where, name):
            continue
        value = records.measured(TOKENS, COMMANDS[TOKENS], *where, name, "with_drusen")
        axes.axhline(value.value, color="0.4", ls=style, lw=1, label=name)
