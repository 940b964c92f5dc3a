"""Membership inference as a plug-in: whoever sees updates, alone or together, asks which canaries took part."""

from __future__ import annotations

from collections.abc import Mapping

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from attacks.membership.run import Findings, examine
from attacks.membership.score import score
from fl_privacy.transcript.read import View


class Membership:
    """Parties that know the protocol, the masks, the global models, the candidates, and perhaps similar records."""

    name = "membership"
    observers = ("aggregator-*", "evaluator", "peer-*", "server", "shuffler")
    needs: frozenset[Need] = frozenset({"auxiliary", "canaries", "models"})

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        return examine(views, knowledge, seed)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score(findings, truth)


ATTACK: Attack[Findings] = Membership()
