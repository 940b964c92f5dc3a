"""UCI Heart Disease, four centres, prepared as in FLamby."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.errors import DataError
from fl_privacy.tasks import files
from fl_privacy.tasks.data import Dataset, Parts, Split, pool
from fl_privacy.tasks.dataset import Benchmark
from fl_privacy.tasks.own_files import HeldOut, contents
from fl_privacy.tasks.scaling import standardise

SUMS = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
# Slope, vessels and thal: missing at most centres.
DROPPED = (10, 11, 12)
# Chest pain and resting ECG, with every level except the first.
LEVELS = {2: (2, 3, 4), 6: (1, 2)}
# By encoded column, the usual clinical range in adults, for `scaling: public`: age, resting blood pressure (mm Hg),
# cholesterol (mg/dl), heart rate under exercise (per minute) and ST depression (mm). The others are 0 or 1.
RANGES = {0: (20.0, 80.0), 2: (80.0, 200.0), 3: (100.0, 400.0), 5: (60.0, 200.0), 7: (0.0, 4.0)}
TRAIN_FRACTION = 0.66
SPLIT_SEED = 43

Scaling = Literal["local", "public"]


class HeartDisease(Benchmark):
    """740 patients of four centres, two thirds of them for training; a site needs only its own centre's file."""

    own_sites: ClassVar[bool] = True
    record: ClassVar[tuple[int, ...]] = (13,)
    labels: ClassVar[int] = 2
    sites: ClassVar[tuple[str, ...]] = tuple(SUMS)
    train: ClassVar[int] = 486

    scaling: Scaling = Field(
        "local", description="by each centre's own training patients, or by clinical ranges that need no data"
    )

    @property
    def preprocessing(self) -> str:
        return self.scaling

    def load(self, folder: Path | None) -> Split:
        centres = [self.of_site(name, folder) for name in self.sites]
        train, test = pool([centre.train for centre in centres]), pool([centre.held_out for centre in centres])
        return Split(train, test, self.classes, self.shape, self.sites)

    def of_site(self, site: str, folder: Path | None) -> Parts:
        return prepare(read_centre(folder, site), self.sites.index(site), self.scaling)


def read_centre(data_dir: Path | None, centre: str) -> str:
    """The centre's file, checked."""
    name = f"processed.{centre}.data"
    content = files.read(data_dir, "heart-disease", name)
    path = files.folder(data_dir, "heart-disease") / "heart-disease" / name
    files.check(path, files.sha256(content), SUMS[centre])
    return content.decode("ascii")


def prepare(text: str, site: int, scaling: Scaling = "local") -> Parts:
    """One centre's training and held-out patients. With public scaling, no patient changes anything about another."""
    rows = complete_rows(text)
    y = (rows[:, -1] > 0).astype(np.int64)
    public = scaling == "public"
    train = by_content(rows) if public else training_rows(y)
    x = by_range(encode(rows)) if public else standardise(encode(rows), train)
    centre = np.full(len(y), site, dtype=np.int64)
    return Parts(Dataset(x[train], y[train], centre[train]), Dataset(x[~train], y[~train], centre[~train]))


def complete_rows(text: str) -> NDArray[np.float64]:
    """The patients without missing values, excluding the columns that most centres lack."""
    cells = [line.split(",") for line in text.splitlines() if line.strip()]
    kept = [[cell for i, cell in enumerate(row) if i not in DROPPED] for row in cells]
    try:
        return np.array([row for row in kept if "?" not in row], dtype=np.float64)
    except ValueError as error:
        raise DataError(f"heart-disease: a cell is not a number ({error}); get the file again") from None


def encode(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """13 features: the numbers, then one column per level of chest pain and of resting ECG."""
    numbers = [rows[:, i] for i in range(rows.shape[1] - 1) if i not in LEVELS]
    levels = [rows[:, i] == level for i, known in LEVELS.items() for level in known]
    return np.stack([*numbers, *levels], axis=1).astype(np.float64)


def training_rows(y: NDArray[np.int64]) -> NDArray[np.bool_]:
    """FLamby's fixed split: stratified if each label has more than two patients (not the case in Switzerland)."""
    from sklearn.model_selection import train_test_split

    stratify = y if np.bincount(y, minlength=2).min() > 2 else None
    sizes = {"train_size": TRAIN_FRACTION, "test_size": 1.0 - TRAIN_FRACTION}
    chosen, _ = train_test_split(np.arange(len(y)), **sizes, random_state=SPLIT_SEED, stratify=stratify)
    mask = np.zeros(len(y), dtype=np.bool_)
    mask[chosen] = True
    return mask


def by_content(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """About the same share, but a patient's own values decide: FLamby's draw depends on how many there are."""
    held_out = HeldOut(ratio=1.0 - TRAIN_FRACTION, seed=SPLIT_SEED)
    return ~held_out.choose(contents(rows), None, "heart-disease")


def by_range(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """The middle of each clinical range to 0; a quarter of a range is about one standard deviation."""
    middle, quarter = np.zeros(x.shape[1]), np.ones(x.shape[1])
    for column, (low, high) in RANGES.items():
        middle[column], quarter[column] = (low + high) / 2, (high - low) / 4
    return np.asarray((x - middle) / quarter, dtype=np.float32)
