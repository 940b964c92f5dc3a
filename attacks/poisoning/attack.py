"""Poisoning as a plug-in: what the sites that misbehave achieved, from the server's own record."""

from __future__ import annotations

from collections.abc import Mapping

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from attacks.poisoning.run import Findings, gather
from attacks.poisoning.score import score
from fl_privacy.transcript.read import View


class Poisoning:
    """Nobody finds out anything here: the attack happened in the run, and the server's record says what came of it."""

    name = "poisoning"
    observers = ("server",)
    needs: frozenset[Need] = frozenset({"models"})

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        view = views["server"]
        return gather(view, knowledge.models.named(max(view.rounds, default=0)))

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score(findings, truth)


ATTACK: Attack[Findings] = Poisoning()
