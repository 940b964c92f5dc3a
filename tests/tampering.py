"""A checked round in one process: honest sites and mixes, and every way in which one of them can cheat."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.crypto import keys, merkle
from fl_privacy.mix import check, evidence, shares
from fl_privacy.mix.evidence import Answered, Case, Commitment, Opened, Opening, Sum
from fl_privacy.mix.shares import Residues

MODULI, SIZE, ATTEMPT = (4, 5), 12, "ab" * 32
CHALLENGES = 32  # a trial that misses a tampering is less likely than 2^-30
MIXES, SITES = ("mix-0", "mix-1", "mix-2"), ("a", "b", "c", "d")
POPULATIONS = 8  # of sites, each with its own updates
DATA = 1  # which mix gets data, and not a seed
KINDS = ("altered", "dropped", "duplicated", "replaced", "replayed")
KEYS = {name: ec.generate_private_key(ec.SECP256R1()) for name in (*MIXES, *SITES)}


PUBLIC = {name: one.public_key() for name, one in KEYS.items()}
NAMES = {id(one): name for name, one in PUBLIC.items()}
CHECKED: dict[tuple[str, bytes, str], bool] = {}
check_signature = evidence.holds


def holds(paper: Any, public: ec.EllipticCurvePublicKey) -> bool:
    """As `evidence.holds`, which checks every signature; thousands of trials check each of theirs once."""
    fact = paper.signature, paper.text(), NAMES.get(id(public), "")
    if not fact[2]:
        return check_signature(paper, public)
    if fact not in CHECKED:
        CHECKED[fact] = check_signature(paper, public)
    return CHECKED[fact]


evidence.holds = holds


def key(name: str) -> ec.EllipticCurvePublicKey:
    return PUBLIC[name]


@dataclass
class Party:
    """A site's own: its values, parts and nonce."""

    name: str
    values: Residues
    secret: bytes
    challenges: int
    attempt: str = ATTEMPT
    parts: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        masked = check.masked(self.values, MODULI, self.secret[::-1], self.challenges)
        seeds, data = shares.split(masked, MODULI, len(MIXES), self.secret)
        waiting = iter(seeds)
        self.parts = {mix: data.tobytes() if at == DATA else next(waiting) for at, mix in enumerate(MIXES)}
        self.nonce = keys.derive(self.secret, "", 0, "", "nonce")
        digests = {mix: hashlib.sha256(part).digest() for mix, part in self.parts.items()}
        self.leaves = evidence.leaves(self.attempt, self.name, self.nonce, digests)
        made = Commitment(attempt=self.attempt, site=self.name, root=merkle.root(self.leaves).hex())
        self.commitment = evidence.signed(made, KEYS[self.name])

    def opened(self, sums: Sequence[Sum]) -> Opened:
        path, which = tuple(step.hex() for step in merkle.path(self.leaves, 0)), evidence.together(sums)
        made = Opened(attempt=self.attempt, site=self.name, sums=which, nonce=self.nonce.hex(), path=path)
        return evidence.signed(made, KEYS[self.name])

    def opening(self, mix: str, part: bytes | None = None) -> Opening:
        path = tuple(step.hex() for step in merkle.path(self.leaves, 1 + MIXES.index(mix)))
        return Opening(site=self.name, mix=mix, part=(self.parts[mix] if part is None else part).hex(), path=path)


def read(challenges: int, mix: str, part: bytes) -> Residues:
    """A part as the share that it stands for."""
    if mix == MIXES[DATA]:
        return np.frombuffer(part, shares.dtype_of(MODULI)).reshape(len(MODULI), SIZE + challenges)
    return shares.expanded([part], MODULI, SIZE + challenges)


def values(rng: np.random.Generator) -> Residues:
    return np.stack([rng.integers(0, m, SIZE) for m in MODULI]).astype(shares.dtype_of(MODULI))


