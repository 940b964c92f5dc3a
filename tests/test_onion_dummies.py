"""Dummies among onions: who loses some is named at the predicted rate, and nobody else is, by no false statement."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fl_privacy.errors import ProtocolError
from fl_privacy.identity.signing import fingerprint
from fl_privacy.mix import batch, dummies, onion
from fl_privacy.mix.batch import Batch, Revealed, Sent
from fl_privacy.mix.dummies import Case
from fl_privacy.mix.onion import Hop, Place
from fl_privacy.round import statements
from fl_privacy.routes.revealing import check

ATTEMPT = "ab" * 32
PLACE = Place("test", "run", 1, ATTEMPT)
MIXES, SITES = ("mix-0", "mix-1", "mix-2"), ("site-0", "site-1", "site-2")
KEYS = {name: ec.generate_private_key(ec.SECP256R1()) for name in (*MIXES, *SITES)}
LAYERS = {name: X25519PrivateKey.generate().public_key() for name in (*MIXES, "server")}
HOPS = [Hop(name, key) for name, key in LAYERS.items()]
REAL, DUMMIES = 40, 10
KINDS = ("altered", "dropped", "duplicated", "replaced", "replayed")


def key_of(role: str, name: str) -> str:
    return fingerprint(KEYS[name].public_key())


def point(name: str) -> str:
    return LAYERS[name].public_bytes_raw().hex()


def signed(made: Any) -> Any:
    return made.signed(KEYS[made.by])


def known(name: str) -> dict[str, str]:
    return {"attempt": ATTEMPT, "by": name, "key": statements.public(KEYS[name]).hex()}


def digest(listed: list[bytes]) -> str:
    return hashlib.sha256(b"".join(listed)).hexdigest()


@dataclass
class Round:
    """An honest attempt: every layer of every onion, by site; the last ones of a site are its dummies."""

    layers: dict[str, list[list[bytes]]]
    seeds: dict[str, bytes]
    batches: list[list[bytes]] = field(default_factory=list)

    def sent(self, site: str) -> list[bytes]:
        return [one[0] for one in self.layers[site]]

    def played(self, guilty: int = -1, kind: str = "", chosen: Any = (), old: bytes = b"") -> Case:
        """All mixes up to the guilty one, which does this to the chosen onions."""
        every = [one for listed in self.layers.values() for one in listed]
        self.batches, said = [], list[Batch]()
        members = tuple(
            signed(Sent(**known(site), keys=onion.keys_digest(HOPS).hex(), digest=digest(self.sent(site))))
            for site in SITES
        )
        taken = batch.first(bytes.fromhex(one.digest) for one in members)
        for index, mix in enumerate(MIXES[: guilty + 1 if guilty >= 0 else None]):
            given = [one[index + 1] for one in every]
            if index == guilty:
                rest = next(place for place in range(len(every)) if place not in chosen)
                for place in chosen:
                    given[place] = {
                        "altered": bytes([given[place][0] ^ 1]) + given[place][1:],
                        "dropped": b"",
                        "duplicated": given[rest],
                        "replaced": onion.wrapped(bytes(8), HOPS[index + 1 :], PLACE),
                        "replayed": old[: len(given[place]) - 4] + place.to_bytes(4, "big"),
                    }[kind]
            made = Batch(
                **known(mix),
                taken=taken,
                given=digest(given),
                onions=len(every),
                layer=point(mix),
                members=() if index else members,
            )
            said.append(signed(made))
            self.batches.append(given)
            taken = made.given
        case = Case(
            attempt=ATTEMPT,
            federation="test",
            run="run",
            round=1,
            count=DUMMIES,
            mixes=MIXES,
            said=tuple(said),
        )
        return case.model_copy(update={"revealed": tuple(self.revealed(site, said[-1].given) for site in SITES)})

    def revealed(self, site: str, given: str, **other: Any) -> Revealed:
        values = {"given": given, "seed": self.seeds[site].hex(), "layers": tuple(map(point, LAYERS)), **other}
        values = {"federation": "test", "run": "run", "round": 1, "count": DUMMIES, **values}
        return signed(Revealed(**known(site), **values))

    def judged(self, case: Case, *shown: str) -> list[str]:
        dummies.sound(case.said, MIXES, ATTEMPT, key_of)
        found = dummies.judge(case, list(map(set, self.batches)), {site: set(self.sent(site)) for site in shown})
        return [str(one) for one in found]


@pytest.fixture(scope="module")
def made() -> Round:
    seeds = {site: bytes([number + 1]) * 32 for number, site in enumerate(SITES)}
    layers = {
        site: [onion.layers(b"bit-bits", HOPS, PLACE) for _ in range(REAL)]
        + list(dummies.made(seed, DUMMIES, HOPS, PLACE))
        for site, seed in seeds.items()
    }
    return Round(layers, seeds)


def test_honest_mixes_lose_nothing(made: Round) -> None:
    assert made.judged(made.played()) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_whoever_loses_a_dummy_is_named_and_nobody_else(made: Round, kind: str, guilty: int) -> None:
    chosen = [REAL, REAL + 1]  # dummies of the first site
    case = made.played(guilty, kind, chosen, old=b"o" * 400)
    assert made.judged(case, "site-0") == [f"mix-{guilty}: lost onions that it took"]


def test_whoever_touches_no_dummy_is_not_named_here(made: Round) -> None:
    assert made.judged(made.played(1, "altered", [0, 1, 2])) == []


def test_tampering_is_named_at_the_predicted_rate(made: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 trials: a mix that alters s of N onions at random hits one of k dummies unless it misses all of them."""
    known = {seed: made.layers[site][REAL:] for site, seed in made.seeds.items()}
    monkeypatch.setattr(dummies, "made", lambda seed, *_: iter(known[seed]))  # as they are, and not made again
    rng, total, altered, trials = np.random.default_rng(5), 3 * (REAL + DUMMIES), 6, 200
    caught = Counter[int]()
    for trial in range(trials):
        guilty = trial % 3
        chosen = rng.choice(total, altered, replace=False).tolist()
        found = made.judged(made.played(guilty, KINDS[trial % len(KINDS)], chosen, old=b"o" * 400), *SITES)
        assert found in ([], [f"mix-{guilty}: lost onions that it took"])
        caught[len(found)] += 1
    missed = math.comb(total - 3 * DUMMIES, altered) / math.comb(total, altered)
    assert abs(caught[0] / trials - missed) < 4 * (missed * (1 - missed) / trials) ** 0.5


