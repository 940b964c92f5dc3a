"""What the server's record of a round on `route: mixes` says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.mix import shares
from fl_privacy.rns.coding import CARRY_SAFE, Modular
from fl_privacy.rns.residues import Residues, unpack

SUM = "sum-"  # and the name of a mix


def summed(coding: Modular, columns: int, recorded: Mapping[str, Payload]) -> Residues | None:
    """What the mixes gave, added up; the published form comes from one mix."""
    parts = [np.asarray(array) for name, array in recorded.items() if name.startswith(SUM)]
    if not parts:
        return None
    if coding.form == CARRY_SAFE:
        return shares.added([unpack(part, coding.moduli, columns) for part in parts], coding.moduli)
    return np.ascontiguousarray(parts[0]).view("<u8").reshape(len(coding.moduli), columns)
