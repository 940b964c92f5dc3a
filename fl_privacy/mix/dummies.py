"""Dummies among a site's onions: no mix can tell them from others, and a mix that loses one is named.

Once every mix has signed which batch it took and which one it gave, a site reveals the seed of its dummies. From it
follows every layer of them, so anybody can see in which batch one is missing: the mix before it took it and did not
give it. A site cannot frame a mix: the layers of a false seed are in no batch, and the first mix shows the onions that
the site signed for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.mix import batch, onion
from fl_privacy.mix.batch import Batch, Revealed
from fl_privacy.mix.evidence import Hex, Name, Paper, Verdict
from fl_privacy.mix.onion import Hop, Place

MESSAGE = b"\xff" * 6 + bytes(2)  # of no residue: the server knows them once they have passed all mixes
Fingerprint = Callable[[str, str], str | None]  # of a party's key, by role and name


class Case(Paper):
    """All that was said in an attempt; the batches and the onions of a site in dispute are recorded beside it."""

    attempt: Hex
    federation: str
    run: str
    round: int
    count: int  # dummies of a site
    mixes: tuple[Name, ...]
    said: tuple[Batch, ...]
    revealed: tuple[Revealed, ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.federation, self.run, self.round, self.attempt)

    def hops(self, one: Revealed) -> list[Hop]:
        """For which a site says that its onions are made."""
        require(len(one.layers) == len(self.mixes) + 1, f"statement: {one.by} has not one key per layer")
        named = zip((*self.mixes, onion.SERVER), one.layers, strict=True)
        return [Hop(name, onion.public(bytes.fromhex(key), name)) for name, key in named]

    def agrees(self, one: Revealed) -> bool:
        """Whether a site made its dummies for this very case."""
        return (one.federation, one.run, one.round, one.count) == (self.federation, self.run, self.round, self.count)

    def signed_keys(self, one: Revealed) -> bool:
        """Whether these are the keys that it signed for when it sent."""
        try:
            found = onion.keys_digest(self.hops(one)).hex()
        except ProtocolError:
            return False  # no keys at all
        return any((member.by, member.keys) == (one.by, found) for member in self.said[0].members)


class Missing(NamedTuple):
    """A dummy of a site that the mix at this place in the chain did not give."""

    site: Name
    place: int
    onion: bytes  # as the mix took it, or should have


def made(seed: bytes, count: int, hops: Sequence[Hop], place: Place) -> Iterator[list[bytes]]:
    """Every layer of each dummy, the outermost first."""
    fresh = onion.repeatable(keys.derive(seed, "", 0, "", "dummies"))
    return (onion.layers(MESSAGE, hops, place, fresh) for _ in range(count))


def sound(said: Sequence[Batch], mixes: Sequence[str], attempt: str, fingerprint: Fingerprint) -> None:
    """Refuse statements that are no chain: each signed by its mix, each about what the one before it gave.

    It may end early: where a mix refused what the one before it gave, and the attempt is lost.
    """
    require(0 < len(said) <= len(mixes), f"statements: {len(said)} of {len(mixes)} mixes")
    for name, one in zip(mixes, said, strict=False):
        one.check(attempt, name, fingerprint("mix", name))
    members = said[0].members
    for member in members:
        member.check(attempt, member.by, fingerprint("site", member.by))
    listed = [member.by for member in members]
    whole = said[0].taken == batch.first(bytes.fromhex(member.digest) for member in members)
    whole = whole and listed == sorted(set(listed)) and len({member.keys for member in members}) == 1
    require(whole, "statements: not about what the sites signed", batch.DENIED)
    for before, after in pairwise(said):
        carried = (before.given, before.onions) == (after.taken, after.onions)
        require(carried, f"statements: {after.by} took other onions than {before.by} gave", batch.DENIED)


def missing(case: Case, batches: Sequence[set[bytes]]) -> list[Missing]:
    """Where every dummy that did not arrive was lost; `batches` are what the mixes gave, in order."""
    found = list[Missing]()
    for one in case.revealed:
        if not case.signed_keys(one):
            continue  # `judge` says so
        for layers in made(bytes.fromhex(one.seed), case.count, case.hops(one), case.place):
            lost = (place for place, given in enumerate(batches) if layers[place + 1] not in given)
            if (place := next(lost, None)) is not None:
                found.append(Missing(one.by, place, layers[place]))
    return found


def judge(case: Case, batches: Sequence[set[bytes]], sent: Mapping[str, set[bytes]]) -> list[Verdict]:
    """Who lost or faked dummies; `sent` are the onions of the sites in dispute, as the first mix showed them."""
    found = [Verdict(one.by, "revealed other keys than it signed for") for one in faked(case)]
    found += [Verdict(mix, "signed another key than it gave to sites") for mix in swapped(case)]
    for site, place, lost in missing(case, batches):
        mix = case.said[place].by
        verdict = Verdict(mix, "lost onions that it took")
        if place == 0 and site not in sent:
            verdict = Verdict(mix, f"does not show the onions of {site}, of which some are missing", proven=False)
        elif place == 0 and lost not in sent[site]:
            verdict = Verdict(site, "revealed dummies that it did not send")
        found.append(verdict)
    return list(dict.fromkeys(found))


def faked(case: Case) -> list[Revealed]:
    return [one for one in case.revealed if not case.signed_keys(one)]


def swapped(case: Case) -> list[str]:
    """The mixes that signed for another key than all sites got from them."""
    true = next((one.layers for one in case.revealed if case.signed_keys(one)), None)
    return [] if true is None else [one.by for one, key in zip(case.said, true, strict=False) if one.layer != key]
