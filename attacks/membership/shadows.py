"""Updates of sites that certainly do not have a canary: other sites of the round, or sites of the attacker's own."""

from __future__ import annotations

import numpy as np

from attacks.common.knowledge import Knowledge
from attacks.membership.seen import Part, Seen, Vector
from fl_privacy.errors import DataError

PEERS = 8  # other sites that are enough: their updates have the real noise, and cost nothing
TRAINED = 5  # rounds in which the attacker trains sites of its own
MOST_NUMBERS = 2**27  # values of their updates held at once


class Shadows:
    """What the attacker compares a site with."""

    def __init__(self, knowledge: Knowledge, parameters: int, rounds: list[int]) -> None:
        self._knowledge, self._parameters, self.notes = knowledge, parameters, dict[str, None]()
        self._rounds = {rounds[round(i)] for i in np.linspace(0, len(rounds) - 1, min(TRAINED, len(rounds)))}

    def of(self, site: str, seen: Seen, part: Part) -> Vector:
        """One row per shadow, at the coordinates of `part`; a mixture is compared with mixtures of as many sites."""
        peers = [other for name, other in seen.parts.items() if name != site and _alike(other, seen.parts[site])]
        if len(peers) >= PEERS or (peers and not self._affordable):
            return np.stack([_at(peer, part) for peer in peers])
        if seen.round not in self._rounds or not self._affordable:
            return np.empty((0, len(part.values)), np.float32)
        made = part.of(self._knowledge.updates(seen.model, seen.round))
        if part.members == 1:
            return made
        draw = np.random.default_rng(seen.round)
        return np.stack([made[draw.choice(len(made), part.members)].mean(axis=0) for _ in made])

    @property
    def _affordable(self) -> bool:
        """Whether the attacker has records to train on, and room for the updates."""
        try:
            affordable = len(self._knowledge.auxiliary.sites) * self._parameters <= MOST_NUMBERS
            problem = "" if affordable else f"{self._parameters} parameters are too many for own sites"
        except DataError as error:
            affordable, problem = False, str(error)
        if problem:
            self.notes[f"likelihood: only where other sites' updates can be compared; {problem}"] = None
        return affordable


def _alike(one: Part, other: Part) -> bool:
    """Whether two sites' own updates were seen at the same coordinates."""
    return one.members == other.members == 1 and one.where is other.where


def _at(peer: Part, part: Part) -> Vector:
    """A peer's values at the coordinates of a part that may have been thinned."""
    return peer.thinned(len(part.values)).values
