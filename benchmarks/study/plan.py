"""The table of the study: which arms, seeds, ablations and budgets there are. Data alone; nothing runs here.

An entry is one run: the recipe `RECIPE` with overrides, a seed and a budget in CPU-seconds. The curve over compute
belongs to the best arm, the ablations to the best arm that predicts features; both are known once all main rows of all
seeds are there. Ablations that validation people prefer with every seed run again at the main budget.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from octjepa.config import load_recipe, science_hash
from octjepa.errors import UsageError
from octjepa.shipped import shipped

RECIPE = str(Path(__file__).with_name("recipe.yaml"))
ARMS = ("vjepa", "vjepa_dense", "normalized_mse", "mae")
LATENT = ARMS[:3]  # they predict features of a moving target; what the ablations vary means nothing to `mae` in part
SIMPLE = ("untrained", "histogram", "majority")
SUPERVISED = "supervised"
FLUID_FLOORS = ("raw_intensity", "raw_patches", "unet")  # rows of the real eyes that need no encoder
FEW_PEOPLE = (10, 30, 100)
CURVE = (0.25, 0.5, 2.0)  # of the main budget, beside 1 itself
POOLS = ("mean", "mean_std_max", "mean_std_max_min")
PRIMARY_POOL = "mean_std_max"  # named before any figure was seen; the others are there to compare

_FULL = ":full"  # ends the name of a finalist
SHIPPED = "phantom-tiny"  # the encoder in the package: a row of its own, measured as everybody loads it

Kind = Literal["pretrain", "untrained", "histogram", "majority", "supervised", "shipped", "fluid"]
Group = Literal["main", "few_labels", "curve", "ablation", "finalist", "real"]

# name -> overrides over the ablated arm. `reference` is that arm at the ablations' own budget.
ABLATIONS: dict[str, tuple[str, ...]] = {
    "reference": (),
    "tokens_all": ("tokens.select=all", "tokens.budget=null"),
    "tokens_third": ("tokens.budget=85",),  # of 256
    "positions_mm": ("model.position_unit=mm",),
    "positions_sincos": ("model.positions=sincos",),
    "masks_tubes": ("masks.blocks=0", "masks.runs=0"),
    "masks_blocks": ("masks.tubes=0", "masks.runs=0"),
    "masks_runs": ("masks.tubes=0", "masks.blocks=0"),
    "masks_075": ("masks.ratio=0.75",),
    "targets_half": ("masks.target_share=0.5",),
    "targets_tenth": ("masks.target_share=0.1",),
    "ema_0.99": ("objective.ema_base=0.99",),
    "ema_constant": ("objective.ema_base=0.99925", "objective.ema_final=0.99925"),
    "variance_covariance": ("objective.variance_covariance=0.1",),
    "sigreg": ("objective.sigreg=0.1",),
    "warm_start": (f"model.warm_start={SHIPPED}",),
}


class Chosen(NamedTuple):
    """What validation people chose: of all arms for the curve, of `LATENT` for the ablations. None until known.

    finalists: ablations that are better than `reference` with every seed; none until all ablations are there.
    """

    best: str | None = None
    ablated: str | None = None
    finalists: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What one study is: its cohort, budgets (CPU-seconds of a run) and seeds. `arms` cuts the main rows."""

    people: int = 600
    cohort_seed: int = 4242
    difficulty: str = "realistic"
    budget: float = 1200.0
    ablation_budget: float = 200.0  # a sixth, so that three seeds of each fit into the time of one longer run
    unet_budget: float = 600.0  # of each of two ways: both together have what an encoder was pretrained with
    further_budget: float = 240.0  # of pretraining further on the real volumes
    seeds: tuple[int, ...] = (0, 1, 2)
    ablation_seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...] = (*ARMS, *SIMPLE, SUPERVISED)
    threads: int = 1  # of a run; one core each loses nothing to waiting threads
    bootstrap: int = 2000
    overrides: tuple[str, ...] = ()  # of every pretraining run, for trials

    @property
    def cohort(self) -> dict[str, object]:
        """What the cohort depends on."""
        return {"people": self.people, "seed": self.cohort_seed, "difficulty": self.difficulty}


@dataclass(frozen=True)
class Entry:
    """One run. `arm` is its name in the results; `of` names the main arm whose encoder a fluid row uses."""

    group: Group
    kind: Kind
    arm: str
    seed: int
    overrides: tuple[str, ...] = ()
    budget: float = 0.0
    people: int | None = None  # training people of a supervised row with few labels
    of: str = ""
    further: bool = False  # a fluid row whose encoder is pretrained further on the real volumes
    cohort: dict[str, object] = field(default_factory=dict, hash=False)

    @property
    def run(self) -> str:
        """Its name, and that of its folder: whatever changes the result changes the name."""
        text = json.dumps([asdict(self), _science_of(RECIPE)], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.group}-{self.arm.replace(':', '-')}-seed{self.seed}-{digest}"