def tampered(kind: str, held: dict[str, Residues], old: Residues, rng: np.random.Generator) -> list[Residues]:
    """What a cheating mix adds up in place of the shares that it received."""
    victim, other = rng.choice(SITES, 2, replace=False)
    if kind == "altered":
        changed = held[victim].copy()
        row, column = rng.integers(len(MODULI)), rng.integers(SIZE)
        changed[row, column] = (int(changed[row, column]) + 1) % MODULI[row]
        return [*(share for name, share in held.items() if name != victim), changed]
    rest = [share for name, share in held.items() if name != victim]
    added = {"dropped": [], "duplicated": [held[victim]] * 2, "replaced": [held[other]], "replayed": [old]}
    return [*rest, *added[kind]]


@cache
def honest(population: int, challenges: int) -> tuple[dict[str, Party], dict[str, dict[str, Residues]], Party]:
    """Sites with their parts, by mix what it received, and a part of an earlier attempt."""
    rng = np.random.default_rng([population, challenges])
    parties = {name: Party(name, values(rng), rng.bytes(32), challenges) for name in SITES}
    held = {mix: {name: read(challenges, mix, one.parts[mix]) for name, one in parties.items()} for mix in MIXES}
    return parties, held, Party("a", values(rng), rng.bytes(32), challenges)


@dataclass
class Play:
    """An attempt up to the sums; a test changes what a cheater says, and asks for the verdicts."""

    rng: np.random.Generator
    challenges: int = CHALLENGES
    cheat: Mapping[str, str] = field(default_factory=dict)  # kind of tampering by mix

    def __post_init__(self) -> None:
        self._said = dict[int, str]()  # answers by share
        self._fair = dict[str, Answered]()
        self.parties, self.held, self.before = honest(int(self.rng.integers(POPULATIONS)), self.challenges)
        self.outputs = {mix: self._output(mix) for mix in MIXES}
        self.sums = tuple(self.sum(mix) for mix in MIXES)
        self.opened = tuple(one.opened(self.sums) for one in self.parties.values())
        self.seed = evidence.challenge(self.sums, self.opened, ATTEMPT, key)

    def _output(self, mix: str) -> Residues:
        old = read(self.challenges, mix, self.before.parts[mix])
        kind = self.cheat.get(mix)
        taken = list(self.held[mix].values()) if kind is None else tampered(kind, self.held[mix], old, self.rng)
        return shares.added(taken, MODULI)

    def sum(self, mix: str) -> Sum:
        members = tuple(one.commitment for one in self.parties.values())
        made = Sum(attempt=ATTEMPT, mix=mix, members=members, digest=evidence.digest_of(self.outputs[mix]))
        return evidence.signed(made, KEYS[mix])

    def answered(self, by: str, shares_of: Mapping[str, Residues]) -> Answered:
        said = {name: self._packed(share) for name, share in shares_of.items()}
        return evidence.signed(Answered(attempt=ATTEMPT, seed=self.seed.hex(), by=by, answers=said), KEYS[by])

    def _packed(self, share: Residues) -> str:
        if id(share) not in self._said:
            self._said[id(share)] = evidence.packed(check.answers(share, MODULI, self.seed, self.challenges))
        return self._said[id(share)]

    def case(self, lies: Mapping[str, Answered] | None = None, **more: tuple[object, ...]) -> Case:
        """With the answers of honest sites, apart from those who lie."""
        if not self._fair:
            self._fair = {name: self.answered(name, {mix: self.held[mix][name] for mix in MIXES}) for name in SITES}
        facts = {"attempt": ATTEMPT, "mixes": MIXES, "moduli": MODULI, "challenges": self.challenges}
        given = tuple({**self._fair, **(lies or {})}.values())
        return Case(**facts, sums=self.sums, opened=self.opened, answers=given, **more)

    def failing(self, case: Case) -> list[str]:
        return evidence.failing(case, self.outputs, key)

    def verdicts(self, case: Case) -> list[tuple[str, bool]]:
        found = evidence.judge(case, self.outputs, key, lambda mix, part: read(self.challenges, mix, part))
        return [(one.party, one.proven) for one in found]
