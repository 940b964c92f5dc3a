"""How like the sites' records the reconstructions are, beside guesses without a gradient and each method's best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from attacks.inversion import latent, quality
from attacks.inversion.gradients import Target
from attacks.inversion.grid import grid
from attacks.inversion.lpips import Lpips
from attacks.inversion.matching import certain
from attacks.inversion.priors import Priors
from attacks.inversion.run import Findings, Pictures
from fl_privacy.errors import DataError
from fl_privacy.tasks.data import Dataset

RECOVERED = 0.9  # the SSIM from which a picture counts as recovered
Quality = Callable[[quality.Pictures, quality.Pictures], quality.Values]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Ruler:
    """One way to compare pictures; `better` takes the better of several values."""

    measure: Quality
    better: Callable[[list[float]], float]


def score(findings: Findings, truth: Truth) -> Scores:
    """All measures of every method, means over the records."""
    behind = [_records(target, findings.labels.shape[1], truth) for target in findings.targets]
    originals = np.stack([x for x, _ in behind]).astype(np.float64)
    y = np.stack([labels for _, labels in behind]).astype(np.int64)
    rulers, notes = _rulers(truth)
    measures, classes = dict[str, Measure](), truth.federation.task.data_set.classes
    for method, found in findings.pictures.items():
        tops = _best(method, originals, y, classes, findings.priors)
        for name, ruler in rulers.items():
            groups = {"best": _mean(ruler.measure, tops, originals)}
            if method in findings.zeros:
                groups["zeros"] = _mean(ruler.measure, findings.zeros[method], originals)
            chance = ruler.better([_mean(ruler.measure, guess, originals) for guess in findings.blind])
            measures[f"{method}_{name}"] = Measure(_mean(ruler.measure, found, originals), chance, groups)
    right = np.mean([_common(a, b) for a, b in zip(findings.labels, y, strict=True)])
    measures["labels"] = Measure(float(right), _guessed(y, classes))
    rows = {"original": originals, **findings.pictures}
    rows |= {f"{method}, zeros": found for method, found in findings.zeros.items()}
    paired = {name: np.concatenate(_paired(found, originals)) for name, found in rows.items()}
    return Scores(measures, pictures={"pictures": grid(paired)}, notes=notes)


def _rulers(truth: Truth) -> tuple[dict[str, Ruler], list[str]]:
    made = {
        "mse": Ruler(quality.mse, min),
        "psnr": Ruler(quality.psnr, max),
        "ssim": Ruler(quality.ssim, max),
        "recovered": Ruler(lambda a, b: (quality.ssim(a, b) > RECOVERED).astype(np.float64), max),
    }
    try:
        return made | {"lpips": Ruler(Lpips(truth.data_dir), min)}, []
    except DataError as error:
        return made, [f"LPIPS was not measured: {error}"]


def _records(target: Target, batch: int, truth: Truth) -> tuple[quality.Pictures, NDArray[np.int64]]:
    """The images behind an update, and their labels; behind a sum, those of every site."""
    names = target.sites or (_site(target, truth),)
    parts = [_first(truth.records(name), batch // len(names)) for name in names]
    return np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])


def _site(target: Target, truth: Truth) -> str:
    """Whose gradient it is; of a row without a name, the site that it has most of."""
    if target.site is not None:
        return target.site
    sight, names = target.sights[0], truth.federation.site_names
    found = truth.round(sight.round)
    return str(names[found.sites[found.owners[sight.row]]])


def _first(data: Dataset, batch: int) -> Dataset:
    """The site's one batch; with fewer records than usual, the last one again."""
    return data.take(np.minimum(np.arange(batch), len(data) - 1))


def _paired(found: Pictures, originals: Pictures) -> list[Pictures]:
    """Each batch in the order of its originals: a mean gradient has no order, so it is the one with the least error."""
    made = []
    for pictures, truth in zip(found, originals, strict=True):
        errors = np.square(truth[:, None] - pictures[None]).mean(axis=(2, 3, 4))
        made.append(pictures[linear_sum_assignment(errors)[1]])
    return made


def _mean(measure: Quality, found: Pictures, originals: Pictures) -> float:
    return float(measure(np.concatenate(_paired(found, originals)), np.concatenate(list(originals))).mean())


def _best(method: str, originals: Pictures, y: NDArray[np.int64], classes: int, priors: Priors | None) -> Pictures:
    """What the method would make of the original itself: its prior limits it, but no gradient does."""
    ways: Mapping[str, Callable[[torch.Tensor, torch.Tensor, Priors], torch.Tensor]] = {
        "rog": lambda x, y, priors: latent.rog_best(x, priors),
        "ggl": latent.ggl_best,
    }
    if method not in ways or priors is None:
        return originals
    batches = zip(originals, y, strict=True)
    return np.stack(
        [ways[method](torch.from_numpy(x), certain(labels, classes), priors).numpy() for x, labels in batches]
    )


def _common(found: NDArray[np.int64], true: NDArray[np.int64]) -> float:
    """The share of labels that were found, whatever their order."""
    left = list(true)
    for label in found:
        if label in left:
            left.remove(label)
    return 1 - len(left) / len(true)


def _guessed(y: NDArray[np.int64], classes: int) -> float:
    """The share of labels that naming different classes at random finds, exact for batches of one."""
    return float(np.mean([len(set(labels)) / classes for labels in y]))
