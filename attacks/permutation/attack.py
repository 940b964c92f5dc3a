"""Attacks on the permutation as a plug-in: the server puts names to the hidden units and inputs of closed models."""

from __future__ import annotations

from collections.abc import Mapping

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from attacks.permutation.run import Findings, examine
from attacks.permutation.score import score
from fl_privacy.transcript.read import View


class Permutation:
    """A server with what it sent and received, the protocol, the architecture and records of the same kind."""

    name = "permutation"
    observers = ("server",)
    needs: frozenset[Need] = frozenset({"proxy"})

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        return examine(views["server"], knowledge, seed)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score(findings, truth)


ATTACK: Attack[Findings] = Permutation()
