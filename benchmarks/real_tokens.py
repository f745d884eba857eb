"""Task 7 on the real development eyes: what frozen tokens know of fluid and surfaces, beside baselines.

`python -m benchmarks.real_tokens [NAME=ENCODER ...]` reads the five Duke eyes of ../shared on the grid of the packaged
encoder and prints a JSON object. ENCODER is anything that `octjepa.open_encoder` reads. Rows: `packaged` (phantom-tiny)
and `phantom-unet`, each with random weights too, the segmentation network's features on native B-scans, and the
baselines of the exam (`raw_patches`, `intensity`, `context`, `position`).

Fluid: a token is positive when fluid fills at least 8 % of its graded voxels. A logistic regression on 128 principal
components of the features, with the token's position, learns from four eyes and is tested on the fifth. Its penalty is
chosen by leaving out each of the four in turn. `from_one_eye` learns from a single eye and is tested on the other four.
Surfaces: `benchmarks.exam.surface_head` learns from one eye whose tilt is kept, and is tested on the other four.

Intervals are Student's t over the five eyes. Each row is also compared with `random_init`,
`random_unet` and `context`, eye by eye.
Nothing is chosen with these numbers. The segmentation network has no row for surfaces: it finds them itself
(`benchmarks.real_eyes`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    of_tissue,
    patches_of,
    positions_in_view,
)
from benchmarks.segmenter_features import patch_features, selected_features
from jaxtyping import Bool, Float
from scipy.stats import t as student
from sklearn.metrics import average_precision_score

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.locate import open_encoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.tasks.segmenter.inference import load_segmenter, with_calibration
from octjepa.volume import CanonicalVolume

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


@dataclass(frozen=True)
class Row:
    """Results of one row; None where a row has no value."""

    fluid_ap: Interval | None
    fluid_ap_from_one_eye: Interval | None
    surface_um: Interval | None


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


def fluid_precision(train: Sequence[EyeTokens], tests: Sequence[EyeTokens]) -> list[float]:
    """Average precision in each test eye of a linear readout that learns from `train`."""
    project = Projection(np.concatenate([eye.features for eye in train]))

    def inputs(eye: EyeTokens) -> Float[np.ndarray, "k f"]:
        return interleave([project(eye.features), eye.positions])

    def joined(eyes: Sequence[EyeTokens]) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate([inputs(eye) for eye in eyes]), np.concatenate([eye.fluid for eye in eyes])

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


def read_fluid(tokens: Sequence[EyeTokens]) -> tuple[Interval, Interval]:
    """Average precision with leave one eye out, and from one eye; both per test eye."""
    numbers = range(len(tokens))
    out = [fluid_precision([tokens[k] for k in numbers if k != test], [tokens[test]])[0] for test in numbers]
    single = np.full((len(tokens), len(tokens)), np.nan)
    for train in numbers:
        others = [k for k in numbers if k != train]
        single[train, others] = fluid_precision([tokens[train]], [tokens[k] for k in others])
    return Interval.of(out), Interval.of(np.nanmean(single, axis=0).tolist())


# --- surfaces


def read_surfaces(featurise: Featurise, eyes: Sequence[RealEye], encoder: PretrainedEncoder) -> Interval:
    """Mean absolute error in um of four surfaces against the first grader, per test eye, from each other eye."""
    recipe = encoder.recipe
    scale_um = recipe.preprocessing.target_spacing_mm[1] * 1000
    errors = np.full((len(eyes), len(eyes)), np.nan)
    for number, train in enumerate(eyes):
        moved = [shifted(train, *shift) for shift in SHIFTS]
        others = [k for k in range(len(eyes)) if k != number]
        table = token_table_of(featurise, [*moved, *(eyes[k] for k in others)], recipe)
        project = projection_of(table, range(len(moved)))
        prepared = [
            token_eye(table, volume, project(table.features[table.of(volume)]))
            for volume in range(len(moved) + len(others))
        ]
        slab = np.repeat(np.arange(table.grid[0]), table.grid[2])
        head = SurfaceHead([LabelledEye(one, eye.depths[0], slab) for one, eye in zip(prepared, moved, strict=False)])
        for k, one in zip(others, prepared[len(moved) :], strict=True):
            difference = np.abs(head.depths(one) - eyes[k].depths[0])[:, :BSCANS]
            errors[number, k] = float(np.nanmean(difference, axis=(1, 2)).mean()) * scale_um
    return Interval.of(np.nanmean(errors, axis=0).tolist())


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


def of_raw(encoder: PretrainedEncoder) -> Featurise:
    """The voxels of each patch; `Projection` reduces them in the same way as every row."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        selected = [encoder.select_tokens(volume) for volume in volumes]
        return [TokenFeatures(one.patches, one.grid_index, one.grid, one.tissue) for one in selected]

    return featurise


