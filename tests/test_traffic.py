"""Bytes on the wire: a run on real processes against what the plan says."""

from __future__ import annotations

import pytest

from benchmarks import traffic
from fl_privacy.config import Federation
from fl_privacy.crypto import sealing
from fl_privacy.shard import sealed
from fl_privacy.theory.cost import times


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
    keyed = sealing.OVERHEAD + 32  # the key to a shard, for one site
    assert mailbox.bytes_in == 4 * pieces + model + 4 * 4 * keyed + 4 * counts
    assert mailbox.bytes_out == 4 * (pieces + model + 4 * keyed) + counts
    assert mailbox.seals[0] == mailbox.bytes_in - 5 * numbers - (4 * 4 + 4) * counts
    assert (site.seals[1], site.seals[0]) == (mailbox.seals[0] // 4, mailbox.seals[1] // 4)
    assert mailbox.observed == 0


@pytest.mark.parametrize("masks", ["run", "round"])
def test_a_plan_where_some_sites_aggregate_has_what_both_kinds_move(masks: str) -> None:
    text = f"sites: 6\nevaluate: sites\nroute: {{kind: shards, aggregators: 2, placement: sites, masks: {masks}}}"
    federation = Federation.parse(text)
    _, mailbox, aggregates, trains = federation.route.cost(federation, 80_000)
    assert (aggregates.count, aggregates.does, trains.count, trains.does) == (2, "aggregates", 4, "")
    assert mailbox.bytes_in == 2 * aggregates.bytes_out + 4 * trains.bytes_out
    assert aggregates.updates[0] > 6 * 4 * 40_000 > trains.updates[0] == 0
    # Seals are bytes that take time, and the mailbox is the one that all wait for.
    took = times(federation.route.cost(federation, 80_000), 1.0)
    assert took.updates == 6 * 4 * 80_000 + 6 * 2 * sealed.sizes([0], 0)[0]


def test_a_plan_of_part_of_the_sites_counts_the_models_that_aggregating_sites_need_for_their_masks() -> None:
    """Of eight sites four aggregate and two train in a round: on average three aggregate without training."""
    text = "sites: 8\ncohort: 2\nevaluate: sites\nroute: {{kind: shards, aggregators: 4, n_min: 2, {}placement: sites}}"
    planned = [Federation.parse(text.format(masks)) for masks in ("", "masks: round, ")]
    run, round = (one.route.cost(one, 80_000)[1].parameters_out for one in planned)
    assert round - run == 3 * 80_000


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
