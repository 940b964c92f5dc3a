"""Speed and memory of the numerical core, relative to a memcpy of the same data on the same machine in the same run.

Times are CPU times. Each repeat times the memcpy and the kernel back to back; the result is the median ratio.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.result import Result
from fl_privacy import shuffle
from fl_privacy.combine import mean
from fl_privacy.shard import masks
from fl_privacy.shuffle import parameter

ROWS, COLUMNS, AGGREGATORS = 10, 11_237_432, 3
QUICK_COLUMNS = 2**20  # enough for compiled kernels
KEY = bytes(range(32))
MIB = 2**20


def run(quick: bool = False) -> list[Result]:
    """Every result with its limit; `quick` uses a smaller model, for which the limits do not hold."""
    columns, repeats = (QUICK_COLUMNS, 1) if quick else (COLUMNS, 7)
    matrix = np.random.default_rng(0).standard_normal((ROWS, columns), dtype=np.float32)
    copy = np.zeros_like(matrix)
    return [*_shuffles(matrix, copy, repeats), *_means(matrix, copy, repeats), *_shards(matrix[0], copy[0], repeats)]


def _shuffles(matrix: NDArray[np.float32], copy: NDArray[np.float32], repeats: int) -> list[Result]:
    def memcpy() -> None:
        np.copyto(copy, matrix)

    def kernel() -> None:
        parameter.shuffle(matrix, KEY)

    # Memory first: later runs reuse what earlier ones freed. A small matrix compiles the kernel.
    parameter.shuffle(matrix[:, :100].copy(), KEY, backend="numba")
    extra = extra_memory(kernel), extra_memory(lambda: shuffle.reorder(matrix, range(ROWS)[::-1]))
    naive = _naive_seconds(matrix)
    return [
        Result("parameter shuffle, extra memory", extra[0], 16, "MiB"),
        Result("row order, extra memory", extra[1], 16, "MiB"),
        Result("parameter shuffle, numba", ratio(kernel, memcpy, repeats), 8, "x memcpy"),
        Result(
            "parameter shuffle, numpy",
            ratio(lambda: parameter.shuffle(matrix, KEY, backend="numpy"), memcpy, min(repeats, 3)),
            25,
            "x memcpy",
        ),
        Result("naive column loop", naive / _median_seconds(kernel, repeats), 100, "x kernel", "higher"),
    ]


def _means(matrix: NDArray[np.float32], copy: NDArray[np.float32], repeats: int) -> list[Result]:
    def memcpy() -> None:
        np.copyto(copy, matrix)

    weights = np.linspace(1, 2, ROWS)
    return [Result("weighted mean", ratio(lambda: mean.weighted(matrix, weights), memcpy, repeats), 1.5, "x memcpy")]


def _shards(vector: NDArray[np.float32], copy: NDArray[np.float32], repeats: int) -> list[Result]:
    started = time.process_time()
    owners = masks.owners(vector.size, AGGREGATORS, seed=1)
    seconds = time.process_time() - started

    def memcpy() -> None:
        np.copyto(copy, vector)

    # As in a round loop, the memory has been touched before; so has the memcpy's.
    dealt, joined = np.zeros_like(vector), np.zeros_like(vector)

    def both() -> None:
        masks.join(masks.split(vector, owners, AGGREGATORS, out=dealt), owners, out=joined)

    return [
        Result("split and join", ratio(both, memcpy, 3 * repeats), 9, "x memcpy"),
        Result("masks", seconds, 2, "s CPU"),
    ]


def _seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def _median_seconds(function: Callable[[], object], repeats: int) -> float:
    function()  # compile, and touch the memory
    return statistics.median(_seconds(function) for _ in range(repeats))


def ratio(function: Callable[[], object], base: Callable[[], object], repeats: int) -> float:
    """The median ratio of CPU times; the base is timed before and after, as the speed of a shared machine drifts."""
    function()
    base()
    ratios = []
    for _ in range(repeats):
        before, value, after = _seconds(base), _seconds(function), _seconds(base)
        ratios.append(2 * value / (before + after))
    return statistics.median(ratios)


def _naive_seconds(matrix: NDArray[np.float32], sample: int = 20_000) -> float:
    """One permutation per column in a Python loop, timed on some columns and scaled to all."""
    rng = np.random.default_rng(0)
    rows, columns = matrix.shape
    started = time.process_time()
    for j in range(sample):
        matrix[:, j] = matrix[rng.permutation(rows), j]
    return float((time.process_time() - started) * columns / sample)


def extra_memory(function: Callable[[], object]) -> float:
    """The largest growth of the resident set while `function` runs, in MiB, sampled every millisecond."""
    done, start = threading.Event(), _resident()
    peak = start

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    done.set()
    watcher.join()
    return (peak - start) / MIB


def _resident() -> int:
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
