"""What sites and mixes sign, and who broke the rules where a sum does not agree with what its sites sent.

Before a site sends, it signs a Merkle root over a nonce and its part for every mix. A mix countersigns: it signs its
sum together with the roots that are in it. Then the nonces are opened, and with them the challenge (`check`); every
site signs its answers. If a sum fails, its mix signs a recount, the answer for every part as it received it. A recount
that does not add up to the sum convicts the mix. One that does differs from a site's answer, and the mix opens that one
part: whose answer differs from the answer for it, lied. A part that is not under the site's signed root is no opening.
So nobody is convicted but by statements that they signed themselves, and what is opened is one part of a dispute in
which one of the two lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, Self, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_privacy.crypto import merkle, sealing
from fl_privacy.errors import FederationError, ProtocolError, require
from fl_privacy.mix import check
from fl_privacy.mix.check import Answers
from fl_privacy.mix.shares import Residues

Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
Key = Callable[[str], ec.EllipticCurvePublicKey]  # of a site or a mix by its name
Read = Callable[[str, bytes], Residues]  # a part that a mix got, as the share that it stands for
NONCE = 32


class Paper(BaseModel):
    """A statement as it travels; nobody vouches for what is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            raise ProtocolError("INVALID_ARGUMENT", f"{cls.__name__.lower()}: not one of this form") from None


class Commitment(Paper):
    """What a site signs before it sends: the root over its nonce and its parts."""

    attempt: Hex
    site: Name
    root: Hex
    signature: Hex = ""

    def text(self) -> bytes:
        return sealing.fields("fl-privacy mixes commitment 1", self.attempt, self.site, self.root)


class Sum(Paper):
    """What a mix signs about its sum: whose parts are in it, by their signed roots, and its digest."""

    attempt: Hex
    mix: Name
    members: tuple[Commitment, ...]
    digest: Hex
    signature: Hex = ""
    keys: dict[Name, Hex] = {}  # of the mix and its members, for whoever has only their fingerprints

    def text(self) -> bytes:
        listed = [part for one in self.members for part in (one.site, one.root, one.signature)]
        return sealing.fields("fl-privacy mixes sum 1", self.attempt, self.mix, self.digest, *listed)

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(one.site for one in self.members)


class Opened(Paper):
    """A site's nonce, that it is the one under its root, and for which sums the site opens it: its masks hide answers
    to one challenge, so no other may be made of it."""

    attempt: Hex
    site: Name
    sums: Hex
    nonce: Hex
    path: tuple[Hex, ...]
    signature: Hex = ""

    def text(self) -> bytes:
        return sealing.fields("fl-privacy mixes nonce 1", self.attempt, self.site, self.sums, self.nonce)


class Answered(Paper):
    """A site's answers for its part at every mix, or a mix's answers for the part of every site."""

    attempt: Hex
    seed: Hex
    by: Name
    answers: dict[Name, Hex]
    signature: Hex = ""

    def text(self) -> bytes:
        listed = [part for name in sorted(self.answers) for part in (name, self.answers[name])]
        return sealing.fields("fl-privacy mixes answers 1", self.attempt, self.seed, self.by, *listed)


class Opening(Paper):
    """One part as a mix received it, and that it is under the site's root."""

    site: Name
    mix: Name
    part: Hex
    path: tuple[Hex, ...]


class Verdict(NamedTuple):
    """Who broke a rule; not proven where somebody only did not answer."""

    party: str
    charge: str
    proven: bool = True

    def __str__(self) -> str:
        return f"{self.party}: {self.charge}" + ("" if self.proven else " (not proven)")


class Case(Paper):
    """All that was said in an attempt whose sums were checked."""

    attempt: Hex
    mixes: tuple[Name, ...]
    moduli: tuple[int, ...]
    challenges: int
    sums: tuple[Sum, ...]
    opened: tuple[Opened, ...]
    answers: tuple[Answered, ...]
    recounts: tuple[Answered, ...] = ()
    openings: tuple[Opening, ...] = ()


P = TypeVar("P", "Commitment", "Sum", "Opened", "Answered")


def signed(paper: P, key: ec.EllipticCurvePrivateKey) -> P:
    return paper.model_copy(update={"signature": sealing.signed(key, paper.text()).hex()})


def holds(paper: Commitment | Sum | Opened | Answered, key: ec.EllipticCurvePublicKey) -> bool:
    """Whether this key signed it."""
    try:
        sealing.verify(key, bytes.fromhex(paper.signature), paper.text())
    except ProtocolError:
        return False
    return True


# Commitments


def leaves(attempt: str, site: str, nonce: bytes, parts: Mapping[str, bytes]) -> list[bytes]:
    """Of a site's tree: its nonce, then the digest of its part for every mix, in this order."""
    return [
        _nonce_leaf(attempt, site, nonce),
        *(part_leaf(attempt, site, mix, digest) for mix, digest in parts.items()),
    ]


def part_leaf(attempt: str, site: str, mix: str, digest: bytes) -> bytes:
    return merkle.leaf(sealing.fields("part", attempt, site, mix, digest))


