"""Floors hold for every set that is mixed apart from the rest, and count organisations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError
from fl_privacy.identity.roster import Member
from fl_privacy.routes.shuffler import ShufflerRoute
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import chunks
from helpers import Keys, bound_to, refused, round_header
from inprocess import Context, Quiet, parts_of, submission
from shuffler_app.service import Shuffler

SITES = 8
LENGTH = 4
MODEL = np.zeros(LENGTH, np.float32)
CONFIG = """
name: test
sites: {{count: 8, epsilon: [1, 4]}}
cohort: 7
quorum: 5
privatise: {{kind: ldp}}
route: {{kind: shuffler, level: {level}, buckets: {buckets}, n_min: 3}}
"""
LOW, HIGH = (0, 2, 4, 6), (1, 3, 5, 7)  # the sites with epsilon 1 and 4
WHOLE = {"level": "model", "buckets": "none"}

members = st.lists(
    st.tuples(st.sampled_from(("0.5", "1", "2", "4", "8")), st.sampled_from("abcdefgh")), min_size=3, max_size=30
)


@given(
    clients=members.filter(lambda found: len({organisation for _, organisation in found}) >= 3),
    kind=st.sampled_from(("published", "levelled")),
    level=st.sampled_from(("model", "layer", "parameter")),
    data=st.data(),
)
def test_every_bucket_has_enough_organisations(
    clients: list[tuple[str, str]], kind: str, level: str, data: st.DataObject
) -> None:
    tiers, organisations = [list(part) for part in zip(*clients, strict=True)]
    least = data.draw(st.integers(1, len(set(organisations))))
    sets = ShufflerRoute(level=level, buckets=kind, n_min=2).groups(tiers, organisations, least)
    assert sorted(i for group in sets for i in group.members) == list(range(len(clients)))
    assert all(len({organisations[i] for i in group.members}) >= max(2, least) for group in sets)


@given(tiers=st.lists(st.sampled_from(("0.5", "1", "2", "4", "8")), min_size=3, max_size=30))
def test_where_each_site_is_its_own_organisation_buckets_are_as_published(tiers: list[str]) -> None:
    route = ShufflerRoute(buckets="published", n_min=3)
    assert route.groups(tiers, [f"site-{i}" for i in range(len(tiers))], 3) == route.groups(tiers)


@pytest.mark.parametrize(
    "sites",
    [
        "{count: 6, epsilon: [1, 1, 1, 1, 1, 4]}",
        "[" + ", ".join(f"{{name: s{i}, epsilon: {1 + i // 3}, organisation: o{i % 2}}}" for i in range(6)) + "]",
    ],
    ids=["a site alone in its tier", "a tier of two organisations"],
)
def test_a_config_that_would_release_a_small_tier_by_itself_is_refused(sites: str) -> None:
    text = f"sites: {sites}\nprivatise: {{kind: ldp}}\nroute: {{kind: shuffler, level: model, n_min: 3}}\n"
    with pytest.raises(ConfigError, match=r"route\.level: 'model' mixes each tier by itself.*use buckets: published"):
        Federation.parse(text)
    Federation.parse(text.replace("n_min: 3", "n_min: 3, buckets: published"))


def test_a_config_whose_cohorts_may_have_a_small_tier_is_refused() -> None:
    text = CONFIG.format(**WHOLE)
    Federation.parse(text)
    with pytest.raises(ConfigError, match=r"a cohort may have 2 of the 3 organisations with epsilon 1"):
        Federation.parse(text.replace("cohort: 7", "cohort: 6"))


class Trial:
    """A shuffler in this process, with a roster of its own."""

    def __init__(self, folder: Path, clinic: Sequence[int] = (), **route: str) -> None:
        """`clinic`: the sites that one organisation runs."""
        self.keys = Keys(folder / "keys")
        names = {f"site-{i}" for i in clinic}
        for number in range(SITES):
            self.keys.of("site", f"site-{number}")
        made = [Member(m.role, m.name, m.key, "clinic" if m.name in names else "") for m in self.keys.members.values()]
        self.keys.members = {member.party: member for member in made}
        self.config = Federation.parse(CONFIG.format(**{**WHOLE, **route}))
        self.server = Context("server", "server", self.keys)
        own = self.keys.of("shuffler", "shuffler")
        self.service = Shuffler(self.config, own, folder / "state", Quiet("shuffler"))

    async def open(self, sites: Sequence[int], **changes: Any) -> pb.RoundHeader:
        fields = {"sites": [f"site-{i}" for i in sites], "cohort": len(sites), "quorum": 5, **changes}
        header = bound_to(self.config, self.keys, round_header("run", 1, LENGTH, **fields), MODEL)
        await self.service.open(parts_of(*chunks(pb.Chunk(round=header), [MODEL])), self.server)
        return header

    def site(self, index: int) -> Context:
        return Context("site", f"site-{index}", self.keys)

    async def send(self, header: pb.RoundHeader, sites: Sequence[int]) -> None:
        for index in sites:
            tier, update = self.config.sites[index].tier, np.full(LENGTH, index, np.float32)
            await self.service.submit(submission(header, update, tier=tier), self.site(index))

    async def collect(self, header: pb.RoundHeader) -> tuple[pb.ReleaseHeader, list[int]]:
        request = pb.CollectRequest(run="run", round=1, attempt=header.attempt)
        first, *rest = [part async for part in self.service.collect(request, self.server)]
        return first.release, [int(row[0]) for row in np.frombuffer(b"".join(rest), np.float32).reshape(-1, LENGTH)]


def test_a_whole_model_keeps_its_tier(tmp_path: Path) -> None:
    """The server weights models by tier: only models of one tier can be mixed (Shuffle-DP)."""

    async def main() -> None:
        trial = Trial(tmp_path)
        header = await trial.open(range(1, 8))
        await trial.send(header, range(1, 8))
        release, rows = await trial.collect(header)
        assert list(release.tiers) == ["1"] * 3 + ["4"] * 4
        assert (set(rows[:3]), set(rows[3:])) == ({2, 4, 6}, set(HIGH))

    asyncio.run(main())


@pytest.mark.parametrize("few", [1, 2])
def test_a_cohort_that_leaves_a_site_alone_in_its_tier_is_not_opened(tmp_path: Path, few: int) -> None:
    """The server picks the cohort; sites are asked for nothing, and the journal knows of no attempt."""

    async def main() -> None:
        trial = Trial(tmp_path)
        with refused("INVALID_ARGUMENT"):
            await trial.open((*LOW, *HIGH[:few]))
        assert not trial.service.runs["run"].attempt
        await trial.open((*LOW, *HIGH[:3]))

    asyncio.run(main())


def test_a_tier_that_became_too_small_is_not_released(tmp_path: Path) -> None:
    """Quorum and floor hold for the round as a whole, but one of its sites would be alone in its tier."""

    async def main() -> None:
        trial = Trial(tmp_path)
        header = await trial.open((*LOW, *HIGH[:3]))
        await trial.send(header, (*LOW, HIGH[0]))
        for index in HIGH[1:3]:
            request = pb.AbstainRequest(run="run", round=1, attempt=header.attempt)
            await trial.service.abstain(request, trial.site(index))
        release, rows = await trial.collect(header)
        assert (release.phase, rows) == ("failed", [])
        wanted = "5 of 7 updates came, of a tier from fewer than 3 organisations; use route.buckets"
        assert release.reason == wanted

    asyncio.run(main())


def test_a_tier_counts_organisations(tmp_path: Path) -> None:
    """Three sites of a tier, two of them of one clinic: the third would be hidden from nobody who knows the clinic."""

    async def main() -> None:
        trial = Trial(tmp_path, clinic=HIGH[:2])
        with refused("INVALID_ARGUMENT"):
            await trial.open((*LOW, *HIGH[:3]), organisations=6)
        await trial.open((*LOW[:3], *HIGH), organisations=6)

    asyncio.run(main())


@pytest.mark.parametrize("buckets", ["published", "levelled"])
@pytest.mark.parametrize("level", ["model", "parameter"])
def test_a_bucket_counts_organisations(tmp_path: Path, buckets: str, level: str) -> None:
    """Three updates of two organisations are too few for a bucket, which therefore merges with its neighbour."""

    async def main() -> None:
        trial = Trial(tmp_path, clinic=HIGH[:2], buckets=buckets, level=level)
        header = await trial.open((*LOW, *HIGH[:3]), organisations=6)
        await trial.send(header, (*LOW, *HIGH[:3]))
        assert list((await trial.collect(header))[0].tiers) == ["1"] * 7

    asyncio.run(main())


def test_a_site_s_own_floor_holds_for_its_bucket(tmp_path: Path) -> None:
    """Two buckets of three and four would do for the config; a site wants to be one of five."""

    async def main() -> None:
        trial = Trial(tmp_path, buckets="published")
        header = await trial.open((*LOW, *HIGH[:3]))
        await trial.send(header, (*LOW, *HIGH[:2]))
        update = np.zeros(LENGTH, np.float32)
        await trial.service.submit(submission(header, update, tier="4", floor=5), trial.site(HIGH[2]))
        assert list((await trial.collect(header))[0].tiers) == ["1"] * 7

    asyncio.run(main())


def test_a_floor_that_a_tier_never_meets_leaves_out_its_sender_alone(tmp_path: Path) -> None:
    """Otherwise every attempt would fail, and cost all other sites a charge."""

    async def main() -> None:
        trial = Trial(tmp_path)
        header = await trial.open((*LOW[:3], *HIGH))
        await trial.send(header, (*LOW[:3], *HIGH[1:]))
        with refused("INVALID_ARGUMENT"):
            update = np.zeros(LENGTH, np.float32)
            await trial.service.submit(submission(header, update, tier="4", floor=4), trial.site(HIGH[0]))
        request = pb.AbstainRequest(run="run", round=1, attempt=header.attempt)
        await trial.service.abstain(request, trial.site(HIGH[0]))
        release, rows = await trial.collect(header)
        assert (release.phase, sorted(rows)) == ("released", sorted((*LOW[:3], *HIGH[1:])))

    asyncio.run(main())
