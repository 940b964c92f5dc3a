"""Gaussian noise from a secret key against numpy's default generator, which is not cryptographically secure."""

from __future__ import annotations

import numpy as np

from benchmarks.kernels import KEY, extra_memory, ratio
from benchmarks.result import Result
from fl_privacy.dp import noise

SAMPLES, QUICK_SAMPLES = 11_200_000, 2**21


def run(quick: bool = False) -> list[Result]:
    """CPU time of one model's worth of samples relative to numpy's, and memory beyond the samples themselves."""
    samples, repeats = (QUICK_SAMPLES, 3) if quick else (SAMPLES, 9)
    noise.standard_normal(100, KEY, backend="numba")  # compile
    out = np.ones(samples, np.float32)  # allocated memory, unlike zeros that were never touched
    extra = extra_memory(lambda: noise.standard_normal(samples, KEY, out=out))
    found = ratio(lambda: noise.standard_normal(samples, KEY), lambda: _base(samples), repeats)
    twin = ratio(lambda: noise.standard_normal(samples, KEY, backend="numpy"), lambda: _base(samples), 3)
    detail = {"samples": samples, "numpy_kernel": round(twin, 2)}
    return [
        Result("Gaussian noise", round(found, 3), 0.6, "x numpy", detail=detail),
        Result("Gaussian noise, extra memory", round(extra, 2), 8, "MiB", detail={"samples": samples}),
    ]


def _base(samples: int) -> None:
    np.random.default_rng().standard_normal(samples)
