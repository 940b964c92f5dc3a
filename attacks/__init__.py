"""Attacks on recorded runs: `run(view, knowledge)` sees one party's view, `score(findings, truth)` what it is worth."""

from attacks.replay import ATTACKS, known, replay

__all__ = ["ATTACKS", "known", "replay"]
