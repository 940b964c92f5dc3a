"""`python cheating_mix.py ... --cheat KIND,...`: a mix that tampers with its sums, and otherwise keeps to the protocol.

With several kinds, each attempt has the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from fl_privacy.coding import Payload
from fl_privacy.mix.shares import Residues
from fl_privacy.round.attempt import Attempt
from shuffler_app import checked, mix

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


if __name__ == "__main__":
    checked.CheckedMix = Cheating
    sys.exit(mix.main())