def test_a_first_mix_that_does_not_show_what_it_took_is_named_without_proof(made: Round) -> None:
    (found,) = made.judged(made.played(0, "dropped", [REAL]))
    assert found == "mix-0: does not show the onions of site-0, of which some are missing (not proven)"


def test_no_false_statement_of_a_site_names_a_mix(made: Round) -> None:
    case = made.played()
    given = case.said[-1].given
    foreign = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    seed = made.revealed("site-1", given, seed="77" * 32)
    keys = made.revealed("site-1", given, layers=(point("mix-0"), foreign, point("mix-2"), point("server")))
    last = made.revealed("site-1", given, layers=(*map(point, MIXES), foreign))
    fewer = made.revealed("site-1", given, layers=(point("mix-0"),))
    none = made.revealed("site-1", given, layers=("00", *map(point, MIXES)))
    low = made.revealed("site-1", given, layers=("00" * 32, *map(point, MIXES)))
    for false, charge in (
        (seed, "revealed dummies that it did not send"),
        *((one, "revealed other keys than it signed for") for one in (keys, last, fewer, none, low)),
    ):
        changed = case.model_copy(update={"revealed": (case.revealed[0], false, case.revealed[2])})
        assert made.judged(changed, "site-1") == [f"site-1: {charge}"]


def test_no_case_that_a_server_changes_names_a_site(made: Round) -> None:
    """From another round, run or number of dummies would follow onions that no site sent."""
    case, roster = made.played(), SimpleNamespace(key_of=key_of)
    check(case, roster)  # type: ignore[arg-type]
    for changes in ({"round": 2}, {"run": "another"}, {"federation": "another"}, {"count": DUMMIES + 1}):
        with pytest.raises(ProtocolError, match="made its dummies for another"):
            check(case.model_copy(update=changes), roster)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="not one of this form"):
        Case.decode(case.encode()[:-1] + b',"last":""}')  # sites say whose key the innermost layer has


@pytest.mark.parametrize("seed", ["", "00", "zz" * 32])
def test_a_seed_that_is_none_is_no_statement(made: Round, seed: str) -> None:
    good = made.revealed("site-0", "00" * 32).encode()
    Revealed.decode(good)
    with pytest.raises(ProtocolError, match="not one of this form"):
        Revealed.decode(good.replace(made.seeds["site-0"].hex().encode(), seed.encode()))


def test_a_mix_that_signs_another_key_than_it_gave_is_named(made: Round) -> None:
    case = made.played()
    other = signed(case.said[1].model_copy(update={"layer": point("server"), "signature": ""}))
    changed = case.model_copy(update={"said": (case.said[0], other, case.said[2])})
    assert made.judged(changed) == ["mix-1: signed another key than it gave to sites"]


def test_statements_that_are_no_chain_are_refused(made: Round) -> None:
    case = made.played()
    first, second, third = case.said
    broken = signed(second.model_copy(update={"taken": "00" * 32}))
    fewer = signed(second.model_copy(update={"onions": second.onions - 1}))
    unsigned = second.model_copy(update={"given": "00" * 32})
    left = signed(first.model_copy(update={"members": first.members[1:]}))
    twice = signed(first.model_copy(update={"members": (first.members[0], *first.members)}))
    foreign = second.model_copy(update={"key": first.key}).signed(KEYS["mix-0"])
    for said in (
        (first, broken, third),
        (first, fewer, third),
        (first, unsigned, third),
        (left, second, third),
        (twice, second, third),
        (first, foreign, third),
        (second, first, third),
        (),
    ):
        with pytest.raises(ProtocolError):
            dummies.sound(said, MIXES, ATTEMPT, key_of)
