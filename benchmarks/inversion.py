"""DLG against whole gradients of one image, and against half of their coordinates; MNIST if there is a data folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch

from attacks.inversion import pixels, quality
from attacks.inversion.gradients import Target, sight_of
from attacks.inversion.matching import Leak
from attacks.inversion.score import RECOVERED
from benchmarks.result import Result
from fl_privacy.coding import Known
from fl_privacy.config import Federation
from fl_privacy.shard import masks
from fl_privacy.tasks.files import ENVIRONMENT
from fl_privacy.tasks.workload import Workload

IMAGES, QUICK_IMAGES = 16, 1
SECONDS = 300
CONFIG = Path(__file__).parent.parent / "configs" / "inversion.yaml"


def run(quick: bool = False) -> list[Result]:
    """The share of images with SSIM above 0.9, and the time it took, with one thread."""
    count = QUICK_IMAGES if quick else IMAGES
    data = Path(os.environ[ENVIRONMENT]) if ENVIRONMENT in os.environ else None
    config = CONFIG.read_text().replace("dataset: digits", f"dataset: {'mnist' if data else 'digits'}")
    federation = Federation.parse(config)
    work = Workload(federation, data)
    owners = masks.owners(work.initial.size, 2, federation.seed)
    whole, seconds = _recovered(work, count, np.ones(owners.size, np.bool_))
    half, _ = _recovered(work, count, owners == 0)
    detail = {"dataset": federation.task.dataset, "images": count, "ssim": whole}
    return [
        Result("DLG, images recovered", _share(whole), 0.5, "of images", "higher", detail),
        Result("DLG, whole gradients", round(seconds, 1), SECONDS, "s", detail=detail),
        Result("DLG, half of the coordinates", _share(half), 0, "of images", "higher", detail | {"ssim": half}),
    ]


def _share(found: list[float]) -> float:
    return sum(value > RECOVERED for value in found) / len(found)


def _recovered(work: Workload, count: int, seen: np.ndarray) -> tuple[list[float], float]:
    """The SSIM of each image, and the seconds for all."""
    shape, classes = (1, *work.federation.task.data_set.shape), work.federation.task.data_set.classes
    began, found = time.monotonic(), []
    for row, site in enumerate(work.federation.site_names[:count]):
        data = work.site_data(site)
        update = work.update(work.initial, data, site, 1)
        target = Target(site, (sight_of(1, row, work.initial, Known(update[seen]), seen, work.federation),))
        generator = torch.Generator().manual_seed(row)
        made = pixels.dlg(Leak(work.model, target), shape, classes, generator).clamp(0, 1).numpy()
        found.append(float(quality.ssim(made, data.x.astype(np.float64))[0]))
    return found, time.monotonic() - began
