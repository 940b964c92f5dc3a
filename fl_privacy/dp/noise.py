"""Gaussian noise and Poisson samples from a single-use key: AES-256 in counter mode, as for shuffles.

The normal distribution is cut into horizontal layers of equal area (ziggurat: Marsaglia and Tsang 2000). Word i of the
key's first stream is sample i: 10 bits choose the layer and 54 a sign and a fraction of its width; no bit is used
twice (Doornik 2005). Most fractions are certainly under the curve. One in 234 is doubtful: it is compared with the
curve or, in the base layer, becomes a sample of the tail (Marsaglia 1964). Words for that, and for rejected samples,
come in order from separate streams. The result therefore depends only on the key, not on the block size or the kernel;
both kernels share the same numpy code for the rare steps.

Samples are computed in float64 (fractions in steps of 2^-53, tails up to 13 sigma) and rounded to the nearest float32:
a relative error of 2^-24. The densities of the layers are accurate to 10^-13. Accountants assume real numbers: their
guarantee does not cover what the lowest bits of a float32 sum reveal (Mironov 2012).
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from itertools import pairwise
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.crypto.keys import check_key
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError

LAYER_BITS = 10
LAYERS = 2**LAYER_BITS
# The start of the tail and the area of a layer under exp(-x^2 / 2): the only pair whose layers end at height 1.
TAIL = "4.0388498461095045227144234053359312047009919558946"
AREA = "0.0012263246463530880728853709277371270618927068849358"
BLOCK = 2**15  # words at a time: they fit in the L2 cache
DOUBTFUL = 2**17  # words collected before they are settled in one batch: numpy calls are slow on few entries
UNIFORM_BITS = 53

# Streams per depth (how often a sample was redrawn); from TAILS on, one per attempt at a tail.
DRAWS, WEDGES, TAILS = range(3)


@dataclass(frozen=True)
class Ziggurat:
    """Layer i, between heights[i] and heights[i + 1], is under the curve up to edges[i + 1] and ends at edges[i].

    Layer 0 is a rectangle plus the tail; edges[0] is where a rectangle of the same area would end.
    """

    edges: NDArray[np.float64]
    heights: NDArray[np.float64]
    widths: NDArray[np.float64]  # value of one step of a word's fraction
    limits: NDArray[np.int64]  # smaller fractions are under the curve


@cache
def ziggurat() -> Ziggurat:
    """The layers, computed with decimals: float64 would lose half its digits towards the top."""
    with localcontext() as context:
        context.prec = 50
        tail, area = Decimal(TAIL), Decimal(AREA)
        height = (-tail * tail / 2).exp()
        edges, heights = [area / height, tail], [Decimal(0), height]
        for _ in range(LAYERS - 2):
            heights.append(heights[-1] + area / edges[-1])
            edges.append((-2 * heights[-1].ln()).sqrt())
        edges.append(Decimal(0))
        heights.append(Decimal(1))
        steps = 2 ** (64 - LAYER_BITS)
        limits = [int(inner / outer * steps) for outer, inner in pairwise(edges)]
        x = np.array([float(edge) for edge in edges])
        return Ziggurat(x, np.array([float(y) for y in heights]), x[:-1] / steps, np.array(limits, np.int64))


class _Sampler:
    """The streams of one key. Each is read in order, regardless of the sizes of the pieces requested."""

    def __init__(self, key: bytes, kernel: ModuleType) -> None:
        self._key, self._kernel = key, kernel
        self._streams: dict[tuple[int, int], Words] = {}

    def fill(self, out: NDArray[np.float32], depth: int = 0) -> None:
        """Fill `out` with the next samples of a depth."""
        layers, room = ziggurat(), min(DOUBTFUL, out.size)
        index, doubtful = np.empty(room, np.int64), np.empty(room, np.uint64)
        count = 0
        for first in range(0, out.size, BLOCK):
            part = out[first : first + BLOCK]
            if count + part.size > room:
                self._settle(out, index[:count], doubtful[:count], depth)
                count = 0
            words = self._take(DRAWS, depth, part.size)
            count = self._kernel.fill(words, first, layers.widths, layers.limits, part, index, doubtful, count)
        self._settle(out, index[:count], doubtful[:count], depth)

    def _settle(
        self, out: NDArray[np.float32], index: NDArray[np.int64], words: NDArray[np.uint64], depth: int
    ) -> None:
        """Accept the doubtful samples at `index`, already in `out`, or replace them."""
        layers = ziggurat()
        layer = (words & np.uint64(LAYERS - 1)).astype(np.int64)
        x = ((words.view(np.int64) >> np.int64(LAYER_BITS - 1)) | np.int64(1)) * layers.widths[layer]
        base = layer == 0
        tails = index[base]
        if tails.size:
            out[tails] = np.copysign(self._tails(tails.size, depth), x[base])
        index, layer, x = index[~base], layer[~base], x[~base]
        low, high = layers.heights[layer], layers.heights[layer + 1]
        y = low + (high - low) * _fractions(self._take(WEDGES, depth, index.size))
        again = index[y >= np.exp(-0.5 * x * x)]
        if again.size:
            redrawn = np.empty(again.size, np.float32)
            self.fill(redrawn, depth + 1)
            out[again] = redrawn

    def _tails(self, count: int, depth: int, attempt: int = 0) -> NDArray[np.float64]:
        """Normal samples from the tail: an exponential sample, kept if a second one is above x^2 / 2."""
        start = float(TAIL)
        words = self._take(TAILS + attempt, depth, 2 * count) | np.uint64(1)
        exponential = -np.log(words.astype(np.float64) * 2.0**-64).reshape(count, 2)
        x: NDArray[np.float64] = exponential[:, 0] / start
        again = np.flatnonzero(2 * exponential[:, 1] <= x * x)
        x += start
        if again.size:
            x[again] = self._tails(again.size, depth, attempt + 1)
        return x

    def _take(self, use: int, depth: int, count: int) -> NDArray[np.uint64]:
        if count == 0:
            return np.empty(0, np.uint64)
        stream = self._streams.get((use, depth))
        if stream is None:
            stream = self._streams[use, depth] = Words(self._key, stream=(depth << 32) + use)
        return stream.take(count)


def standard_normal(
    size: int, key: bytes, *, out: NDArray[np.float32] | None = None, backend: str | None = None
) -> NDArray[np.float32]:
    """`size` independent standard normal samples from a single-use `key`; fills and returns `out` if given.

    `backend` (numba or numpy) changes the speed, never the result.
    """
    _check_count("size", size)
    check_key(key)
    if out is None:
        out = np.empty(size, np.float32)
    _check_out(out, size)
    if size:
        _Sampler(key, kernels.pick("normal", size, backend)).fill(out)
    return out


def poisson_sample(count: int, rate: float, key: bytes) -> NDArray[np.int64]:
    """The chosen indices below `count`, each sampled independently with probability `rate`; `key` is single-use.

    The probability is `rate` rounded down to a multiple of 2^-53, so it never exceeds the accounted rate.
    """
    _check_count("count", count)
    check_key(key)
    if not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise FederationError(f"rate: {rate!r} is not a probability; use a number from 0 to 1")
    bound, stream = np.uint64(int(rate * 2**UNIFORM_BITS)), Words(key)
    chosen = [np.empty(0, np.int64)]
    for first in range(0, count, BLOCK):
        words = stream.take(min(BLOCK, count - first)) >> np.uint64(64 - UNIFORM_BITS)
        chosen.append(np.flatnonzero(words < bound) + first)
    return np.concatenate(chosen)


def _fractions(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The upper 53 bits of each word as a number in [0, 1)."""
    return (words >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) * 2.0**-UNIFORM_BITS


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise FederationError(f"{name}: {value!r} is not a number of samples; use an integer of 0 or more")


def _check_out(out: NDArray[np.float32], size: int) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != (size,):
        found = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise FederationError(f"out: {found} given, float32 ({size},) needed; pass numpy.empty(size, numpy.float32)")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise FederationError("out: not contiguous or read-only; pass a contiguous, writable array")
