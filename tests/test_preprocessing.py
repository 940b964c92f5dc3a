"""What DP-SGD accepts: one record less changes nothing about another, and moves the sum by at most the clip."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image

from fl_privacy.config import Federation
from fl_privacy.dp import dpsgd
from fl_privacy.errors import ConfigError
from fl_privacy.tasks import files, heart_disease, lcl, load as electricity
from fl_privacy.tasks.data import Dataset, Parts
from fl_privacy.tasks.dataset import DATASETS, OURS
from fl_privacy.tasks.models import build

ROOT = Path(__file__).resolve().parent.parent
CLIP = 0.1
ROUNDING = 1 + 1e-9  # sums of a few hundred numbers in float64


def data_dir() -> Path:
    """The real data; otherwise skips with how to provide them."""
    for given_dir in (os.environ.get(files.ENVIRONMENT), ROOT.parent / "shared" / "data"):
        if given_dir and Path(given_dir).is_dir():
            return Path(given_dir)
    pytest.skip(f"real data are missing: set {files.ENVIRONMENT} to a data folder (docs/tasks.md)")


def clipped_sum(data: Dataset, classes: int) -> NDArray[np.float64]:
    model = build("logistic", data.x.shape[1:], classes, seed=1).double()
    y = torch.from_numpy(data.y)
    parts = dpsgd.clipped_sum(model, torch.from_numpy(data.x).double(), y if classes else y.double(), CLIP)
    return np.concatenate([part.numpy().ravel() for part in parts])


def moved(one: Parts, other: Parts, classes: int) -> float:
    """How far the training records of two folders move the clipped sum, in multiples of the clip."""
    return float(np.linalg.norm(clipped_sum(one.train, classes) - clipped_sum(other.train, classes))) / CLIP


# The shipped data sets

LABEL = {"name": "y", "levels": ["n", "p"]}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # those that are public, and those that are not
    "digits": ({}, None),
    "mnist": ({}, None),
    "cifar10": ({}, None),
    "imdb": ({}, None),
    "har": ({}, None),
    "synthetic": ({}, None),
    "heart-disease": ({"scaling": "public"}, {}),
    "lcl": ({"scaling": "public"}, {}),
    "csv": (
        {"label": LABEL, "features": [{"name": "a", "min": 0, "max": 9}], "scaling": "given"},
        {"label": LABEL, "features": ["a"], "scaling": "none", "missing": "local"},
    ),
    "images": ({"size": 8, "levels": ["n", "p"]}, None),
    "arrays": ({"x": {"shape": [2]}, "y": {"classes": 2}}, None),
    "load": (
        {"start": "2024-03-01", "days": 40, "scale": {"mean": 0.2, "std": 0.3}},
        {"start": "2024-03-01", "days": 40},
    ),
}


def federation(name: str, options: dict[str, Any]) -> Federation:
    task: dict[str, Any] = {"dataset": name, "options": options, "model": "logistic"}
    if not DATASETS.get(name).pooled:
        task["partition"] = {"kind": "by-site"}
    parts = {"sites": {"count": 3, "epsilon": 1}, "task": task, "privatise": {"kind": "dpsgd"}}
    return Federation.parse(yaml.safe_dump(parts))


@pytest.mark.parametrize("name", OURS)
def test_dpsgd_accepts_a_shipped_data_set_only_with_public_preprocessing(name: str) -> None:
    public, local = OPTIONS[name]
    assert federation(name, public).task.data_set.preprocessing == "public"
    if local is not None:
        with pytest.raises(ConfigError, match=r"which the budget of dpsgd does not cover; use options: \{"):
            federation(name, local)


def prepared(lines: list[str], scaling: heart_disease.Scaling, without: int | None = None) -> Parts:
    return heart_disease.prepare("\n".join(line for i, line in enumerate(lines) if i != without), 0, scaling)


@pytest.mark.parametrize("centre", heart_disease.SUMS)
def test_one_patient_less_moves_the_sum_by_at_most_the_clip(centre: str) -> None:
    lines = heart_disease.read_centre(data_dir(), centre).splitlines()
    distances = [moved(prepared(lines, "public"), prepared(lines, "public", i), 2) for i in range(0, len(lines), 9)]
    assert max(distances) <= ROUNDING
    assert max(distances) > 0.5, "no patient is in the sum"


def test_scaled_by_the_site_s_own_patients_one_of_them_moves_it_by_more() -> None:
    lines = heart_disease.read_centre(data_dir(), "va").splitlines()
    assert max(moved(prepared(lines, "local"), prepared(lines, "local", i), 2) for i in range(5)) > 1.2


def windows(kwh: NDArray[np.float32], plan: electricity.Plan) -> Parts:
    """The records of one household with the shipped public scaling."""
    readings = electricity.Readings(("a",), kwh[None], lcl.START)
    made = electricity.split(readings, plan, lcl.Lcl(scaling="public").statistics)
    return Parts(made.train, made.test)


@pytest.mark.parametrize("stride", [lcl.PLAN.stride, lcl.PLAN.length + 1])
def test_readings_less_move_the_sum_by_at_most_the_clip_for_each_record_that_had_them(stride: int) -> None:
    """Without a common reading, that is one record; in the shipped plan a day of readings is in several."""
    kwh = lcl.readings(data_dir()).take(["MAC000002"]).kwh[0, :4000]
    plan = electricity.Plan(1, lcl.PLAN.length, stride, lcl.PLAN.held_out)
    whole = windows(kwh, plan)
    for start in (0, 5 * stride, 20 * stride):
        gone = kwh.copy()
        gone[start + 1 : start + 1 + plan.length] = np.nan
        less = windows(gone, plan)
        records = len(whole.train) - len(less.train)
        left = {row.tobytes() for row in whole.train.x}
        assert all(row.tobytes() in left for row in less.train.x)
        assert records == 1 if stride > plan.length else 1 <= records <= 2 * (plan.length // stride + 1)
        assert 0 < moved(whole, less, 0) <= records * ROUNDING


def write_csv(folder: Path, numbers: list[int]) -> None:
    rows = [f"{n * 7919 % 97 / 10},{'np'[n % 2]}" for n in numbers]
    (folder / "a.csv").write_text("\n".join(["a,y", *rows]))


def write_arrays(folder: Path, numbers: list[int]) -> None:
    x = np.array([[n * 7919 % 97, n] for n in numbers], np.float32) / 10
    np.savez(folder / "a.npz", x=x, y=np.array(numbers) % 2)


def write_images(folder: Path, numbers: list[int]) -> None:
    for n in numbers:
        (folder / "np"[n % 2]).mkdir(exist_ok=True)
        pixels = np.random.default_rng(n).integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "np"[n % 2] / f"{n:02d}.png")


@pytest.mark.parametrize(("name", "write"), [("csv", write_csv), ("arrays", write_arrays), ("images", write_images)])
def test_one_record_of_one_s_own_less_moves_the_sum_by_at_most_the_clip(name: str, write: Any, tmp_path: Path) -> None:
    data, everyone = DATASETS.get(name).model_validate(OPTIONS[name][0]), list(range(40))
    found = []
    for left_out in (None, *everyone[::5]):
        folder = tmp_path / str(left_out)
        folder.mkdir()
        write(folder, [n for n in everyone if n != left_out])
        found.append(data.of_site("a", folder))
    distances = [moved(found[0], other, 2) for other in found[1:]]
    assert max(distances) <= ROUNDING
    assert max(distances) > 0.1
