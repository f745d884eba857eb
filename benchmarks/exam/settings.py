"""What the exam is: cohorts, numbers of labels, readings and the rule of decision.

Fixed before any trained encoder was read. A later change has an entry in lab/2026-11.md; the networks of the
ceilings are such a change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

RECIPE = str(Path(__file__).with_name("recipe.yaml"))  # its preprocessing and views hold for every row
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "records" / "exam"
PAGES = ROOT / "docs" / "exam"  # of the results in RESULTS
WORK = ROOT / "exam"  # cohorts and runs

LABELLED_EYES = (5, 10, 30, 100)  # of the token task, half of them with the lesion
LABELLED_PEOPLE = (10, 30, 100)  # of the other tasks; None stands for all
BOUNDARY_EYES = (5, 30)
DRAWS = 3  # of the labelled people; a figure is the mean over the draws
TOKEN_SHARE = 0.08  # of a patch that is lesion: at least so much makes a positive token
COMPONENTS = 128  # principal components of every row, fitted on training eyes without labels
RESAMPLES = 1000  # of the test people
MIN_POSITIVES = 20  # test people with a lesion: with fewer the task is left out

# Admission of a task by its floors and ceilings (AUROC).
MAX_INTENSITY = 0.65  # with 30 labelled people
MIN_CNN = 0.90  # a supervised CNN with ample labels
MAX_CNN_FEW = 0.75  # a CNN with 30 labelled people


@dataclass(frozen=True)
class Settings:
    """Cohorts of the exam by number of people; one eye a person. `seed` of the phantoms; the sealed exam has another.

    train, val, test: people of the main cohort. boundaries_*: those of them that are also stored without flattening;
    second_visit: those who come back on another vendor's scanner. decoy_*: people of each kind of decoy. pretraining:
    people of the cohort that encoders and the CNN of the ceiling learn from.
    """

    train: int = 400
    val: int = 100
    test: int = 1000
    boundaries_train: int = 60
    boundaries_test: int = 240
    second_visit: int = 450
    decoy_train: int = 100
    decoy_val: int = 20
    decoy_test: int = 250
    decoy_ample: int = 400
    pretraining: int = 2900
    seed: int = 7100
    pretraining_seed: int = 7200

    @property
    def people(self) -> int:
        """People of the main cohort."""
        return self.train + self.val + self.test

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


EXAM = Settings()
SEALED = Settings(seed=9200)  # the same tasks on people that nobody has looked at; 9100 until 2026-11-25
REAL_EYES = ("real_fluid", "real_fluid_decoder", "real_surfaces")  # the tasks that test real eyes
TUNED = ("tuning", "tuning_segmentation")  # the tasks that train the encoder further
NOT_SEALED = (*TUNED, "frozen", *REAL_EYES)  # tasks that the sealed cohort is not asked
