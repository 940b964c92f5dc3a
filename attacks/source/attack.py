"""Source inference as a plug-in: whoever sees updates, or their sums, asks whose a training record is."""

from __future__ import annotations

from collections.abc import Mapping

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from attacks.source.run import Findings, examine
from attacks.source.score import score
from fl_privacy.transcript.read import View


class Source:
    """Parties that know the protocol, the global models, training records, and a few records like those of a site."""

    name = "source"
    observers = ("aggregator-*", "evaluator", "server", "shuffler")
    needs: frozenset[Need] = frozenset({"models", "shadows", "targets"})

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        return examine(views, knowledge, seed)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score(findings, truth)


ATTACK: Attack[Findings] = Source()
