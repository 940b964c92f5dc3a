"""Sites that aggregate, against a mailbox that lies to one of them: it can lose a round, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fl_privacy.coding import Payload
from fl_privacy.config.evaluate import form_of
from fl_privacy.errors import ProtocolError
from fl_privacy.round import aggregating
from fl_privacy.round.letters import Letters
from fl_privacy.round.resident import CHECK, Resident
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import chunks
from helpers import Deployment
from residents import D, House, averaged, federation, initial
from test_hostile_residents import copied, played
from test_placement import _deployed, house

SITES = tuple(f"site-{index}" for index in range(5))


@pytest.fixture(scope="module")
def mailbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Five sites, of which three aggregate."""
    yield from _deployed(tmp_path_factory.mktemp("mailbox"), federation(sites=5, aggregators=3, deadline=8.0))


Lie = Callable[["Lied", pb.RoundHeader, list[Payload]], tuple[pb.RoundHeader, list[Payload]]]


class Lied(Resident):
    """Receives its column of round 2 as a mailbox changed it, once; `seen` is its column of round 1."""

    lie: ClassVar[Lie]
    told: ClassVar[list[str]]
    seen: ClassVar[list[Payload]]

    def _ask(self, run: str, last: pb.RoundHeader) -> tuple[pb.RoundHeader, Payload | None]:
        header, data = super()._ask(run, last)
        if header.duty != CHECK or data is None:
            return header, data
        pieces = np.split(data, 5)
        if header.round == 1:
            type(self).seen = [piece.copy() for piece in pieces]
        elif not self.told or self.told == [header.attempt]:
            self.told[:] = [header.attempt]
            header, pieces = type(self).lie(self, copied(header), pieces)
            data = np.concatenate(pieces)
        return header, data


