"""R_P, the attack on a shuffle of parameters, with source inference on what it rebuilds: ten sites, the paper's CNN."""

from __future__ import annotations

import time

import numpy as np

from attacks.source import rebuild
from attacks.source.reader import Reader
from attacks.source.seen import Bucket, Sight
from benchmarks.result import Result
from fl_privacy.config import Federation
from fl_privacy.tasks.data import Dataset

SITES, ROUNDS = 10, 20
SHADOW, TARGETS = 300, 100  # records per site: a twentieth of a tenth of MNIST, and those that are attributed
SECONDS = 300.0


def run(quick: bool = False) -> list[Result]:
    """Seconds for all sites in all rounds; the paper's search by forward passes takes 20 hours on two GPUs."""
    rounds, shadow, targets = (1, 10, 10) if quick else (ROUNDS, SHADOW, TARGETS)
    task = {"dataset": "mnist", "model": "cnn5x5"}
    federation = Federation.model_validate({"name": "source", "sites": SITES, "task": task})
    reader, rng, names = Reader(federation), np.random.default_rng(0), federation.site_names
    start = rng.normal(0, 0.05, reader.layout.size).astype(np.float32)
    rows = rng.normal(0, 0.01, (SITES, start.size)).astype(np.float32)
    sight = Sight(1, start, names, rows.mean(axis=0), rows=rows, buckets=(Bucket(np.arange(SITES), names),))
    sets = rebuild.Sets({rebuild.CLEAN: {name: _images(shadow, rng) for name in names}}, {})
    asked = _images(SITES * targets, rng)
    began = time.monotonic()
    for _ in range(rounds):
        for _, _, losses in rebuild.parameters(reader, sight, sets, asked):
            losses.argmin(axis=1)
    seconds = time.monotonic() - began
    detail = {"rounds": rounds, "shadow_records": shadow, "targets": len(asked), "parameters": start.size}
    return [Result("R_P, MNIST CNN, 10 sites", round(seconds, 1), SECONDS, "s", detail=detail)]


def _images(count: int, rng: np.random.Generator) -> Dataset:
    return Dataset(rng.random((count, 1, 28, 28), np.float32), rng.integers(10, size=count))
