"""What a round costs each party, in closed form: vectors of d float32 parameters, n sites per round, A aggregators."""

from __future__ import annotations

from dataclasses import dataclass

from fl_privacy.config import Federation, ServerRoute, ShardsRoute

FLOAT = 4


@dataclass(frozen=True)
class Cost:
    """One party's share of one round: calls and messages it takes part in, and its vector parameters and bytes."""

    party: str
    count: int
    messages: float
    parameters_in: int
    parameters_out: int

    @property
    def bytes_in(self) -> int:
        return FLOAT * self.parameters_in

    @property
    def bytes_out(self) -> int:
        return FLOAT * self.parameters_out


def per_round(federation: Federation, parameters: int) -> list[Cost]:
    """The cost of one full round for one party of each kind."""
    d, n = parameters, federation.cohort
    tickets = 2 / federation.rounds_per_message  # a ticket and its receipt, shared by the rounds of a message
    if isinstance(federation.route, ServerRoute):
        return [Cost("server", 1, 2 * n, n * d, n * d), Cost("site", n, 2, d, d)]
    if isinstance(federation.route, ShardsRoute):
        a = federation.route.aggregators
        shard = -(-d // a)
        return [
            Cost("server", 1, 3 * a + 1 + tickets * n, 0, 0),  # open, collect, settle; evaluate
            Cost("aggregator", a, 2 * n + 4, n * shard, (n + 1) * shard),
            Cost("evaluator", 1, a + 1, d, 0),
            Cost("site", n, 2 * a + tickets, d, d),
        ]
    return [
        Cost("server", 1, 2 + tickets * n, n * d, d),  # open, collect
        Cost("shuffler", 1, 2 * n + 2, (n + 1) * d, 2 * n * d),
        Cost("site", n, 2 + tickets, d, d),
    ]
