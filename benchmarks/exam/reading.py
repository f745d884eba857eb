"""One row through the tasks that need no training of a network: cohorts to tokens, tokens to findings, one by one.

A cohort's tokens are dropped before those of the next are made; a row that was stopped goes on with the next task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.exam.decoys import DECOYS
from jaxtyping import Float

from octjepa.embed.leakage import count_seen_volumes, recorded_training_set
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.base import GridEncoder
from octjepa.errors import UsageError
from octjepa.store.contract import contract_differences

from . import lesion_tasks, measurement_tasks, real_decoder, real_tasks
from .cohorts import EXAMINED, SECOND_VISIT, UNFLATTENED, Cohort
from .lesion_tasks import EyeProbe, TokenTruth
from .readings import Projection
from .real_eyes import data_folder, recorded_real_eyes
from .results import CENTERED, EYES, SAME_EYE, Finding, LeftOut, Results, RowName, patch_text
from .settings import REAL_EYES
from .tokens import (
    Featurise,
    TokenTable,
    of_context,
    of_encoder,
    of_intensity,
    of_position,
    of_raw_patches,
    of_tissue,
    token_table,
)
from .training import ENCODERS
from .truth import COLUMNS
from .tuning import frozen, tuning
from .tuning_segmentation import tuning_segmentation


class Exam:
    """Cohorts in a folder, and what several rows share: truth of tokens, features of intensity."""

    def __init__(self, folder: Path, results: Results) -> None:
        self.folder, self.results = folder, results
        self._cohorts: dict[str, Cohort] = {}
        self._token_truth: dict[tuple[int, int, int], TokenTruth] = {}
        self._intensity: dict[tuple[int, int, int], EyeProbe] = {}

    def cohort(self, name: str) -> Cohort:
        """A cohort, opened once."""
        if name not in self._cohorts:
            self._cohorts[name] = Cohort.open(self.folder, name)
        return self._cohorts[name]

    def token_truth(self, table: TokenTable) -> TokenTruth:
        """Of the main cohort, for patches of the table's size."""
        if table.patch not in self._token_truth:
            self._token_truth[table.patch] = TokenTruth(self.cohort("main"), table)
        return self._token_truth[table.patch]

    def intensity(self, encoder: GridEncoder[Any]) -> EyeProbe:
        """Intensity of the main cohort's patches, pooled and projected: what `added_auroc` starts from."""
        patch = encoder.recipe.tokens.patch_size
        if patch not in self._intensity:
            main, cutter = self.cohort("main"), patch_reader(encoder)
            table = token_table(of_intensity(cutter), main, cutter, "intensity")
            self._intensity[patch] = EyeProbe(main, projected_eyes(main, table, EYES))
        return self._intensity[patch]

    def check_unseen(self, encoder: GridEncoder[Any]) -> None:
        """Raises UsageError if the encoder was trained on volumes of any cohort of the exam, whatever their split.

        By content ids and by UIDs. Content ids are hashes of voxels, which differ if another processor made the same
        phantoms. Older weights do not record UIDs. Numbers of people are of no use, because person 1001 is another
        person in each cohort: the weights' own store is therefore not looked up.
        """
        trained = recorded_training_set(encoder.recorded_training, None)
        for name in EXAMINED if encoder.recorded_training else ():
            seen = count_seen_volumes(self.cohort(name).table, trained)
            if seen:
                raise UsageError(
                    f"{encoder.name} was trained on {seen} volumes of the exam's cohort {name}: its figures would be "
                    "of people it has seen. Pretrain on the pretraining cohort, or on other data"
                )

    def check_real_eyes_unseen(self, encoder: GridEncoder[Any]) -> None:
        """Raises UsageError where the encoder was trained on the real eyes that are tested."""
        if encoder.recorded_training & self._real_eyes:
            raise UsageError(
                f"{encoder.name} was trained on the real eyes that the tasks {', '.join(REAL_EYES)} test: leave them "
                f"out ({' '.join(f'--without {task}' for task in REAL_EYES)}), or add it to {ENCODERS.name} with "
                "cohort: real"
            )

    @cached_property
    def _real_eyes(self) -> frozenset[str]:
        return recorded_real_eyes(data_folder())

    def check_contract(self, encoder: GridEncoder[Any]) -> None:
        """Raises UsageError where the encoder reads other volumes than the exam's, or patches that its truth cannot."""
        preprocessing, patch = self.cohort("main").store.preprocessing, encoder.recipe.tokens.patch_size
        differences = contract_differences(preprocessing, encoder.preprocessing, "exam")
        if differences:
            raise UsageError(
                f"{encoder.name} expects other volumes than the exam's:\n  "
                + "\n  ".join(differences)
                + "\nThe exam reads encoders of the preprocessing in benchmarks/exam/recipe.yaml: pretrain with it"
            )
        if patch[2] % COLUMNS:
            raise UsageError(
                f"{encoder.name} cuts patches of {patch[2]} columns; the truth of the exam knows every {COLUMNS}th "
                f"column: pretrain with patches of a multiple of {COLUMNS}"
            )

    def read(
        self,
        row: RowName,
        encoder: GridEncoder[Any],
        kind: str,
        about: dict[str, Any],
        without: Sequence[str] = (),
        real_eyes_seen: bool = False,
    ) -> None:
        """All figures of a row that are missing, but for those of the tasks `without`.

        kind: encoder, intensity, raw_patches, context, position (read by token only), or tissue, which only says where
        surfaces are. real_eyes_seen: the row is
        of an encoder that is known to have been trained on the real eyes, without their grades.
        """
        self.check_contract(encoder)
        self.check_unseen(encoder)
        if not real_eyes_seen and set(REAL_EYES) - set(without):
            self.check_real_eyes_unseen(encoder)
        makers: dict[str, Callable[[], Featurise]] = {
            "encoder": lambda: of_encoder(encoder),
            "intensity": lambda: of_intensity(patch_reader(encoder)),
            "raw_patches": lambda: of_raw_patches(patch_reader(encoder), self.cohort("main")),
            "context": lambda: of_context(patch_reader(encoder)),
            "position": lambda: of_position(patch_reader(encoder)),
            "tissue": lambda: of_tissue(patch_reader(encoder)),
        }
        reader = _Row(self, row, encoder, makers[kind], kind)
        for task, findings in reader.tasks():
            if task not in without and not self.results.has(row, task, about.get("run"), about.get("weights")):
                started = time.process_time()
                found = list(findings())
                seconds = round(time.process_time() - started, 1)  # the first task that needs a table writes its tokens
                self.results.add(row, task, found, {**about, "reading_cpu_seconds": seconds})

    def read_covariates(self, row: RowName, about: dict[str, Any]) -> None:
        """Age, site, study group and scanner, which need no image, through the tasks that read an eye."""
        main = self.cohort("main")
        x = covariates(main)
        if not self.results.has(row, "eye_lesion"):
            self.results.add(row, "eye_lesion", list(lesion_tasks.eye_lesion(main, EyeProbe(main, x), None)), about)
        if not self.results.has(row, "severity"):
            self.results.add(row, "severity", list(measurement_tasks.severity(main, x)), about)


