"""How like an original a picture is: MSE, PSNR and SSIM. Pictures are (count, channels, height, width) in 0..1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import correlate1d

Pictures = NDArray[np.float64]
Values = NDArray[np.float64]
WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03
MOST = 60.0  # dB: less than the error of rounding to a byte


def mse(found: Pictures, original: Pictures) -> Values:
    """The mean squared error of each picture."""
    return np.asarray(np.square(found - original).mean(axis=(1, 2, 3)))


def psnr(found: Pictures, original: Pictures) -> Values:
    """The peak signal-to-noise ratio of each picture in dB, at most 60."""
    return np.asarray(-10 * np.log10(np.maximum(mse(found, original), 10 ** (-MOST / 10))))


def ssim(found: Pictures, original: Pictures) -> Values:
    """The mean structural similarity of each picture (Wang et al. 2004), where the window fits into it."""
    mean_x, mean_y = _smooth(found), _smooth(original)
    var_x, var_y = _smooth(found**2) - mean_x**2, _smooth(original**2) - mean_y**2
    both = _smooth(found * original) - mean_x * mean_y
    light = (2 * mean_x * mean_y + K1**2) / (mean_x**2 + mean_y**2 + K1**2)
    structure = (2 * both + K2**2) / (var_x + var_y + K2**2)
    return np.asarray((light * structure).mean(axis=(1, 2, 3)))


def _smooth(pictures: Pictures) -> Pictures:
    """Under a Gaussian window of 11 pixels, or the largest odd number that fits."""
    side = min(WINDOW, *(length - 1 + length % 2 for length in pictures.shape[2:]))
    half = side // 2
    window = np.exp(-0.5 * (np.arange(-half, half + 1) / SIGMA) ** 2)
    for axis in (2, 3):
        pictures = correlate1d(pictures, window / window.sum(), axis=axis)
    return pictures[:, :, half : pictures.shape[2] - half, half : pictures.shape[3] - half]
