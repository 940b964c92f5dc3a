"""Residue numbers of one large model: CPU time of encoding and decoding, relative to a memcpy of the update.

Encoding goes from float32 to the packed residues that travel; decoding from the packed residues of the sum to the
float32 sum. As in a round loop, the memory has been touched before; so has the memcpy's.
"""

from __future__ import annotations

import numpy as np

from benchmarks.kernels import COLUMNS, QUICK_COLUMNS, ratio
from benchmarks.result import Result
from fl_privacy.rns import moduli
from fl_privacy.rns.coding import Modular
from fl_privacy.rns.integers import Integers
from fl_privacy.vector import Vector
from fl_privacy.wire.buffers import keep_buffers

SITES, DIGITS = 10, 5
SPREAD = 0.3  # of the coordinates, relative to the range


def run(quick: bool = False) -> list[Result]:
    """Both ends of a round with r = 5 and 10 sites, and beside them plain fixed point modulo a power of two."""
    keep_buffers()
    size, repeats = (QUICK_COLUMNS, 1) if quick else (COLUMNS, 9)
    update = np.random.default_rng(0).standard_normal(size, dtype=np.float32) * np.float32(SPREAD)
    least = moduli.least(SITES, DIGITS)
    rns, fixed = coding("rns", moduli.optimal(least)), coding("fixed", moduli.power_of_two(least))
    return [*_both(rns, update, repeats, (5, 4)), *_both(fixed, update, repeats, (5, 4))]


def coding(name: str, chosen: moduli.Moduli) -> Modular:
    return Modular(name, "<u4", 0, moduli=chosen, integers=Integers.decimal(DIGITS), most=SITES)


def _both(used: Modular, update: Vector, repeats: int, limits: tuple[float, float]) -> list[Result]:
    copy = np.zeros_like(update)
    packed, _ = used.encode(update, 1.0)

    def memcpy() -> None:
        np.copyto(copy, update)

    def encode() -> None:
        used.encode(update, 1.0, out=packed)

    def decode() -> None:
        used.decode_packed(packed, update.size, 1, 1.0, out=copy)

    decode()
    bits = 32 * used.length(update.size) / update.size
    return [
        Result(f"{used.name}, encode", ratio(encode, memcpy, repeats), limits[0], "x memcpy"),
        Result(f"{used.name}, decode the sum", ratio(decode, memcpy, repeats), limits[1], "x memcpy"),
        Result(f"{used.name}, upload", bits, used.bits + 0.01, "bits/parameter"),
    ]
