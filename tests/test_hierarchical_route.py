"""Route hierarchical: what its config demands, what a region and the server make of updates, and what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, strategies as st

from aggregator_app.summing import Region
from fl_privacy.combine import mean
from fl_privacy.config import Federation
from fl_privacy.config.policy import Policy, PolicyError
from fl_privacy.deploy.engines import compose
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.errors import ConfigError, ProtocolError
from fl_privacy.routes.ends import peers
from fl_privacy.routes.hierarchical import EXACT, PLAIN, encoded, mean_of
from fl_privacy.routes.regions import check
from fl_privacy.wire import client, federation_pb2 as pb
from helpers import Array, refused, round_header
from inprocess import KEYS, LENGTH, SERVER, Context, Quiet, opened, submission, updates
from profiles import examples

BASE: dict[str, Any] = {"name": "test", "sites": 12, "route": {"kind": "hierarchical", "regions": [5, 4, 3]}}


def federation(route: dict[str, Any] | None = None, **changes: Any) -> Federation:
    values = {**BASE, **changes, "route": {**BASE["route"], **(route or {})}}
    return Federation.parse(yaml.safe_dump(values))


# The config


def named(**organisations: str) -> list[dict[str, str]]:
    return [
        {"name": f"site-{i}", **({"organisation": o} if (o := organisations.get(f"s{i}")) else {})} for i in range(12)
    ]


@pytest.mark.parametrize(
    ("route", "changes", "problem"),
    [
        ({"regions": [5, 4]}, {}, "route.regions: (5, 4) does not divide 12 sites"),
        ({"regions": 13}, {}, "route.regions: 13 does not divide 12 sites"),
        ({"regions": [6, 4, 2]}, {}, "route.n_min: region-2 has 2 of 3 organisations"),
        ({}, {"sites": named(s10="a", s11="a")}, "route.n_min: region-2 has 2 of 3 organisations"),
        ({}, {"cohort": 11}, "route.n_min: region-2 in a cohort of 11 may have 2 of 3 organisations"),
        ({}, {"combine": {"kind": "median"}}, "needs single updates"),
        ({}, {"combine": {"kind": "fedavg", "weights": "records"}}, "combine.weights"),
        ({}, {"topology": {"kind": "ring"}}, "topology.kind: ring, and updates travel by regions"),
        ({}, {"topology": {"kind": "hierarchical"}}, "topology.regions: [4, 4, 4], and route.regions are [5, 4, 3]"),
        ({"regions": 4}, {"sites": [{"name": f"region-{i}"} for i in range(12)]}, "'region-0' is the name of a region"),
        ({}, {"hosts": {"superlink": "a:1", "regions": ["a:2", "b:2"]}}, "hosts: region-2 has no address"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_fix(route: Any, changes: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        federation(route, **changes)
    assert problem in str(caught.value)


@pytest.mark.parametrize("regions", [0, [], [0, 12], [-1, 13], "three", 65])
def test_regions_that_are_no_numbers_are_refused(regions: Any) -> None:
    with pytest.raises(ConfigError, match=r"route"):
        federation({"regions": regions})


def test_a_config_reads_back_and_sites_are_in_regions_in_their_order() -> None:
    made = federation({"regions": 5}, sites=17)
    assert Federation.parse(made.to_yaml()).digest == made.digest
    route: Any = made.route
    regions = route.members(made)
    assert [len(sites) for sites in regions] == [4, 4, 3, 3, 3]
    assert sum(regions, ()) == made.site_names
    assert route.submits_to(made, "site-8") == ["region-2"]
    assert next(str(one) for one in route.trust(made)) == (
        "region-0 alone can see every update of its region, and who sent it"
    )


def test_a_policy_counts_the_organisations_of_the_site_s_own_region() -> None:
    values = {
        "epsilon_per_round": 1,
        "epsilon": 1,
        "tasks": ["digits"],
        "routes": ["hierarchical"],
        "allow_plain": True,
    }
    policy = Policy.model_validate({**values, "min_cohort": 4})
    policy.check(federation(), "site-5")
    with pytest.raises(PolicyError, match="this site's region has fewer than the 4 organisations"):
        policy.check(federation(), "site-9")


def test_a_site_knows_the_address_of_its_own_region_only(tmp_path: Path) -> None:
    made = compose.addressed(federation())
    provision(made, tmp_path / "kits")
    assert Folder.open(tmp_path / "kits" / "site-6").kit.middleware == ("region-1:9093",)
    assert len(Folder.open(tmp_path / "kits" / "server").kit.middleware) == 3
    assert "region-1" in {path.name for path in (tmp_path / "kits").iterdir()}
    for own in (["b:1"], ["a:1", "b:1", "c:1"]):
        ((address, identity),) = peers(made, own, "site-6")
        assert (address, identity.name) == ("b:1", "region-1")
    with pytest.raises(ConfigError, match="2 addresses"):
        peers(made, ["a:1", "b:1"], "site-6")
    document = compose.document(made, tmp_path / "federation.yaml", "image", "run")
    needs = document["services"]["site-6"]["depends_on"]
    assert {name for name in needs if name.startswith("region")} == {"region-1"}
    assert {"region-0", "region-1", "region-2"} <= set(document["services"]["server"]["depends_on"])


# The sums


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 2**32), exact=st.booleans())
@examples(60)
def test_the_mean_of_regional_sums_is_federated_averaging(sizes: list[int], seed: int, exact: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(sum(sizes), 40)) * 10.0 ** rng.uniform(-6, 6, (sum(sizes), 40))).astype(np.float32)
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    found = mean_of([encoded(part, exact) for part in parts], sizes, 40)
    flat = mean.weighted(rows, exact=exact)
    if exact:
        assert found.tobytes() == flat.tobytes()
    else:  # one rounding to float32 for each region, and one of the mean
        size = np.abs(rows.astype(np.float64)).sum(axis=0) / len(rows)
        assert (np.abs(found - flat) <= 4 * size * 2.0**-24 + 2.0**-140).all()


def test_a_sum_tells_nothing_of_the_bits_below_it() -> None:
    """In float64, bits of a small number would stand alone below those of the large one."""
    small = np.float32(1.2345678e-6)
    total = encoded(np.array([[1.0], [small]], np.float32), exact=False)
    assert total.dtype == np.float32
    assert total[0] - np.float32(1) != small
    with refused("DATA_LOSS"):
        encoded(np.full((3, 1), 3e38, np.float32), exact=False)


def said(rows: Any = (1, 2, 3), form: Any = PLAIN, **changes: Any) -> client.Release:
    fields = {"phase": "released", "count": 4, "rows": np.array(rows, form.type), **changes}
    return client.Release(**fields)


NUMBERS = np.ones(2, np.uint64)


@pytest.mark.parametrize(
    ("release", "problem"),
    [
        (said(phase="failed", reason="2 of 4 updates came"), "2 of 4 updates came"),
        (said(phase="closed"), "released nothing"),
        (said(count=2), "count: 2 of 5 sites"),
        (said(count=6), "count: 6 of 5 sites"),
        (said(rows=[1, 2]), "sum: 2 numbers for 3 parameters"),
        (said(rows=[]), "sum: 0 numbers"),
        (said(rows=[0, 1, 2, 3, 4], form=EXACT), "sum: not limbs"),
        (said(rows=[6, 5 << 40, 0, 0], form=EXACT), "sum: not one of 4 updates"),
        (said(counts=np.ones(3, np.uint64), counted=4), "counts: not those"),
        (said(counts=NUMBERS, counted=5), "counts: not those"),
        (said(counts=NUMBERS, counted=2), "counts: not those"),
    ],
)
def test_the_server_refuses_what_no_region_can_have_added_up(release: Any, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        check(release, 3, 5, 2, 3)
    check(said(counts=NUMBERS, counted=3), 3, 5, 2, 3)
    check(said(rows=[], counts=NUMBERS, counted=4), 3, 5, 2, 0)


# A region


SIX: dict[str, Any] = {"sites": 6, "quorum": 3, "route": {"kind": "hierarchical", "regions": [3, 3]}}
MINE = [Context("site", f"site-{i}") for i in range(6)]


def region(folder: Path, index: int = 0, **changes: Any) -> Region:
    name = f"region-{index}"
    made = Federation.parse(yaml.safe_dump({"name": "test", "rounds": 1000, **SIX, **changes}))
    return Region(name, made, KEYS.of("region", name), folder, Quiet(name))


async def asked(service: Region, run: str, round: int, value: float = 0.0, **changes: Any) -> pb.RoundHeader:
    """Open a round with all six sites, whatever region this is."""
    names = changes.pop("names", [f"site-{i}" for i in range(6)])
    header = round_header(run, round, LENGTH, sites=names, cohort=len(names), **{"quorum": 3, **changes})
    return await opened(service, header, np.full(LENGTH, value, np.float32))


async def sums(service: Region, header: pb.RoundHeader) -> tuple[pb.ReleaseHeader, Array]:
    request = pb.CollectRequest(run=header.run, round=header.round, attempt=header.attempt)
    first, *rest = [part async for part in service.collect(request, SERVER)]
    return first.release, np.frombuffer(b"".join(rest), np.float32)


def test_a_region_gives_the_sum_of_its_own_sites_and_the_same_bytes_again(tmp_path: Path) -> None:
    service, sent = region(tmp_path, 1), updates(6)

    async def main() -> None:
        header = await asked(service, "run", 1)
        for index in (5, 3, 4):
            await service.submit(submission(header, sent[index]), MINE[index])
        await asked(service, "run", 1, number=header.number)  # another region lost its updates: nobody sends again
        release, total = await sums(service, header)
        assert (release.phase, release.count, release.members, list(release.tiers)) == ("released", 3, b"", [])
        np.testing.assert_array_equal(total, sent[3:].astype(np.float64).sum(axis=0).astype(np.float32))
        assert (await sums(service, header))[1].tobytes() == total.tobytes()

    asyncio.run(main())


def test_a_site_of_another_region_gets_and_sends_nothing(tmp_path: Path) -> None:
    service = region(tmp_path)

    async def main() -> None:
        header = await asked(service, "run", 1)
        with refused("PERMISSION_DENIED"):
            await service.submit(submission(header, updates(1)[0]), MINE[3])
        with refused("PERMISSION_DENIED"):
            [part async for part in service.fetch(pb.FetchRequest(run="run"), MINE[3])]
        with refused("PERMISSION_DENIED"):
            request = pb.AbstainRequest(run="run", round=1, attempt=header.attempt)
            await service.abstain(request, MINE[4])
        assert service.runs["run"].attempt.round.accepted == ()

    asyncio.run(main())


def test_a_region_below_its_floor_or_a_site_s_own_releases_nothing(tmp_path: Path) -> None:
    service = region(tmp_path)

    async def main() -> None:
        with refused("INVALID_ARGUMENT"):
            await asked(service, "few", 1, names=["site-0", "site-1", "site-3", "site-4", "site-5"])
        header = await asked(service, "run", 1)
        for index in (0, 1):
            await service.submit(submission(header, updates(6)[index]), MINE[index])
        await service.abstain(pb.AbstainRequest(run="run", round=1, attempt=header.attempt), MINE[2])
        release, total = await sums(service, header)
        assert (release.phase, total.size) == ("failed", 0)
        assert "from fewer than 3 organisations" in release.reason

    asyncio.run(main())


def test_nothing_leaves_a_region_in_a_round_that_cannot_reach_its_quorum(tmp_path: Path) -> None:
    service = region(tmp_path, sites=8, quorum=8, route={"kind": "hierarchical", "regions": [4, 4]})

    async def main() -> None:
        header = await asked(service, "run", 1, names=[f"site-{i}" for i in range(8)], quorum=8)
        for index in (0, 1, 2):
            await service.submit(submission(header, updates(6)[index]), MINE[index])
        await service.abstain(pb.AbstainRequest(run="run", round=1, attempt=header.attempt), MINE[3])
        release, _ = await sums(service, header)
        assert (release.phase, release.reason) == ("failed", "3 of 4 updates came, 4 are needed")

    asyncio.run(main())


def test_a_site_that_comes_later_does_not_keep_a_region_from_repeating_its_sum(tmp_path: Path) -> None:
    """If an attempt fails because of another region, the next one is released for the same sites."""
    four = {"sites": 8, "quorum": 6, "route": {"kind": "hierarchical", "regions": [4, 4]}}
    everyone, sent = [f"site-{i}" for i in range(8)], updates(4)

    async def round(service: Region, number: int, members: tuple[int, ...], quorum: int = 6) -> Any:
        header = await asked(service, "run", 1, names=everyone, number=number, quorum=quorum)
        for index in range(4):
            if index in members:
                await service.submit(submission(header, sent[index]), MINE[index])
            else:
                await service.abstain(pb.AbstainRequest(run="run", round=1, attempt=header.attempt), MINE[index])
        return await sums(service, header)

    service = region(tmp_path, **four)
    first, total = asyncio.run(round(service, 1, (0, 1, 2)))
    for number, one in ((2, service), (3, region(tmp_path, **four))):  # and after a restart
        again, same = asyncio.run(round(one, number, (0, 1, 2, 3)))
        assert (first.count, again.count) == (3, 3)
        np.testing.assert_array_equal(same, total)
    for number, members in ((4, (1, 2, 3)), (5, (0, 1, 3))):
        with refused("FAILED_PRECONDITION"):
            asyncio.run(round(region(tmp_path, **four), number, members))
    with refused("FAILED_PRECONDITION"):  # three are too few here
        asyncio.run(round(region(tmp_path, **four), 6, (0, 1, 2, 3), quorum=8))


def test_updates_without_a_sum_stop_no_later_attempt(tmp_path: Path) -> None:
    """Two sites that send numbers which are too large fail an attempt; it released nothing, so others can go on."""
    service = region(tmp_path, sites=8, quorum=3, route={"kind": "hierarchical", "regions": [4, 4]})
    huge, sent = np.full(LENGTH, 3e38, np.float32), updates(4)

    async def main() -> None:
        header = await asked(service, "run", 1, names=[f"site-{i}" for i in range(8)])
        for index, update in enumerate((huge, huge, sent[2], sent[3])):
            await service.submit(submission(header, update), MINE[index])
        with refused("DATA_LOSS"):
            await sums(service, header)
        header = await asked(service, "run", 1, names=[f"site-{i}" for i in range(8)], number=2)
        await service.abstain(pb.AbstainRequest(run="run", round=1, attempt=header.attempt), MINE[0])
        for index in (1, 2, 3):
            await service.submit(submission(header, sent[index]), MINE[index])
        assert (await sums(service, header))[0].count == 3

    asyncio.run(main())


def test_a_restarted_region_releases_one_model_for_the_same_sites_only(tmp_path: Path) -> None:
    four = {"sites": 8, "quorum": 3, "route": {"kind": "hierarchical", "regions": [4, 4]}}
    everyone, sent = [f"site-{i}" for i in range(8)], updates(6)

    async def round(service: Region, number: int, members: tuple[int, ...]) -> pb.ReleaseHeader:
        header = await asked(service, "run", 1, names=everyone, number=number)
        for index in range(4):
            if index in members:
                await service.submit(submission(header, sent[index]), MINE[index])
            else:
                await service.abstain(pb.AbstainRequest(run="run", round=1, attempt=header.attempt), MINE[index])
        return (await sums(service, header))[0]

    assert asyncio.run(round(region(tmp_path, **four), 1, (0, 1, 2, 3))).count == 4
    with refused("FAILED_PRECONDITION"):
        asyncio.run(round(region(tmp_path, **four), 2, (0, 1, 2)))
    assert asyncio.run(round(region(tmp_path, **four), 1, (0, 1, 2, 3))).count == 4  # as if it had not been killed