def _nonce_leaf(attempt: str, site: str, nonce: bytes) -> bytes:
    return merkle.leaf(sealing.fields("nonce", attempt, site, nonce))


def under(root: str, leaf: bytes, index: int, mixes: int, path: Sequence[bytes]) -> bool:
    """Whether a leaf is at this place under a root: 0 is the nonce, and the parts of the mixes follow."""
    sized = all(len(step) == merkle.SIZE for step in path)
    return sized and merkle.climb(leaf, index, 1 + mixes, path) == bytes.fromhex(root)


def is_nonce(one: Opened, commitment: Commitment, sums: str, mixes: int, key: Key) -> bool:
    """Whether it is the one that the site committed to, and signed for the sums of this digest."""
    own = (one.attempt, one.site, one.sums) == (commitment.attempt, commitment.site, sums)
    nonce, path = bytes.fromhex(one.nonce), [bytes.fromhex(step) for step in one.path]
    leaf = _nonce_leaf(commitment.attempt, commitment.site, nonce)
    fits = len(nonce) == NONCE and under(commitment.root, leaf, 0, mixes, path)
    return own and fits and holds(one, key(one.site))


def together(sums: Sequence[Sum]) -> str:
    """The digest of all sums of an attempt."""
    return hashlib.sha256(b"".join(hashlib.sha256(one.text()).digest() for one in sums)).hexdigest()


# What all sums say together


def compared(sums: Sequence[Sum], mixes: Sequence[str], attempt: str, key: Key) -> list[Verdict]:
    """Who broke a rule before anything was opened; refuses sums that their mixes did not sign, or of other sites."""
    for mix, one in zip(mixes, sums, strict=True):
        own = (one.mix, one.attempt) == (mix, attempt) and holds(one, key(mix))
        require(own, f"sum: not one that {mix} signed in this attempt", "PERMISSION_DENIED")
    found = dict[str, Verdict]()
    for one in sums:
        if list(one.sites) != sorted(set(one.sites)):  # an honest mix signs each once, in order
            found[one.mix] = Verdict(one.mix, "signed a sum with a site twice, or out of order")
        for member in one.members:
            if member.attempt != attempt or not holds(member, key(member.site)):
                found[one.mix] = Verdict(one.mix, f"signed a sum with a root that {member.site} did not sign")
    good = [one for one in sums if one.mix not in found]
    for site in sorted({site for one in good for site in one.sites}):
        if len({member.root for one in good for member in one.members if member.site == site}) > 1:
            found[site] = Verdict(site, "signed two different roots in one attempt")
    if not found:
        require(len({one.sites for one in sums}) == 1, "sums: of different sites", "PERMISSION_DENIED")
    return list(found.values())


def challenge(sums: Sequence[Sum], opened: Sequence[Opened], attempt: str, key: Key) -> bytes:
    """The seed of the challenge. Refuses nonces other than those that the members had committed to, all of them, and
    each signed for these sums: as a site signs once per attempt, there is one challenge that its answers are for."""
    members, given, which = sums[0].members, {one.site: one for one in opened}, together(sums)
    require(len(given) == len(opened) == len(members), "nonces: not one of every member")
    for member in members:
        good = member.site in given and is_nonce(given[member.site], member, which, len(sums), key)
        require(
            good, f"nonce: not the one that {member.site} committed to, or opened for other sums", "PERMISSION_DENIED"
        )
    nonces = [bytes.fromhex(given[member.site].nonce) for member in members]
    return check.seed_of(attempt, [hashlib.sha256(one.text()).digest() for one in sums], nonces)


def packed(answers: Answers) -> str:
    return answers.astype("<u8").tobytes().hex()


def unpacked(text: str, moduli: Sequence[int], challenges: int) -> Answers:
    data = bytes.fromhex(text)
    require(len(data) == 8 * len(moduli) * challenges, "answers: not one for every challenge")
    found = np.frombuffer(data, "<u8").astype(np.uint64).reshape(len(moduli), challenges)
    below = all(int(row.max()) < m for row, m in zip(found, moduli, strict=True))
    require(below, "answers: not below their modulus")
    return found


def complete(one: Answered, by: str, others: Sequence[str], seed: bytes, case: Case, key: Key) -> None:
    """Refuse answers that are not this party's own, to this challenge, and for all others."""
    own = (one.by, one.attempt, one.seed) == (by, case.attempt, seed.hex()) and holds(one, key(by))
    require(
        own and set(one.answers) == set(others), f"answers: not those of {by} to this challenge", "PERMISSION_DENIED"
    )
    for text in one.answers.values():
        unpacked(text, case.moduli, case.challenges)


def failing(case: Case, outputs: Mapping[str, Residues], key: Key) -> list[str]:
    """The mixes whose sums do not agree with the answers of their sites; refuses a case that is not complete."""
    seed, sites = _sound(case, outputs, key)
    return [mix for mix in case.mixes if not check.passes(*_claims(case, outputs, seed, mix, sites), case.moduli)]


