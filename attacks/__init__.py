"""Attacks on recorded runs: `run(view, knowledge)` sees one party's view, `score(findings, truth)` what it is worth."""

from attacks.replay import ATTACKS, replay

__all__ = ["ATTACKS", "replay"]
