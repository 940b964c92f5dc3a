"""What the server finds: the order of each round's closed models, relative to a model that it held before.

In the published variant that model is at first the plain one, so orders are absolute: of a later round by way of the
rounds before it. Otherwise later orders are relative to the first one that the server held, and shadow models say
which input is which in that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attacks.common.attack import Unsuitable
from attacks.common.knowledge import Knowledge
from attacks.permutation import shadows
from attacks.permutation.factors import Factors, Order, after, inverse
from attacks.permutation.invariants import Gathered, Step, linear
from attacks.permutation.matching import MATCHERS
from attacks.permutation.received import Received, received
from fl_privacy.steps.permute.shuffled import example_rules
from fl_privacy.tasks.workload import layout_of
from fl_privacy.transcript.read import View

STRONGEST = "alternating"


@dataclass(frozen=True)
class Findings:
    """By method and round the order relative to the model sent, and the order of the plain model's positions.

    `plain_start`: the model sent in the first round was the plain one.
    """

    factors: Factors
    relative: Mapping[str, Mapping[int, Order]]
    absolute: Mapping[str, Mapping[int, Order]]
    plain_start: bool


class Chain:
    """Rounds connected by their relative orders. The first model that the server held has the order of the frame."""

    def __init__(self, factors: Factors) -> None:
        self.factors = factors
        self.relative: dict[str, dict[int, Order]] = {name: {} for name in MATCHERS}
        self.framed: dict[int, Order] = {}  # by round the order relative to the frame
        self.gathered = Gathered(factors) if linear(factors) else None

    def add(self, seen: Received) -> None:
        """Match a round's mean, and open all of its models with what is found."""
        factors = self.factors
        last = self.framed[max(self.framed)] if self.framed else factors.unchanged()
        for name, match in MATCHERS.items():
            self.relative[name][seen.round] = match(factors, seen.mean, seen.sent)
        order = self.relative[STRONGEST][seen.round]
        self.framed[seen.round] = after(order, last)
        if self.gathered is not None:
            back, (group,) = inverse(order), factors.inputs
            opened = [factors.moved(row, back) for row in seen.closed]
            self.gathered.add(Step(seen.sent, opened, last[group]))


def examine(view: View, knowledge: Knowledge, seed: int) -> Findings:
    """Every round with an earlier model that says anything; chance is in the shadows alone."""
    federation = knowledge.federation
    if not federation.permute.closes:
        raise Unsuitable("permute: this run has no secret orders; the attack is for permute: tazza")
    if federation.task.is_own:
        raise Unsuitable("task: the architecture of your own task is known at its sites; use a task of ours")
    chain = Chain(Factors(example_rules(federation), layout_of(federation)))
    for seen in received(view):
        if seen.sent.any():  # the server starts from zeros
            knowledge.progress(f"permutation, round {seen.round}")
            chain.add(seen)
    plain_start = not federation.permute.own_start
    absolute = {"absolute": chain.framed} if plain_start else by_shadows(chain, knowledge, seed)
    return Findings(chain.factors, chain.relative, absolute, plain_start)


def by_shadows(chain: Chain, knowledge: Knowledge, seed: int) -> dict[str, dict[int, Order]]:
    """Inputs in the frame by what hidden orders cancel in, and from there in every round."""
    if chain.gathered is None or not chain.framed:
        return {}
    (group,) = chain.factors.inputs
    knowledge.progress("permutation, shadow federations")
    rounds = max(chain.framed)
    trained = shadows.shadows(chain.factors, knowledge.federation, knowledge.proxy, rounds, seed)
    frames = shadows.absolute(chain.gathered.found, trained)
    return {
        name: {round: {group: found[order[group]]} for round, order in chain.framed.items()}
        for name, found in frames.items()
    }
