"""The Privacy Inference Attack as a plug-in: an honest-but-curious server with data of its own."""

from __future__ import annotations

from collections.abc import Mapping

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.observed import observe
from attacks.common.truth import Truth
from attacks.privacy_inference import score
from attacks.privacy_inference.run import Findings, examine
from fl_privacy.transcript.read import View


class PrivacyInference:
    """The server, which knows the protocol, every row's privacy label, and records that no site has."""

    name = "privacy-inference"
    observers = ("server",)
    needs: frozenset[Need] = frozenset({"auxiliary"})

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        return examine(observe(views["server"]), knowledge, seed)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        return score.score(findings, truth)


ATTACK: Attack[Findings] = PrivacyInference()