class _Row:
    """The tables of one row; the one of the main cohort is made once and used by three tasks."""

    def __init__(
        self, exam: Exam, row: RowName, encoder: GridEncoder[Any], featurise: Callable[[], Featurise], kind: str
    ) -> None:
        self.exam, self.row, self.encoder, self.make, self.kind = exam, row, encoder, featurise, kind

    @cached_property
    def featurise(self) -> Featurise:
        return self.make()

    def table(self, name: str) -> TokenTable:
        return token_table(self.featurise, self.exam.cohort(name), self.encoder, self.row.name)

    @cached_property
    def main(self) -> TokenTable:
        return self.table("main")

    @cached_property
    def eyes(self) -> Float[np.ndarray, "V f"]:
        """What lesions are read from."""
        return projected_eyes(self.exam.cohort("main"), self.main, EYES)

    @cached_property
    def centered(self) -> Float[np.ndarray, "V f"]:
        """What their severity is read from, and lesions once more."""
        return projected_eyes(self.exam.cohort("main"), self.main, CENTERED)

    def tasks(self) -> Iterator[tuple[str, Callable[[], Iterator[Finding | LeftOut]]]]:
        """The tasks that the row is read by."""
        if self.kind == "position":  # the same in every eye
            main = self.exam.cohort("main")
            yield "token_lesion", lambda: lesion_tasks.token_lesion(main, self.main, self.exam.token_truth(self.main))
            return
        if self.kind != "tissue":
            yield from self._tasks_of_tokens()
        yield "surfaces", lambda: measurement_tasks.surfaces(self.exam.cohort(UNFLATTENED), self.table(UNFLATTENED))
        recipe = self.encoder.recipe
        yield "real_surfaces", lambda: real_tasks.read_surfaces(self.exam.folder, self.featurise, recipe)

    def _tasks_of_tokens(self) -> Iterator[tuple[str, Callable[[], Iterator[Finding | LeftOut]]]]:
        main = self.exam.cohort("main")
        base = None if self.kind == "intensity" else self.exam.intensity
        yield "token_lesion", lambda: lesion_tasks.token_lesion(main, self.main, self.exam.token_truth(self.main))
        yield (
            "eye_lesion",
            lambda: lesion_tasks.eye_lesion(
                main, EyeProbe(main, self.eyes), None if base is None else base(self.encoder)
            ),
        )
        yield (
            "eye_lesion_centered",
            lambda: lesion_tasks.eye_lesion(main, EyeProbe(main, self.centered), None, "eye_lesion_centered"),
        )
        yield "severity", lambda: measurement_tasks.severity(main, self.centered)
        yield "same_eye", self._same_eye
        yield "decoys", self._decoys
        yield "frozen", lambda: frozen(main, self.eyes, self.row.seed)
        trained = self.encoder if isinstance(self.encoder, PretrainedEncoder) else None  # others are frozen
        if self.kind == "encoder" and trained is not None:
            yield "tuning", lambda: tuning(main, trained, self.row.seed)
            yield "tuning_segmentation", lambda: tuning_segmentation(main, trained, self.row.seed)
        recipe = self.encoder.recipe
        yield "real_fluid", lambda: real_tasks.read_fluid(self.exam.folder, self.kind, self.featurise, recipe)
        if trained is not None and self.kind not in ("raw_patches", "context"):
            blind = self.kind == "intensity"
            yield (
                "real_fluid_decoder",
                lambda: real_decoder.read_decoded(self.exam.folder, trained, blind, self.row.seed),
            )

    def _same_eye(self) -> Iterator[Finding | LeftOut]:
        main = self.exam.cohort("main")
        first, second = self.main.pooled(SAME_EYE), self.table(SECOND_VISIT).pooled(SAME_EYE)
        projection = Projection(first[main.indices("train")])
        return measurement_tasks.same_eye(
            main, projection.whitened(first), self.exam.cohort(SECOND_VISIT), projection.whitened(second)
        )

    def _decoys(self) -> Iterator[Finding | LeftOut]:
        found: list[Finding | LeftOut] = []
        for name in DECOYS:
            cohort = self.exam.cohort(name)
            found += lesion_tasks.decoys(cohort, projected_eyes(cohort, self.table(name), EYES))
        yield from found
        metrics = [f"auroc_{name}" for name in DECOYS]
        for count in sorted({one.labels for one in found if one.labels is not None}):
            of_count = [one for one in found if isinstance(one, Finding) and one.labels == count]
            yield measurement_tasks.macro(of_count, "decoys", "auroc", count, metrics)


