"""LPIPS (Zhang et al. 2018), version 0.1 on AlexNet, from weights in the data folder."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, max_pool2d

from attacks.inversion.quality import Pictures, Values
from fl_privacy.errors import DataError
from fl_privacy.tasks import files

FILE = "lpips_alex.npz"
SMALLEST = 64  # AlexNet pools smaller pictures away: they are enlarged
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
STRIDES, PADDINGS, POOLED = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), (1, 2)


class Lpips:
    """A distance of pictures by the features of a network, 0 for equal ones."""

    def __init__(self, data_dir: Path | None) -> None:
        arrays = _arrays(data_dir)
        layers = range(len(STRIDES))
        self._kernels = [_tensor(arrays, f"AlexNet_0/Conv_{i}/kernel").permute(3, 2, 0, 1) for i in layers]
        self._biases = [_tensor(arrays, f"AlexNet_0/Conv_{i}/bias") for i in layers]
        self._heads = [_tensor(arrays, f"NetLinLayer_{i}/Conv_0/kernel").reshape(1, -1, 1, 1) for i in layers]

    def __call__(self, found: Pictures, original: Pictures) -> Values:
        with torch.no_grad():
            total = torch.zeros(len(found))
            for a, b, head in zip(self._features(found), self._features(original), self._heads, strict=True):
                total += (head * (a - b).square()).sum(dim=1).mean(dim=(1, 2))
        return np.asarray(total, np.float64)

    def _features(self, pictures: Pictures) -> list[Tensor]:
        """The activations of each convolution, of unit length over the channels."""
        x = torch.from_numpy(pictures).float()
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        if min(x.shape[2:]) < SMALLEST:
            x = interpolate(x, size=SMALLEST, mode="bilinear", align_corners=False)
        x = (2 * x - 1 - torch.tensor(SHIFT).view(1, 3, 1, 1)) / torch.tensor(SCALE).view(1, 3, 1, 1)
        made = []
        for i, (kernel, bias) in enumerate(zip(self._kernels, self._biases, strict=True)):
            x = max_pool2d(x, 3, 2) if i in POOLED else x
            x = conv2d(x, kernel, bias, STRIDES[i], PADDINGS[i]).relu()
            made.append(x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10))
        return made


def _arrays(data_dir: Path | None) -> dict[str, NDArray[np.float32]]:
    content = files.read(data_dir, "lpips", FILE)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"data_dir: lpips/{FILE} is not an npz of arrays ({error}); get the file again") from None


def _tensor(arrays: dict[str, NDArray[np.float32]], name: str) -> Tensor:
    if name not in arrays:
        raise DataError(f"data_dir: lpips/{FILE} has no array {name!r}; get the file again")
    return torch.from_numpy(np.ascontiguousarray(arrays[name], np.float32))
