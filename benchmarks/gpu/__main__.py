"""`scripts/gpu/campaign`: what has never run on a GPU, in steps that are kept as they end.

scripts/gpu/campaign --out FOLDER [--minutes 9]     # call it again until it says that all is done
scripts/gpu/campaign --out FOLDER --rehearse        # the same lines on a CPU with 24 people
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import time
from pathlib import Path

import torch

from octjepa.cli.failures import exit_with_message
from octjepa.doctor.accelerator import accelerator_checks
from octjepa.errors import UsageError
from octjepa.locks import writer_lock
from octjepa.progress import set_quiet

from . import fast, learn, one_gpu, right
from .campaign import RESULTS, Campaign, Step
from .page import PARTS, write_page
from .settings import FULL, REHEARSAL, SMALLEST, Settings

STEPS: tuple[Step, ...] = (*right.STEPS, *fast.STEPS, *learn.STEPS, *one_gpu.STEPS)
MORE = 75  # the exit code where steps are left for another call (EX_TEMPFAIL of sysexits)
_SHORTEST = 45.0  # seconds for which a step that can be split is begun


def main(arguments: list[str] | None = None) -> int:
    """0: all is done; 75: call again; 1: all was tried and something failed or is not right."""
    given = _parser().parse_args(arguments)
    settings = SMALLEST if given.smallest else REHEARSAL if given.rehearse or given.smallest else FULL
    if given.list:
        print("\n".join(f"{step.part:7} {step.name:17} {step.seconds:5.0f} s" for step in STEPS))
        return 0
    if given.out is None:
        raise UsageError("--out FOLDER is missing: where results, page and weights are written")
    _check_device(settings)
    set_quiet(True)
    work = given.work or given.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    with writer_lock(work):
        if given.earlier and not (work / RESULTS).is_file():
            shutil.copyfile(given.earlier, work / RESULTS)
        campaign = Campaign(settings, work, given.out, given.minutes * 60)
        if campaign.results["settings"] != settings.name:
            raise UsageError(
                f"{work} holds a campaign of the settings {campaign.results['settings']}: name another --work"
            )
        try:
            return _run(campaign, _selected(given.only), given.again)
        finally:
            campaign.close()


def _run(campaign: Campaign, steps: list[Step], again: bool = False) -> int:
    left = []
    needs_cohorts = any(step.part == "learn" and not campaign.is_done(step.name) for step in steps)
    if needs_cohorts and any(step.part == "right" and not campaign.is_done(step.name) for step in steps):
        campaign.begin_cohorts()  # part 1 leaves most cores idle
    for step in steps:
        if campaign.is_done(step.name) and not again:
            continue
        enough = _SHORTEST if step.name in learn.SPLITS else step.seconds
        if campaign.settings.name == "full" and campaign.seconds_left() < enough:
            left.append(step.name)
            continue
        started = time.monotonic()
        campaign.take(step)
        entry = campaign.steps[step.name]
        _say(f"{step.part:7} {step.name:17} {entry['state']:10} {time.monotonic() - started:6.1f} s", entry)
        if entry["state"] == "unfinished":
            left.append(step.name)
        write_page(campaign, STEPS)
    campaign.write()
    write_page(campaign, STEPS)
    bad = [name for name, one in campaign.steps.items() if one["state"] == "failed" or _is_wrong(one)]
    if left:
        print(f"not done yet, call again: {', '.join(left)}", flush=True)
        return MORE
    print(f"all was tried; failed or not right: {', '.join(bad) or 'nothing'}", flush=True)
    return 1 if bad else 0


def _selected(names: list[str] | None) -> list[Step]:
    """The steps with these names or of these parts, in the order of the names; all steps if there are none."""
    if not names:
        return list(STEPS)
    return list(dict.fromkeys(step for name in names for step in STEPS if name in (step.part, step.name)))


def _is_wrong(entry: dict) -> bool:
    return entry.get("figures", {}).get("right") is False


def _say(line: str, entry: dict) -> None:
    print(line + (f"  {entry['error']}" if "error" in entry else "  NOT RIGHT" if _is_wrong(entry) else ""), flush=True)


def _check_device(settings: Settings) -> None:
    """Raises UsageError with one line where the campaign cannot run here."""
    try:
        importlib.metadata.version("octjepa")
    except importlib.metadata.PackageNotFoundError:
        to_do = (
            "install the wheels that scripts/gpu/wheels collected (octjepa's own is among them), put them on PYTHONPATH"
        )
        raise UsageError(f"octjepa is not installed for {sys.executable}: {to_do}") from None
    if settings.name != "full":
        return
    if not torch.cuda.is_available() or accelerator_checks()[0].state == "failed":
        check = accelerator_checks()[0]
        raise UsageError(
            f"{check.found}. {check.to_do or 'Run it on a machine with an NVIDIA GPU'}; --rehearse on a CPU"
        )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError(f"{accelerator_checks()[0].found}: half of the campaign measures bf16; take a newer GPU")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, help="results.json, campaign.md, exam.json, weights; files of 15 MiB at most")
    add("--work", type=Path, help="phantoms, runs and checkpoints, kept between calls (default: work in --out)")
    add("--earlier", type=Path, help="results.json of an earlier machine: its steps are not repeated")
    add("--minutes", type=float, default=9.0, help="after which this call ends; no step is begun that takes longer")
    names = [*PARTS, *(step.name for step in STEPS)]
    add("--only", metavar="PART|STEP", nargs="+", choices=names, help="these parts or steps, in this order")
    add("--again", action="store_true", help="measure anew what is done, say with --only, after a mend")
    add("--rehearse", action="store_true", help="on a CPU, with 24 people and tiny networks")
    add("--smallest", action="store_true", help="a rehearsal that is smaller still, for the tests")
    add("--list", action="store_true", help="the steps and the seconds that they take; runs nothing")
    return parser


if __name__ == "__main__":
    with exit_with_message(lambda: None):
        sys.exit(main())