def patch_reader(encoder: GridEncoder[Any]) -> PretrainedEncoder:
    """What cuts the patches of the baselines: the encoder itself, or for a frozen one `phantom-tiny`.

    Raises UsageError if a frozen encoder has tokens of another size, because its baselines would be of other patches.
    """
    if isinstance(encoder, PretrainedEncoder):
        return encoder
    packaged = load_encoder("phantom-tiny")
    patch, expected = encoder.recipe.tokens.patch_size, packaged.recipe.tokens.patch_size
    if patch != expected:
        raise UsageError(
            f"{encoder.name} has tokens of {patch_text(patch)} voxels: the exam has baselines for tokens of "
            f"{patch_text(expected)} voxels"
        )
    return packaged


def projected_eyes(cohort: Cohort, table: TokenTable, pool: str) -> Float[np.ndarray, "V components"]:
    """The cohort's eyes, pooled, on the principal components of those to learn from."""
    features = table.pooled(pool)
    return Projection(features[cohort.indices("train")])(features)


def covariates(cohort: Cohort) -> Float[np.ndarray, "V f"]:
    """Age, and one-hot site, study group and device, of every volume."""
    people = cohort.store.participants.set_index("person_id")
    columns = [(people.loc[list(cohort.people), "age"].to_numpy(float) - 60) / 10]
    for values in (
        people.loc[list(cohort.people), "clinical_site"].to_numpy(str),
        people.loc[list(cohort.people), "study_group"].to_numpy(str),
        cohort.devices,
    ):
        columns += [(values == one).astype(float) for one in np.unique(values)]
    return np.stack(columns, axis=1).astype(np.float32)