# --- rows


def rows_of(
    makers: Mapping[str, Callable[[], Featurise]],
    flat: Sequence[RealEye],
    tilted: Sequence[RealEye],
    encoder: PretrainedEncoder,
) -> dict[str, Row]:
    """The results of every row."""
    found = {}
    for name, make in makers.items():
        featurise = make()
        fluid, single = (None, None) if name == "outline" else read_fluid(eye_tokens(featurise, flat, encoder))
        without = name == "segmenter" or not tilted
        surfaces = None if without else read_surfaces(featurise, tilted, encoder)
        found[name] = Row(fluid, single, surfaces)
    return found


def comparisons(rows: Mapping[str, Row], baseline: str) -> dict[str, dict[str, Interval]]:
    """Differences of each row from `baseline`, eye by eye, for every metric that both have."""
    out: dict[str, dict[str, Interval]] = {}
    for name, row in rows.items():
        for metric in ("fluid_ap", "fluid_ap_from_one_eye", "surface_um"):
            one, other = getattr(row, metric), getattr(rows[baseline], metric)
            if name != baseline and one is not None and other is not None:
                values = (np.array(one.eyes) - np.array(other.eyes)).tolist()
                out.setdefault(name, {})[metric] = Interval.of(values)
    return out


def main() -> None:
    """Prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoders", nargs="*", metavar="NAME=ENCODER", help="more rows")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--no-surfaces", action="store_true", help="read fluid only")
    parser.add_argument("--work", type=Path, help="folder that keeps the prepared eyes; default: a temporary one")
    arguments = parser.parse_args()
    data = data_folder()
    absent = why_absent(data, DEVELOPMENT_EYES)
    if absent is not None:
        raise UsageError(absent)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        packaged = load_encoder("phantom-tiny")
        unet = open_encoder("phantom-unet", packaged.preprocessing)
        unflattened = packaged.preprocessing.model_copy(update={"flatten": "none"})
        flat = read_eyes(work / "flat", data, packaged.preprocessing, DEVELOPMENT_EYES)
        tilted = read_eyes(work / "tilted", data, unflattened, DEVELOPMENT_EYES)
        makers: dict[str, Callable[[], Featurise]] = {
            "packaged": lambda: of_encoder(packaged),
            "phantom-unet": lambda: of_encoder(unet),
            "random_init": lambda: of_encoder(packaged.untrained()),
            "random_unet": lambda: of_encoder(unet.untrained()),
            "raw_patches": lambda: of_raw(packaged),
            "intensity": lambda: of_intensity(packaged),
            "context": lambda: of_context(packaged),
            "position": lambda: of_position(packaged),
            "outline": lambda: of_tissue(packaged),
            "segmenter": lambda: of_segmenter(work / "flat", data, flat, packaged, packaged.preprocessing),
        }
        for argument in arguments.encoders:
            name, _, path = argument.partition("=")
            makers[name] = lambda path=path: of_encoder(open_encoder(path, packaged.preprocessing))  # type: ignore[misc]
        if arguments.only:
            makers = {name: make for name, make in makers.items() if name in arguments.only}
        rows = rows_of(makers, flat, tilted if not arguments.no_surfaces else [], packaged)
    out = {
        "eyes": DEVELOPMENT_EYES,
        "rows": rows,
        **{
            f"less_{name}": comparisons(rows, name)
            for name in ("random_init", "random_unet", "context")
            if name in rows
        },
    }
    print(json.dumps(out, indent=1, default=vars))


if __name__ == "__main__":
    main()
