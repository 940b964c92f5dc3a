"""Metadata as a plug-in: a server that looks at everything but the values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from attacks.metadata.run import Pairs, gather
from attacks.metadata.score import score
from fl_privacy.transcript.read import View


class Findings(NamedTuple):
    pairs: list[Pairs]
    seed: int


class Metadata:
    """The server, which knows for half of the rounds who sent which row, and guesses the other half."""

    name = "metadata"
    observers = ("server",)
    needs: frozenset[Need] = frozenset()

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        return Findings(gather(views["server"], knowledge.federation), seed)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score(findings.pairs, truth, findings.seed)


ATTACK: Attack[Findings] = Metadata()
