"""Attacks on recorded runs, one folder each: `run` sees some parties' views, `score` says what it found is worth."""

from attacks.common.attack import ATTACKS, known
from attacks.common.replay import replay

__all__ = ["ATTACKS", "known", "replay"]
