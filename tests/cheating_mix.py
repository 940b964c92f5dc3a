"""`python cheating_mix.py ... --cheat KIND,...`: a mix that tampers with its sums, or with a tenth of its onions, and
otherwise keeps to the protocol.

With several kinds, each attempt has the next one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.mix.shares import Residues
from fl_privacy.round.attempt import Attempt
from shuffler_app import checked, mix, onions

KINDS = sys.argv.pop(sys.argv.index("--cheat") + 1).split(",")
sys.argv.remove("--cheat")


class Cheating(checked.CheckedMix):
    old: Payload | None = None  # of an earlier attempt
    seen: ClassVar[list[str]] = []

    def _added(self, attempt: Attempt, rows: Sequence[Payload], columns: int) -> Residues:
        if attempt.terms.name not in self.seen:
            self.seen.append(attempt.terms.name)
        kind = KINDS[self.seen.index(attempt.terms.name) % len(KINDS)]
        first, second, *rest = [row.copy() for row in rows]
        taken: dict[str, list[Any]] = {
            "altered": [first, second, *rest],
            "dropped": [second, *rest],
            "duplicated": [first, first, second, *rest],
            "replaced": [second, second, *rest],
            "replayed": [first if self.old is None else self.old, second, *rest],
        }
        self.old = first
        total = super()._added(attempt, taken[kind], columns)
        if kind == "altered":
            total[0, 5] = (int(total[0, 5]) + 1) % self._route.coding(self.federation).moduli[0]
        return total


class CheatingOnions(onions.OnionMix):
    old: ClassVar[list[bytes]] = []  # of an earlier attempt
    seen: ClassVar[list[str]] = []

    def _mixed(self, attempt: Attempt, whole: Payload) -> Payload:
        if attempt.terms.name not in self.seen:
            self.seen.append(attempt.terms.name)
        kind, data = KINDS[self.seen.index(attempt.terms.name) % len(KINDS)], super()._mixed(attempt, whole).tobytes()
        size = self._onions.size(self._index + 1)
        listed = [data[start : start + size] for start in range(0, len(data), size)]
        few = len(listed) // 10
        bad, rest = listed[:few], listed[few:]
        taken: dict[str, list[bytes]] = {
            "altered": [bytes([one[0] ^ 1]) + one[1:] for one in bad],
            "dropped": [],
            "duplicated": rest[:few],
            "replaced": [os.urandom(size) for _ in bad],
            "replayed": self.old[:few] or rest[:few],
        }
        self.old[:] = listed
        return np.frombuffer(b"".join([*taken[kind], *rest]), np.uint8)


if __name__ == "__main__":
    checked.CheckedMix, onions.OnionMix = Cheating, CheatingOnions
    sys.exit(mix.main())
