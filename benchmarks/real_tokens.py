"""Real development eyes: what frozen features know of fluid and surfaces, compared with baselines.

`python -m benchmarks.real_tokens --keep KEEP --out benchmarks/records/real_tokens.json [NAME=ENCODER ...]` reads the
five Duke eyes of ../shared on the grid of the packaged encoders. It measures the rows that are missing in the folder
KEEP, one after the other, and writes all of them to a record. ENCODER is anything that `octjepa.open_encoder` reads.
Rows: the packaged encoders, both architectures with random weights (`random_unet`, `random_init`; the mean over
`SEEDS`), the segmentation network's features on native B-scans (`segmenter`), and the baselines of the exam
(`raw_patches`, `intensity`, `context`, `position`). The files in KEEP hold values of one version of the weights.

Fluid: a token is positive when fluid fills at least 8 % of its graded voxels. A logistic regression on 128 principal
components of the features, with the token's position, learns from four eyes and is tested on the fifth. Its penalty is
chosen by leaving out each of the four in turn. `fluid_ap_from_one_eye` learns from a single eye and is tested on the
other four. `fluid_ap_mlp` and `fluid_ap_from_one_eye_mlp` are the same with a network of one hidden layer, whose
settings are fixed. Surfaces: `benchmarks.exam.surface_head` learns from one eye whose tilt is kept, and is tested on
the other four. For surfaces the segmentation network and the hand-made features have tokens of one B-scan and 0.19 mm;
`phantom-unet_coarse` has those of the packaged transformers, 1.44 x 0.38 mm. Features are limited to their range
in the labelled eye.

Intervals are Student's t over the five eyes. Each row is also compared with `context`, `intensity` and the random
weights, eye by eye. No weights are chosen with these numbers; the size of the tokens for surfaces and the limit were
chosen after earlier ones had been seen. The segmentation network has no row for surfaces: it finds
them itself (`benchmarks.real_eyes`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.exam.measurement_tasks import projection_of
from benchmarks.exam.readings import STRENGTHS, Projection, interleave, logistic_scores
from benchmarks.exam.real_eyes import (
    BSCANS,
    DEVELOPMENT_EYES,
    PITCH_MM,
    RealEye,
    data_folder,
    filled_up_frames,
    read_eyes,
    shifted,
    store_folder,
    why_absent,
)
from benchmarks.exam.real_tasks import SHIFTS, token_table_of
from benchmarks.exam.settings import TOKEN_SHARE
from benchmarks.exam.surface_head import LabelledEye, SurfaceHead, token_eye
from benchmarks.exam.tokens import (
    Featurise,
    of_context,
    of_encoder,
    of_intensity,
    of_position,
    of_raw,
    patches_of,
    positions_in_view,
)
from benchmarks.phantom_tokens import READOUTS
from benchmarks.segmenter_features import patch_features, selected_features
from benchmarks.surface_tokens import Tokens, fine_unet, surface_tokens, tokens_of
from jaxtyping import Bool, Float
from scipy.stats import t as student
from sklearn.metrics import average_precision_score

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.base import GridEncoder
from octjepa.encoders.locate import open_encoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.tasks.segmenter.inference import load_segmenter, with_calibration
from octjepa.volume import CanonicalVolume

SEEDS = (0, 1, 2)  # of random weights
SURFACES = "surface_um"
METRICS = ("fluid_ap", "fluid_ap_from_one_eye", "fluid_ap_mlp", "fluid_ap_from_one_eye_mlp", SURFACES)
BASELINES = ("context", "intensity", "position", "outline", "random_unet", "random_init")
CONTROLS = ("mae_longest", "vjepa_longest", "three_stages")  # encoders of decisions 0008 and 0009
_SLABS = 4  # folds of the labelled eye's slices
_GRADED_SHARE = 0.5  # of the voxels of a token that counts


@dataclass(frozen=True, eq=False)
class EyeTokens:
    """Tokens of one eye that a grader looked at: features, positions, whether each holds fluid."""

    features: Float[np.ndarray, "k f"]
    positions: Float[np.ndarray, "k 5"]
    fluid: Bool[np.ndarray, " k"]


@dataclass(frozen=True)
class Interval:
    """Mean over eyes with its 95 % interval, and the value of each eye."""

    mean: float
    low: float
    high: float
    eyes: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Student's t interval of the mean."""
        array = np.asarray(values, float)
        half = float(student.ppf(0.975, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array)))
        mean = float(array.mean())
        return cls(*(round(v, 3) for v in (mean, mean - half, mean + half)), tuple(array.round(3).tolist()))