@cache
def _science_of(recipe: str) -> str:
    return science_hash(load_recipe(recipe))


def main_entries(settings: Settings) -> list[Entry]:
    """Every arm with every seed, seed by seed: what there is of an unfinished study can be compared.

    Rows without chance (histogram, majority) have one seed.
    """
    entries = []
    for seed in settings.seeds:
        for arm in settings.arms:
            if seed != settings.seeds[0] and arm in ("histogram", "majority"):
                continue
            if arm in ARMS:
                entries.append(_pretrain("main", arm, arm, seed, (), settings.budget, settings))
            elif arm == SUPERVISED:
                entries.append(Entry("main", "supervised", arm, seed, (), settings.budget, cohort=settings.cohort))
            else:
                entries.append(Entry("main", arm, arm, seed, settings.overrides, cohort=settings.cohort))  # type: ignore[arg-type]
    return entries


def later_entries(settings: Settings, chosen: Chosen) -> list[Entry]:
    """Everything after the main rows, ablations seed by seed. Where no arm is chosen yet, what needs none."""
    entries = []
    if shipped(SHIPPED) is not None:
        cohort = {**settings.cohort, "weights": _weights_hash()}
        entries.append(Entry("main", "shipped", SHIPPED, settings.seeds[0], cohort=cohort))
    if SUPERVISED in settings.arms:
        for people in FEW_PEOPLE:
            budget = settings.budget / 4
            name = f"{SUPERVISED}:people_{people}"
            entries.append(
                Entry("few_labels", "supervised", name, settings.seeds[0], (), budget, people, cohort=settings.cohort)
            )
    if (best := chosen.best) is not None:
        for share in sorted(CURVE, reverse=True):  # the longest first, so that nothing waits for it alone at the end
            seconds = settings.budget * share
            name = f"{best}:cpu_{seconds / 60:.3g}_min"
            entries.append(_pretrain("curve", best, name, settings.seeds[0], (), seconds, settings))
    if (arm := chosen.ablated) is not None:
        for seed in settings.ablation_seeds:
            for word, overrides in ABLATIONS.items():
                budget = settings.ablation_budget
                entries.append(_pretrain("ablation", arm, f"{arm}:{word}", seed, overrides, budget, settings))
        for seed in settings.seeds:
            for word in chosen.finalists:
                name = finalist(arm, word)
                entries.append(_pretrain("finalist", arm, name, seed, ABLATIONS[word], settings.budget, settings))
    return entries


def finalist(arm: str, word: str) -> str:
    """The row of an ablation at the main budget."""
    return f"{arm}:{word}{_FULL}"


def seeds_of(row: str, settings: Settings) -> tuple[int, ...]:
    """The seeds of a main row, a finalist or an ablation."""
    return settings.ablation_seeds if ":" in row and not row.endswith(_FULL) else settings.seeds


def fluid_entries(settings: Settings, best: str | None) -> list[Entry]:
    """Fluid in the two real eyes: every arm's tokens, then the best arm pretrained further, then what needs no arm."""
    entries = []
    for entry in main_entries(settings):
        if entry.kind in ("pretrain", "untrained"):
            entries.append(Entry("real", "fluid", entry.arm, entry.seed, of=entry.run, cohort=settings.cohort))
            if entry.arm == best:
                seconds = settings.further_budget
                name = f"{best}:further_real"
                entries.append(
                    Entry(
                        "real", "fluid", name, entry.seed, budget=seconds, of=entry.run, further=True,
                        cohort=settings.cohort,
                    )
                )  # fmt: skip
    for floor in FLUID_FLOORS:
        budget = settings.unet_budget if floor == "unet" else 0.0
        for seed in settings.seeds if floor == "unet" else settings.seeds[:1]:
            entries.append(Entry("real", "fluid", floor, seed, budget=budget))
    return entries


def all_entries(settings: Settings, chosen: Chosen, real: bool) -> list[Entry]:
    """In the order in which they run."""
    return [
        *main_entries(settings),
        *(fluid_entries(settings, chosen.best) if real else []),
        *later_entries(settings, chosen),
    ]


def _pretrain(
    group: Group, objective: str, name: str, seed: int, overrides: tuple[str, ...], budget: float, settings: Settings
) -> Entry:
    named = "mae_patch_norm" if objective == "mae" else objective  # what mae was when the study began
    given = (f"objective.name={named}", *settings.overrides, *overrides)
    cohort = settings.cohort
    if any(one.startswith("model.warm_start=") for one in overrides):
        cohort = {**cohort, "weights": _weights_hash()}  # others of that name are another start
    return Entry(group, "pretrain", name, seed, given, budget, cohort=cohort)


@cache
def _weights_hash() -> str:
    folder = shipped(SHIPPED)
    if folder is None:
        raise UsageError(f"the package holds no weights called {SHIPPED}, or a path here is so called")
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]
