"""What the page says in plain sentences about its figures, whichever way they fell. No sentence without its numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["good", "open", "bad", "none"]
PREDICTORS = {
    "constant": "the mean of all tokens",
    "position_mean": "the mean of that place in the eye",
    "copy_nearest": "a copy of the nearest visible token",
}
_PATH = re.compile(r"(?<![\w.…/:])(?:[A-Za-z]:)?[\\/](?:[^\s/\\'\":;,<>|()]+[\\/])+([^\s/\\'\":;,<>|()]*)")


@dataclass(frozen=True)
class Finding:
    """One result: the figure that stands large, and the sentence that says what it means."""

    title: str
    figure: str
    verdict: Verdict
    sentence: str


def number(value: Any, digits: int = 3) -> str:
    """A figure as text; a dash where there is none, never a zero in its place."""
    if value is None or isinstance(value, str) or not math.isfinite(float(value)):
        return "–"
    return f"{float(value):.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    return ("+" if value >= 0 else "") + number(value, digits)


def duration(seconds: Any) -> str:
    if seconds is None:
        return "–"
    whole = round(float(seconds))
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{float(seconds):.1f} s"


def pretext(validation: Mapping[str, Any] | None) -> Finding:
    """Does the learned predictor beat those that know nothing, on held-out people?"""
    title = "Predicting hidden tissue"
    if validation is None:
        return Finding(
            title, "–", "none", "There is no validation to read: nothing can be said about the pretext task."
        )
    ours = float(validation["val/cosine"])
    baselines = {name: float(validation[f"val/baseline/{name}"]) for name in PREDICTORS if _has(validation, name)}
    if not baselines or not math.isfinite(ours):
        return Finding(title, number(ours), "none", "The trivial predictors were not measured, so nothing is compared.")
    best = max(baselines, key=lambda name: baselines[name])
    beaten = [name for name in baselines if ours > baselines[name]]
    told = f"On held-out people the predictor reaches a cosine of {number(ours)} with the hidden tokens’ features. "
    rival = f"{PREDICTORS[best]} ({number(baselines[best])})"
    if len(beaten) == len(baselines):
        told += f"It beats all {len(baselines)} predictors that know nothing of the eye; the best of them is {rival}."
        told += _centred(validation)
        return Finding(title, number(ours), "good", told)
    unbeaten = " or ".join(name.replace("_", " ") for name in baselines if name not in beaten)
    told += f"It does not beat {unbeaten}. The best of these, {rival}, needs no learning: the task is not learned yet."
    return Finding(title, number(ours), "bad", told)


def _centred(validation: Mapping[str, Any]) -> str:
    """Whether that holds with every view centred, too; nothing where it was not measured."""
    ours = validation.get("val_centred/loss")
    losses = [validation.get(f"val_centred/baseline_loss/{name}") for name in PREDICTORS]
    measured = [float(value) for value in losses if value is not None]
    if ours is None or not measured:
        return ""
    holds = "also" if float(ours) < min(measured) else "not"
    return f" With every view centred it does so {holds}: loss {number(float(ours))} against {number(min(measured))}."


def _has(validation: Mapping[str, Any], name: str) -> bool:
    value = validation.get(f"val/baseline/{name}")
    return value is not None and math.isfinite(float(value))


@dataclass(frozen=True)
class _Contrast:
    """The words of a difference between two things measured on the same people."""

    title: str
    ours: str
    theirs: str
    both: str
    what: str  # may have helped


_TRAINED = _Contrast(
    "Trained minus untrained", "The probe on the trained encoder scores {0} than on", "the same network untrained",
    "the trained and the untrained encoder", "training",
)  # fmt: skip
_TUNED = _Contrast(
    "Tuned minus frozen", "The tuned encoder scores {0} than", "a linear probe on the same encoder frozen",
    "the tuned and the frozen encoder", "tuning",
)  # fmt: skip


_OVER_PRIOR = _Contrast(
    "Head minus place prior", "The head has a Dice {0} than",
    "the commonest class of each place, which sees no picture,", "the head and the place prior", "looking at the scan",
)  # fmt: skip
_OVER_UNTRAINED = _Contrast(
    "Trained minus untrained", "The head on this encoder has a Dice {0} than", "the same head on it untrained",
    "the heads on the trained and the untrained encoder", "pretraining",
)  # fmt: skip


def head_over_prior(difference: Mapping[str, Any] | None) -> Finding:
    """Does a segmentation head see more than where a class mostly lies? As `paired`."""
    return _compared(difference, _OVER_PRIOR)


def head_over_untrained(difference: Mapping[str, Any] | None) -> Finding:
    """Does pretraining help the head? As `paired`."""
    return _compared(difference, _OVER_UNTRAINED)


def paired(difference: Mapping[str, Any] | None) -> Finding:
    """Does training help the probe? Honest either way: an interval that holds zero shows nothing."""
    return _compared(difference, _TRAINED)


def tuned(difference: Mapping[str, Any] | None, lower_is_better: bool = False) -> Finding:
    """Does tuning help, over the same encoder frozen? As `paired`; of some metrics less is better."""
    return _compared(difference, _TUNED, lower_is_better)


def _compared(difference: Mapping[str, Any] | None, words: _Contrast, lower_is_better: bool = False) -> Finding:
    title, what = words.title, words.what
    if difference is None or difference.get("difference") is None:
        return Finding(
            title, "–", "none", f"No paired difference was measured, so it is not known whether {what} helped."
        )
    value = float(difference["difference"])
    if difference.get("low") is None or difference.get("high") is None:
        told = (
            f"The difference is {signed(value)}, without a 95 % interval (fewer than six people are held out, or it is "
            "the same in every resample): it shows nothing."
        )
        return Finding(title, signed(value), "open", told)
    low, high = float(difference["low"]), float(difference["high"])
    span = f"95 % interval {signed(low)} to {signed(high)}, people resampled"
    if low > 0 or high < 0:
        good = (low > 0) != lower_is_better
        aside = ", and less is better," if lower_is_better else ""
        told = (
            f"{words.ours.format('higher' if low > 0 else 'lower')} {words.theirs}{aside} by {number(abs(value))} "
            f"({span}). The interval excludes zero: {what} {'helped' if good else 'did harm'} on these people."
        )
        return Finding(title, signed(value), "good" if good else "bad", told)
    told = (
        f"The difference between {words.both} is {signed(value)} ({span}). The interval contains zero: this run does "
        f"not show that {what} helped. More held-out people would narrow it."
    )
    return Finding(title, signed(value), "open", told)


def without_paths(text: str, root: Path) -> str:
    """`text` with absolute paths cut to their last part, so that a page can be passed on."""
    told = text.replace(str(root), root.name)
    return _PATH.sub(lambda found: f"…/{found[1]}" if found[1] else "…", told)


def file_name(text: str, common: str = "") -> str:
    """A file as the tables show it: relative as given; an absolute one below `common`, or as its last three parts."""
    path = text.replace("\\", "/")
    if not (path.startswith("/") or re.match(r"^[A-Za-z]:/", path)):
        return path
    if common and path.startswith(common + "/"):
        return path.removeprefix(common + "/")
    return "…/" + "/".join(path.split("/")[-3:])