# --- fluid


def eye_tokens(featurise: Featurise, eyes: Sequence[RealEye], encoder: PretrainedEncoder) -> list[EyeTokens]:
    """The graded tokens of each eye."""
    recipe = encoder.recipe
    table = token_table_of(featurise, eyes, recipe)
    found = []
    for number, eye in enumerate(eyes):
        part = table.of(number)
        index = table.index[part]
        own = np.zeros(eye.graded.shape, bool)
        own[:BSCANS] = eye.graded[:BSCANS]
        graded, fluid = (
            patches_of(mask.astype(np.float32), recipe.grid, recipe.tokens.patch_size)[index].mean(axis=1)
            for mask in (own, eye.fluid & own)
        )
        counts = graded >= _GRADED_SHARE * graded.max()
        share = fluid[counts] / graded[counts]
        found.append(
            EyeTokens(
                table.features[part][counts].astype(np.float32),
                positions_in_view(index, recipe.grid)[counts],
                share >= TOKEN_SHARE,
            )
        )
    return found


def fluid_precision(train: Sequence[EyeTokens], tests: Sequence[EyeTokens], mlp: bool = False) -> list[float]:
    """Average precision in each test eye of a linear readout, or one hidden layer, that learns from `train`."""
    project = Projection(np.concatenate([eye.features for eye in train]))

    def inputs(eye: EyeTokens) -> Float[np.ndarray, "k f"]:
        return interleave([project(eye.features), eye.positions])

    def joined(eyes: Sequence[EyeTokens]) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate([inputs(eye) for eye in eyes]), np.concatenate([eye.fluid for eye in eyes])

    if mlp:
        x, y = joined(train)
        return [float(average_precision_score(eye.fluid, READOUTS["mlp"](x, y, inputs(eye)))) for eye in tests]
    strength = STRENGTHS[2]
    if len(train) > 1:
        scores = []
        for candidate in STRENGTHS:
            of_candidate = []
            for number, held_out in enumerate(train):
                x, y = joined([eye for k, eye in enumerate(train) if k != number])
                of_candidate.append(
                    average_precision_score(held_out.fluid, logistic_scores(x, y, inputs(held_out), candidate))
                )
            scores.append(np.mean(of_candidate))
        strength = STRENGTHS[int(np.argmax(scores))]
    x, y = joined(train)
    return [float(average_precision_score(eye.fluid, logistic_scores(x, y, inputs(eye), strength))) for eye in tests]


def read_fluid(tokens: Sequence[EyeTokens], mlp: bool = False) -> tuple[list[float], list[float]]:
    """Average precision with leave one eye out, and from one eye; both per test eye."""
    numbers = range(len(tokens))
    out = [fluid_precision([tokens[k] for k in numbers if k != test], [tokens[test]], mlp)[0] for test in numbers]
    single = np.full((len(tokens), len(tokens)), np.nan)
    for train in numbers:
        others = [k for k in numbers if k != train]
        single[train, others] = fluid_precision([tokens[train]], [tokens[k] for k in others], mlp)
    return out, np.nanmean(single, axis=0).tolist()


# --- surfaces


