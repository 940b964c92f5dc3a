"""Bytes on the wire: a run on real processes against what the plan says."""

from __future__ import annotations

import pytest

from benchmarks import traffic
from fl_privacy.config import Federation


@pytest.mark.e2e
def test_every_party_of_a_sharded_run_moves_what_the_plan_says_within_1_percent() -> None:
    found = traffic.measure(aggregators=2, hidden=12_000)
    assert [one.party for one in found] == ["aggregator-0", "aggregator-1", "evaluator", "site-0", "site-1", "site-2"]
    for one in found:
        assert min(one.planned) > 10**6, one
        assert one.error < 0.01, one
        assert 0 < one.handshakes < 50_000, one


@pytest.mark.parametrize("by", ["sites", "server"])
def test_the_plan_of_an_aggregator_falls_as_their_number(by: str) -> None:
    totals = []
    for aggregators in (2, 4, 8):
        route = f"{{kind: shards, aggregators: {aggregators}}}"
        federation = Federation.parse(f"sites: 4\nevaluate: {{by: {by}}}\nroute: {route}")
        _, aggregator, evaluator, _ = federation.route.cost(federation, 80_000)
        totals.append(aggregators * sum((*aggregator.models, *aggregator.updates)))
        assert bool(evaluator.bytes_in) is (by == "server")  # otherwise it only gives out the first model
    assert len(set(totals)) == 1