def judge(case: Case, outputs: Mapping[str, Residues], key: Key, read: Read) -> list[Verdict]:
    """Who broke a rule. `outputs` are the sums by mix; anybody who has the keys finds the same."""
    early = compared(case.sums, case.mixes, case.attempt, key)
    if early:
        return early
    seed, sites = _sound(case, outputs, key)
    found = list[Verdict]()
    for mix in case.mixes:
        claimed, answers = _claims(case, outputs, seed, mix, sites)
        if not check.passes(claimed, answers, case.moduli):
            found += _convicted(case, mix, seed, claimed, dict(zip(sites, answers, strict=True)), key, read)
    return _each_once(found)


def _each_once(found: Sequence[Verdict]) -> list[Verdict]:
    """One verdict per party, a proven one if there is one."""
    kept = dict[str, Verdict]()
    for one in found:
        if one.party not in kept or (one.proven and not kept[one.party].proven):
            kept[one.party] = one
    return list(kept.values())


def _sound(case: Case, outputs: Mapping[str, Residues], key: Key) -> tuple[bytes, tuple[str, ...]]:
    """The seed and the sites of a case in which all is there that convicts nobody by itself."""
    early = compared(case.sums, case.mixes, case.attempt, key)
    require(not early, "; ".join(map(str, early)), "PERMISSION_DENIED")
    seed, sites = challenge(case.sums, case.opened, case.attempt, key), case.sums[0].sites
    given = {one.by: one for one in case.answers}
    require(set(given) == set(sites), "answers: not those of every member")
    for site in sites:
        complete(given[site], site, case.mixes, seed, case, key)
    for one in case.sums:
        own = digest_of(outputs[one.mix]) == one.digest
        require(own, f"sum: not the one that {one.mix} signed", "DATA_LOSS")
    return seed, sites


def _claims(
    case: Case, outputs: Mapping[str, Residues], seed: bytes, mix: str, sites: Sequence[str]
) -> tuple[Answers, list[Answers]]:
    """What a mix's sum answers, and what its sites do."""
    given = {one.by: one.answers[mix] for one in case.answers}
    answers = [unpacked(given[site], case.moduli, case.challenges) for site in sites]
    return check.answers(outputs[mix], case.moduli, seed, case.challenges), answers


def _convicted(
    case: Case, mix: str, seed: bytes, claimed: Answers, answers: Mapping[str, Answers], key: Key, read: Read
) -> Iterator[Verdict]:
    recount = next((one for one in case.recounts if one.by == mix), None)
    try:
        if recount is None:
            raise FederationError("none")
        complete(recount, mix, list(answers), seed, case, key)
    except FederationError:
        yield Verdict(mix, "its sum fails the check, and it gave no recount", proven=False)
        return
    own = {site: unpacked(recount.answers[site], case.moduli, case.challenges) for site in answers}
    if not check.passes(claimed, own.values(), case.moduli):
        yield Verdict(mix, "its sum is not that of the parts that it counted")
        return
    for site, answer in answers.items():
        if not np.array_equal(own[site], answer):
            yield from _disputed(case, mix, site, seed, own[site], answer, read)


def _disputed(
    case: Case, mix: str, site: str, seed: bytes, counted: Answers, answer: Answers, read: Read
) -> Iterator[Verdict]:
    """A site and a mix say different things of one part."""
    opening = next((one for one in case.openings if (one.site, one.mix) == (site, mix)), None)
    if opening is None or not is_opening(opening, case):
        yield Verdict(mix, f"did not open the part that {site} committed to", proven=False)
        return
    try:
        truth = check.answers(read(mix, bytes.fromhex(opening.part)), case.moduli, seed, case.challenges)
    except ProtocolError:  # a mix refuses such a part when it arrives
        yield Verdict(mix, f"counted a part of {site} that is no share")
        return
    if not np.array_equal(truth, counted):
        yield Verdict(mix, f"counted something else than the part of {site}")
    if not np.array_equal(truth, answer):
        yield Verdict(site, f"answered for something else than its part at {mix}")


def is_opening(opening: Opening, case: Case) -> bool:
    """Whether a part is the one under the root that its site signed."""
    member = next((one for one in case.sums[0].members if one.site == opening.site), None)
    if member is None or opening.mix not in case.mixes:
        return False
    digest, path = hashlib.sha256(bytes.fromhex(opening.part)).digest(), [bytes.fromhex(step) for step in opening.path]
    leaf = part_leaf(case.attempt, opening.site, opening.mix, digest)
    return under(member.root, leaf, 1 + case.mixes.index(opening.mix), len(case.mixes), path)


def disputes(case: Case, mix: str) -> list[str]:
    """The sites whose parts a mix has to open: its recount differs from their answers."""
    recount = next((one for one in case.recounts if one.by == mix), None)
    given = {one.by: one.answers.get(mix) for one in case.answers}
    return [] if recount is None else [site for site, said in given.items() if recount.answers.get(site) != said]


def digest_of(output: Residues) -> str:
    """Of a sum as 64-bit numbers."""
    return hashlib.sha256(np.ascontiguousarray(output, "<u8").tobytes()).hexdigest()
