"""What the server finds: the order of each round's closed models, relative to a model that it held before.

In the published variant that model is at first the plain one, so orders are absolute: of a later round by way of the
rounds before it. Otherwise the server holds none before the first round, and later ones relative to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attacks.common.attack import Unsuitable
from attacks.common.knowledge import Knowledge
from attacks.permutation.factors import Factors, Order, after
from attacks.permutation.matching import MATCHERS
from attacks.permutation.received import received
from fl_privacy.steps.permute.shuffled import Tazza, example_rules
from fl_privacy.tasks.workload import layout_of
from fl_privacy.transcript.read import View

STRONGEST = "alternating"


@dataclass(frozen=True)
class Findings:
    """By method and round the order relative to the model sent; and by round the order of the plain model's units.

    `plain_start`: the model sent in the first round was the plain one.
    """

    factors: Factors
    relative: Mapping[str, Mapping[int, Order]]
    absolute: Mapping[int, Order]
    plain_start: bool


def examine(view: View, knowledge: Knowledge, seed: int) -> Findings:
    """Every round with an earlier model that says anything. There is no chance in it."""
    federation = knowledge.federation
    if not isinstance(federation.permute, Tazza):
        raise Unsuitable("permute: this run has no secret orders; the attack is for permute: tazza")
    if federation.task.is_own:
        raise Unsuitable("task: the architecture of your own task is known at its sites; use a task of ours")
    factors = Factors(example_rules(federation), layout_of(federation))
    plain_start = not federation.permute.own_start
    relative: dict[str, dict[int, Order]] = {name: {} for name in MATCHERS}
    absolute: dict[int, Order] = {}
    last: Order | None = factors.unchanged() if plain_start else None
    for seen in received(view):
        if not seen.sent.any():
            continue  # the server starts from zeros
        knowledge.progress(f"permutation, round {seen.round}")
        for name, match in MATCHERS.items():
            relative[name][seen.round] = match(factors, seen.mean, seen.sent)
        if last is not None:
            absolute[seen.round] = last = after(relative[STRONGEST][seen.round], last)
    return Findings(factors, relative, absolute, plain_start)
