"""Gradient inversion as a plug-in: parties that receive updates, know their masks, and have records of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from attacks.inversion.run import METHODS, Findings, examine
from attacks.inversion.score import score
from fl_privacy.transcript.read import View


class Inversion:
    """Aggregators (with the evaluator, also in later rounds) or the server, on sites that make one step per round."""

    name = "inversion"
    observers = ("aggregator-*", "evaluator", "server")
    needs: frozenset[Need] = frozenset({"auxiliary", "models"})

    def __init__(self, methods: Sequence[str] = tuple(METHODS)) -> None:
        self.methods = tuple(methods)

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        return examine(views, knowledge, seed, self.methods)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score(findings, truth)


ATTACK: Attack[Findings] = Inversion()