def read_surfaces(tokens: Tokens, eyes: Sequence[RealEye]) -> list[float]:
    """Mean absolute error in um of four surfaces against the first grader, per test eye, from each other eye."""
    featurise, recipe = tokens
    scale_um = recipe.preprocessing.target_spacing_mm[1] * 1000
    errors = np.full((len(eyes), len(eyes)), np.nan)
    for number, train in enumerate(eyes):
        moved = [shifted(train, *shift) for shift in SHIFTS]
        others = [k for k in range(len(eyes)) if k != number]
        table = token_table_of(featurise, [*moved, *(eyes[k] for k in others)], recipe)
        project = projection_of(table, range(len(moved)), limited=True)
        prepared = [
            token_eye(table, volume, project(table.features[table.of(volume)]))
            for volume in range(len(moved) + len(others))
        ]
        slab = np.repeat(np.arange(table.grid[0]) * _SLABS // table.grid[0], table.grid[2])
        head = SurfaceHead([LabelledEye(one, eye.depths[0], slab) for one, eye in zip(prepared, moved, strict=False)])
        for k, one in zip(others, prepared[len(moved) :], strict=True):
            difference = np.abs(head.depths(one) - eyes[k].depths[0])[:, :BSCANS]
            errors[number, k] = float(np.nanmean(difference, axis=(1, 2)).mean()) * scale_um
    values: list[float] = np.nanmean(errors, axis=0).tolist()
    return values


# --- the segmentation network's own features


def of_segmenter(
    work: Path, data: Path, eyes: Sequence[RealEye], encoder: PretrainedEncoder, preprocessing: Preprocessing
) -> Featurise:
    """Features of the segmentation network, which reads the native B-scans."""
    segmenter = with_calibration(load_segmenter(), flip=False)
    store = Store.open(store_folder(work, preprocessing))
    by_volume = {
        eye.volume.volume_id: patch_features(
            segmenter,
            filled_up_frames(work, data, preprocessing, eye.name),
            PITCH_MM,
            store.native_map(eye.volume.volume_id),
            encoder.recipe,
            sparse=True,
        )
        for eye in eyes
    }

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        return [selected_features(encoder, volume, by_volume[volume.volume_id]) for volume in volumes]

    return featurise


# --- rows

Values = dict[str, list[float]]  # metric -> value of each eye


@dataclass(frozen=True, eq=False)
class Eyes:
    """The development eyes, flattened and with their tilt."""

    flat: Sequence[RealEye]
    tilted: Sequence[RealEye]
    encoder: PretrainedEncoder

    def fluid(self, featurise: Featurise) -> Values:
        """The metrics of fluid."""
        found: Values = {}
        tokens = eye_tokens(featurise, self.flat, self.encoder)
        for mlp in (False, True):
            four, one = read_fluid(tokens, mlp)
            end = "_mlp" if mlp else ""
            found |= {f"fluid_ap{end}": four, f"fluid_ap_from_one_eye{end}": one}
        return found

    def surfaces(self, tokens: Tokens) -> Values:
        """The metric of surfaces."""
        return {SURFACES: read_surfaces(tokens, self.tilted)}


def random_copy(encoder: GridEncoder[object], seed: int) -> GridEncoder[object]:
    """The architecture of `encoder` with the random weights of `seed`."""
    other = copy(encoder)
    train = encoder.recipe.train.model_copy(update={"seed": seed})
    other.recipe = encoder.recipe.model_copy(update={"train": train})
    return other.untrained()


def mean_over_seeds(rows: Sequence[Values]) -> Values:
    """The mean of each eye over rows of different random weights."""
    return {metric: np.mean([row[metric] for row in rows], axis=0).tolist() for metric in rows[0]}


def record(rows: Mapping[str, Values], seeds: Mapping[str, Sequence[Values]]) -> dict[str, object]:
    """The rows with their intervals, the means of each seed of random weights, and the differences from baselines."""
    intervals = {
        name: {metric: asdict(Interval.of(values)) for metric, values in row.items()} for name, row in rows.items()
    }
    of_seeds = {
        name: {metric: [round(float(np.mean(row[metric])), 3) for row in several] for metric in several[0]}
        for name, several in seeds.items()
    }
    return {
        "command": "python -m benchmarks.real_tokens --keep KEEP --out RECORD",
        "eyes": DEVELOPMENT_EYES,
        "rows": intervals,
        "means_of_seeds": of_seeds,
        "differences": {
            f"{name} less {baseline}": {
                metric: asdict(Interval.of((np.array(values) - np.array(rows[baseline][metric])).tolist()))
                for metric, values in row.items()
                if metric in rows[baseline]
            }
            for name, row in rows.items()
            for baseline in (*BASELINES, *CONTROLS)
            if baseline in rows and name != baseline
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is missing and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoders", nargs="*", metavar="NAME=ENCODER", help="more rows")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--work", type=Path, help="folder that keeps the prepared eyes; default: a temporary one")
    parser.add_argument("--keep", type=Path, required=True, help="folder that keeps the values of every row")
    parser.add_argument("--out", type=Path, help="the record; default: print it")
    options = parser.parse_args(arguments)
    data = data_folder()
    absent = why_absent(data, DEVELOPMENT_EYES)
    if absent is not None:
        raise UsageError(absent)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        packaged = load_encoder("phantom-tiny")
        unet = open_encoder("phantom-unet", packaged.preprocessing)
        unflattened = packaged.preprocessing.model_copy(update={"flatten": "none"})
        flat = read_eyes(work / "flat", data, packaged.preprocessing, DEVELOPMENT_EYES)
        eyes = Eyes(flat, read_eyes(work / "tilted", data, unflattened, DEVELOPMENT_EYES), packaged)
        fluid: dict[str, Callable[[], Featurise]] = {
            "intensity": lambda: of_intensity(packaged),
            "context": lambda: of_context(packaged),
            "position": lambda: of_position(packaged),
            "raw_patches": lambda: of_raw(packaged),
            "phantom-truth": lambda: of_encoder(load_encoder("phantom-truth")),
            "phantom-tiny": lambda: of_encoder(packaged),
            "phantom-unet": lambda: of_encoder(unet),
            "segmenter": lambda: of_segmenter(work / "flat", data, flat, packaged, packaged.preprocessing),
        }
        surfaces = surface_tokens(packaged)
        for name, encoder in (("random_init", packaged), ("random_unet", unet)):
            del surfaces[name]
            for seed in SEEDS:
                fluid[f"{name}@{seed}"] = partial(_random_row, encoder, seed)
        for seed in SEEDS:
            surfaces[f"random_init@{seed}"] = partial(_random_tokens, packaged, seed)
            surfaces[f"random_unet@{seed}"] = partial(_random_tokens, fine_unet(packaged), seed)
        for argument in options.encoders:
            name, _, path = argument.partition("=")
            fluid[name] = lambda path=path: of_encoder(open_encoder(path, packaged.preprocessing))  # type: ignore[misc]
            surfaces[name] = lambda path=path: tokens_of(open_encoder(path, packaged.preprocessing))  # type: ignore[misc]
        for name in dict.fromkeys([*fluid, *surfaces]):
            if options.only and name.partition("@")[0] not in options.only:
                continue
            file = options.keep / f"{name}.json"
            values: Values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            before = dict(values)
            if name in fluid and "fluid_ap" not in values:
                values |= eyes.fluid(fluid[name]())
            if name in surfaces and SURFACES not in values:
                values |= eyes.surfaces(surfaces[name]())
            if values != before:
                options.keep.mkdir(parents=True, exist_ok=True)
                write_json(file, values)
                means = {metric: round(float(np.mean(of_eyes)), 3) for metric, of_eyes in values.items()}
                print(name, means, flush=True)
    found = record(*retained_rows(options.keep))
    if options.out is None:
        print(json.dumps(found, indent=1))
    else:
        write_json(options.out, found)


def _random_row(encoder: GridEncoder[object], seed: int) -> Featurise:
    return of_encoder(random_copy(encoder, seed))


def _random_tokens(encoder: GridEncoder[object], seed: int) -> Tokens:
    return tokens_of(random_copy(encoder, seed))


def retained_rows(folder: Path) -> tuple[dict[str, Values], dict[str, list[Values]]]:
    """The rows of a folder, those of random weights as the mean over seeds; and the rows of each seed."""
    rows: dict[str, Values] = {}
    seeds: dict[str, list[Values]] = {}
    for file in sorted(folder.glob("*.json")):
        name, _, seed = file.stem.partition("@")
        values = json.loads(file.read_text(encoding="utf-8"))
        if seed:
            seeds.setdefault(name, []).append(values)
        else:
            rows[name] = values
    return rows | {name: mean_over_seeds(several) for name, several in seeds.items()}, seeds


if __name__ == "__main__":
    main()