def swapped(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return header, [pieces[1], pieces[0], *pieces[2:]]


def doubled(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return header, [*pieces[:4], pieces[3]]


def replayed(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return header, [*pieces[:4], site.seen[4]]


def dropped(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    """Of site-4 it says that it sent nothing."""
    return copied(header, members=bytes([header.members[0] & 0b1111])), pieces[:4]


def longer(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return header, [*pieces, pieces[0]]


def shorter(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return header, [*pieces[:4], pieces[4][:-1]]


def lowered(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return copied(header, quorum=1), pieces


def counting(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return copied(header, counts=header.counts + 1), pieces


def elsewhere(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    return copied(header, run="another"), pieces


def of_old(site: Lied, header: pb.RoundHeader, pieces: list[Payload]) -> tuple[pb.RoundHeader, list[Payload]]:
    """The shards of the first model, of which nobody has a part any more."""
    made = copied(header)
    del made.shards[:]
    made.shards.extend([bytes(32)] * 3)
    return made, pieces


def lied_to(mailbox: Deployment, folder: Path, run: str, lie: Lie) -> House:
    Lied.lie, Lied.told, Lied.seen = staticmethod(lie), [], []  # type: ignore[assignment]
    here = house(mailbox, folder, run, site_1=Lied)
    here.enter()
    assert here.play(1).count == 5
    return here


@pytest.mark.parametrize(
    ("lie", "left"), [(swapped, SITES[2:]), (doubled, SITES[:4]), (replayed, SITES[:4]), (dropped, SITES[:4])]
)
def test_what_a_mailbox_moves_repeats_or_drops_is_left_out_by_all_alike(
    mailbox: Deployment, tmp_path: Path, lie: Lie, left: tuple[str, ...]
) -> None:
    here = lied_to(mailbox, tmp_path, f"moves-{lie.__name__}", lie)
    assert here.play(2).count == len(left)
    assert here.play(3).count == 5
    here.leave()
    one = averaged(initial(), SITES, 1, here.federation)
    assert np.array_equal(here.model(3), averaged(one, left, 2, here.federation))


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (longer, "length:"),
        (shorter, "length:"),
        (lowered, "attempt:"),
        (counting, "attempt:"),
        (elsewhere, "run: the mailbox asked for another run"),
        (of_old, "shards: another model"),
    ],
)
def test_a_changed_duty_fails_the_attempt_and_the_next_one_makes_the_same_model(
    mailbox: Deployment, tmp_path: Path, lie: Lie, reason: str
) -> None:
    here = lied_to(mailbox, tmp_path, f"changes-{lie.__name__}", lie)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/aggregator/shards/*/*")}
    assert played(here, (2, 1)) == [None]
    assert {path: path.read_bytes() for path in before} == before
    assert played(here, (2, 2), (3, 1)) == [5, 5]
    here.leave()
    failed = here.guests["site-1"].log.events("duty-failed")
    assert reason in failed[0]["reason"], failed
    one = averaged(initial(), SITES, 1, here.federation)
    assert np.array_equal(here.model(3), averaged(one, SITES, 2, here.federation))


class Keeps(Resident):
    """A mailbox keeps its sealed shard of every attempt."""

    shards: ClassVar[list[tuple[pb.ShareHeader, Payload]]] = []

    def _share(self, letters: Letters, run: str, made: aggregating.Applied) -> None:
        self.shards.append(aggregating.sealed_for_all(made, "test", run, letters, self._cards(letters)))
        super()._share(letters, run, made)


class Mixed(Resident):
    """It gives this site the shard of the first attempt at round 1 among those of the second."""

    def _ask(self, run: str, last: pb.RoundHeader) -> tuple[pb.RoundHeader, Payload | None]:
        header, data = super()._ask(run, last)
        if header.round == 2 and not header.duty and data is not None:
            old, shard = Keeps.shards[0]
            sealed = next(one.sealed for one in old.envelopes if one.site == "site-3")
            header.sealed[0].CopyFrom(pb.SealedShard(said=old.said, envelope=sealed, length=shard.size))
            data = np.concatenate([shard, data[shard.size :]])
        return header, data


def test_shards_of_two_attempts_at_a_round_make_no_model(mailbox: Deployment, tmp_path: Path) -> None:
    Keeps.shards = []
    here = house(mailbox, tmp_path, "mixed", site_0=Keeps, site_3=Mixed)
    here.enter()
    assert played(here, (1, 1), (1, 2), (2, 1)) == [5, 5, 4]
    here.leave()
    assert set(here.guests["site-3"].problems) == {"shards: not all of one attempt, or of different sites"}


class Told(Resident):
    """A mailbox tells it to apply another set of sites than the others."""

    refused: ClassVar[list[str]] = []

    def _apply(self, letters: Letters, header: pb.RoundHeader, data: Payload) -> None:
        super()._apply(letters, copied(header, members=b"\x0f") if header.round == 2 else header, data)


def test_aggregating_sites_with_different_sets_complete_no_round(mailbox: Deployment, tmp_path: Path) -> None:
    """The one that was lied to has released once for this model, and never again for others."""
    here = house(mailbox, tmp_path, "told", site_1=Told)
    here.enter()
    assert played(here, (1, 1), (2, 1)) == [5, None]
    here.guests["site-1"].kind = Resident
    assert played(here, (2, 2)) == [None]
    here.leave()
    assert not mailbox.events("stopped")  # nobody is called a cheat for it


class Withholds(Resident):
    """Seals no key to its shard for one site."""

    def _share(self, letters: Letters, run: str, made: aggregating.Applied) -> None:
        cards, self._cards = self._cards, lambda of: {k: v for k, v in cards(of).items() if k != "site-4"}  # type: ignore[method-assign]
        try:
            super()._share(letters, run, made)
        finally:
            self._cards = cards  # type: ignore[method-assign]


def test_who_withholds_the_key_to_a_shard_is_in_the_log_and_the_others_go_on(
    mailbox: Deployment, tmp_path: Path
) -> None:
    here = house(mailbox, tmp_path, "withheld", site_1=Withholds)
    here.enter()
    assert played(here, (1, 1), (2, 1)) == [5, 4]
    here.leave()
    told = [event for event in mailbox.events("no-key") if event["run"] == "withheld"]
    assert {(event["by"], *event["sites"]) for event in told} == {("site-1", "site-4")}


def test_a_site_reads_no_more_than_a_round_can_have(mailbox: Deployment, tmp_path: Path) -> None:
    """A hostile mailbox would otherwise fill a site's memory."""
    end = house(mailbox, tmp_path, "large").guests["site-0"].end()
    read = list[int]()

    class Stub:
        def fetch(self, request: pb.FetchRequest, timeout: float) -> Iterator[Any]:
            header = pb.RoundHeader(run="large", round=1, length=end._most + 1, digest=bytes(32))
            for part in chunks(pb.Chunk(round=header), [np.zeros(end._most + 1, np.uint8)]):
                read.append(1)
                yield part

    end._stubs = [Stub()]  # type: ignore[misc, list-item]
    with pytest.raises(ProtocolError, match=r"length: .* is out of range"):
        end._ask("large", pb.RoundHeader())
    assert len(read) == 1
    # What honest mailboxes send fits: the model, and the shards of all sites with all counts.
    assert 4 * D < end._most < 5 * (4 * D + 8 * form_of(mailbox.federation).length + 300)
