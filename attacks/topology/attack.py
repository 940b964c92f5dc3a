"""TADI as a plug-in: whoever sees updates asks how much of a sensitive class every site has, and by which channel."""

from __future__ import annotations

from collections.abc import Mapping

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from attacks.topology.run import Findings, examine
from attacks.topology.score import score
from fl_privacy.transcript.read import View


class Topology:
    """Parties that know the protocol, the graph, the organisations, the global models, and records of the same kind."""

    name = "topology"
    observers = ("aggregator-*", "evaluator", "peer-*", "region-*", "server", "shuffler")
    needs: frozenset[Need] = frozenset({"models", "proxy"})

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        return examine(views, knowledge, seed)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score(findings, truth)


ATTACK: Attack[Findings] = Topology()
