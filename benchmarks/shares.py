"""Three mixes' shares of one large encoded update: CPU time relative to a memcpy of the float32 update, and bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from benchmarks.kernels import COLUMNS, KEY, QUICK_COLUMNS, ratio
from benchmarks.result import Result
from fl_privacy.mix import onion, shares
from fl_privacy.rns import residues
from fl_privacy.rns.moduli import Moduli, least_for, optimal
from fl_privacy.wire.buffers import keep_buffers

MIXES, SITES, DIGITS = 3, 10, 5
LIMITS = {"modulo 2^32": 12.0, "residues": 60.0}


def run(quick: bool = False) -> list[Result]:
    """Splitting residues, as numbers, into two seeds and a share. What a site packs besides is in the details."""
    return list(_all(quick))


def _all(quick: bool) -> Iterator[Result]:
    keep_buffers()
    size, repeats = (QUICK_COLUMNS, 1) if quick else (COLUMNS, 9)
    rng = np.random.default_rng(0)
    update = rng.standard_normal(size, dtype=np.float32)
    copy = np.zeros_like(update)

    def memcpy() -> None:
        np.copyto(copy, update)

    moduli: dict[str, Moduli] = {"modulo 2^32": (2**32,), "residues": optimal(least_for(SITES, 10**DIGITS - 1))}
    for name, chosen in moduli.items():
        values = np.stack([rng.integers(0, m, size, dtype=residues.width(chosen, 1)) for m in chosen])

        def split(values: shares.Residues = values, chosen: Moduli = chosen) -> None:
            shares.split(values, chosen, MIXES, KEY)

        def site(values: shares.Residues = values, chosen: Moduli = chosen) -> None:
            _, data = shares.split(values, chosen, MIXES, KEY)
            residues.pack(data.astype(residues.width(chosen, 1), copy=False), chosen)

        packed = round(ratio(site, memcpy, max(1, repeats // 3)), 1)
        detail = {"moduli": list(chosen), "with_packing": packed}
        value = ratio(split, memcpy, repeats)
        yield Result(f"shares for three mixes, {name}", value, LIMITS[name], "x memcpy", detail=detail)
    plain = residues.words((2**32,), size)
    up = residues.words((2**32,), size + 1) + (MIXES - 1) * len(KEY) / 4
    yield Result("shares for three mixes, upload", up / plain, 1.05, "x plain bytes")
    yield _onions(20 if quick else 500)


def _onions(count: int) -> Result:
    """Bit onions through three mixes to the server: made and opened on one core."""
    keys = [X25519PrivateKey.generate() for _ in range(MIXES + 1)]
    names = [*(f"mix-{index}" for index in range(MIXES)), onion.SERVER]
    hops = [onion.Hop(name, key.public_key()) for name, key in zip(names, keys, strict=True)]
    place = onion.Place("bench", "run", 1, "attempt")
    began = time.process_time()
    made = [onion.wrapped(bytes(8), hops, place) for _ in range(count)]
    middle = time.process_time()
    for name, key in zip(names, keys, strict=True):
        made = [onion.opened(one, key, name, place) for one in made]
    end, layers = time.process_time(), (MIXES + 1) * count
    detail = {"layers_made": round(layers / (middle - began)), "layers_opened": round(layers / (end - middle))}
    return Result("bit onions, three mixes", count / (end - began), 100, "per second", "higher", detail)
