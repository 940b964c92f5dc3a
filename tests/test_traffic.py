"""Bytes on the wire: a run on real processes against what the plan says."""

from __future__ import annotations

import pytest

from benchmarks import traffic
from fl_privacy.config import Federation
from fl_privacy.crypto import sealing
from fl_privacy.shard import sealed


@pytest.fixture(scope="module")
def measured() -> dict[str, list[traffic.Traffic]]:
    """The benchmark's quick size, by placement."""
    found: dict[str, list[traffic.Traffic]] = {}

    def keep(aggregators: int, hidden: int, placement: str = "processes") -> list[traffic.Traffic]:
        found[placement] = measure(aggregators, hidden, placement)
        return found[placement]

    measure = traffic.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "measure", keep)
        assert all(result.ok for result in traffic.run(quick=True))
    return found


@pytest.mark.e2e
def test_every_party_of_a_sharded_run_moves_what_the_plan_says_within_1_percent(
    measured: dict[str, list[traffic.Traffic]],
) -> None:
    found = measured["processes"]
    assert [one.party for one in found] == ["aggregator-0", "aggregator-1", "evaluator", "site-0", "site-1", "site-2"]
    for one in found:
        assert min(one.planned) > 10**6, one
        assert one.error < 0.01, one
        assert 0 < one.handshakes < 50_000, one


@pytest.mark.e2e
def test_sealed_shards_are_as_large_as_the_plan_says_within_1_percent(
    measured: dict[str, list[traffic.Traffic]],
) -> None:
    found = measured["sites"]
    assert [one.party for one in found] == ["mailbox", "site-0", "site-1", "site-2"]
    for one in found:
        assert min(one.planned) > 10**6, one
        assert one.error < 0.01, one


def test_the_plan_of_a_mailbox_counts_every_byte_twice_and_what_seals_add() -> None:
    """What sites send, it receives; what it sends, they receive: the server has counts alone."""
    text = "sites: 4\nrounds: 3\nevaluate: sites\nroute: {kind: shards, aggregators: 4, placement: sites}"
    federation = Federation.parse(text)
    server, mailbox, site = federation.route.cost(federation, 80_000)
    assert mailbox.bytes_in == 4 * site.bytes_out
    assert mailbox.bytes_out == 4 * site.bytes_in + server.bytes_in
    counts, numbers = federation.bytes_of_counts, 4 * 80_000
    pieces, model = sum(sealed.sizes([numbers // 4] * 4, counts // 8)), numbers + 4 * sealing.TAG
    assert mailbox.bytes_in == 4 * pieces + model + 4 * counts
    assert mailbox.bytes_out == 4 * (pieces + model) + counts


@pytest.mark.parametrize("placement", ["processes", "sites"])
def test_what_a_run_moves_besides_its_rounds_leaves_one_party_and_reaches_another(placement: str) -> None:
    route = f"route: {{kind: shards, aggregators: 4, placement: {placement}}}"
    federation = Federation.parse(f"sites: 4\nevaluate: sites\n{route}")
    once = federation.route.once(federation, 80_000)
    assert sum(one.count * one.bytes_in for one in once) == sum(one.count * one.bytes_out for one in once)
    # The final model and, known only then, the best one; where sites aggregate, round 1 carries none.
    assert once[-1].models[0] == 4 * 80_000 * (2 if placement == "processes" else 1)


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
