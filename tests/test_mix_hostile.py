"""A hostile server with hostile mixes: what an honest mix or site does not give them."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization

from chains import federation
from fl_privacy.config import Federation
from fl_privacy.errors import ProtocolError, RoundFailed
from fl_privacy.identity.signing import fingerprint
from fl_privacy.mix import evidence
from fl_privacy.mix.evidence import Answered, Commitment, Opened, Sum
from fl_privacy.ops.metrics import OFF
from fl_privacy.rns import residues
from fl_privacy.round import opening
from fl_privacy.round.board import LOST, Board, gathered, keys_in
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.spoken import Spoken
from fl_privacy.round.terms import FIELDS, Terms
from fl_privacy.routes.answering import Answering
from fl_privacy.routes.sharing import FromOne
from fl_privacy.routes.verifying import Verifying, charged
from fl_privacy.steps.base import At
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import MAX_MESSAGE
from helpers import refused
from shuffler_app.checked import CheckedMix
from tampering import ATTEMPT, KEYS, MIXES, MODULI, SITES, Play, key

MALICIOUS = federation("malicious")
ROSTER = SimpleNamespace(key_of=lambda role, name: fingerprint(key(name)), organisations=len)


def der(name: str) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key(name).public_bytes(serialization.Encoding.DER, form).hex()


def play() -> Play:
    """With the keys that sums bring along."""
    made = Play(np.random.default_rng(0))
    known = {name: der(name) for name in (*SITES, *MIXES)}
    made.sums = tuple(one.model_copy(update={"keys": known}) for one in made.sums)
    return made


def other_sums(made: Play, honest: str) -> tuple[Sum, ...]:
    """The hostile mixes sign a second sum each; that of the honest mix stays."""
    forged = [one.model_copy(update={"digest": "00" * 32}) for one in made.sums]
    pairs = zip(made.sums, forged, strict=True)
    return tuple(one if one.mix == honest else evidence.signed(bad, KEYS[one.mix]) for one, bad in pairs)


# The size of the model


def mix(made: Federation = MALICIOUS) -> CheckedMix:
    found = CheckedMix.__new__(CheckedMix)
    found.federation, found._route, found._name, found._index = made, made.route, "mix-1", 1  # type: ignore[assignment]
    found._boards, found._silent = {}, set()
    found.keys = SimpleNamespace(roster=lambda: ROSTER)  # type: ignore[assignment]
    return found


def terms(parameters: int) -> Terms:
    """As the server makes them for a model of this size."""
    facts: dict[str, Any] = dict.fromkeys(FIELDS, 0) | {"run": "run", "nonce": b"n" * 32, "round": 3, "number": 1}
    facts |= {"federation": MALICIOUS.digest, "roster": "r", "model": FromOne(parameters).digest([b"m" * 32])}
    facts |= {"root": Cohort(list(MALICIOUS.site_names), bytes(32)).root, "cohort": 4, "organisations": 4}
    return Terms(**{**facts, "quorum": 4, "layout": "l", "recipient": "server"})


def opened(known: Terms, parameters: int) -> Terms:
    """What a mix finds, to which the server says this size."""
    facts = {**vars(known), "attempt": known.name, "parameters": parameters, "length": 32, "shards": [b"m" * 32]}
    header, one = pb.RoundHeader(**facts), mix()
    model = asyncio.run(one.prepare(None, header, None))  # type: ignore[arg-type]
    roster: Any = SimpleNamespace(digest="r", organisations=len)
    cohort = Cohort(list(MALICIOUS.site_names), bytes(32))
    return opening.terms_of(header, cohort, one.model_digest(header, model), "server", MALICIOUS, roster)


def test_a_mix_without_the_model_opens_no_attempt_for_another_size_than_the_sites_have() -> None:
    """It would expand its seeds to other columns, find a dispute with every site, and open all parts."""
    assert opened(terms(300), 300) == terms(300)
    for lie in (1, 299, 301):
        with refused("PERMISSION_DENIED"):
            opened(terms(300), lie)


def test_an_attempt_of_another_size_has_another_name_which_sites_refuse() -> None:
    assert terms(300).name != terms(1).name
    with refused("PERMISSION_DENIED"):
        source: Any = SimpleNamespace(**vars(terms(1)), attempt=terms(1).name)
        Terms.checked(source, model=FromOne(300).digest([b"m" * 32]))


def test_a_size_beyond_memory_and_a_short_digest_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**20))
    with refused("RESOURCE_EXHAUSTED"):
        opened(terms(2**20), 2**20)
    with refused("INVALID_ARGUMENT"):
        FromOne(300).digest([b"m" * 31])


# One challenge for every site


class Frozen(CheckedMix):
    """A mix with an attempt that it has added up."""

    def _share(self, attempt: Any, site: str) -> Any:
        return attempt.held[site]


def attempt_of(made: Play, honest: str) -> tuple[Frozen, Any]:
    found: Any = mix()
    found.__class__, found._name = Frozen, honest
    found._route = SimpleNamespace(masks=made.challenges, coding=lambda _: SimpleNamespace(moduli=MODULI))
    found.signing_key = KEYS[honest]
    board = Board(MIXES)
    attempt = SimpleNamespace(terms=SimpleNamespace(name=ATTEMPT), board=board, held=made.held[honest])
    return found, attempt


def test_an_honest_mix_recounts_only_for_the_sums_that_every_site_opened_its_nonce_for() -> None:
    """Sites see one set of sums and the mix another: two challenges with the same masks would tell about updates."""
    made = play()
    node, attempt = attempt_of(made, "mix-1")
    shown = other_sums(made, "mix-1")
    for sums, good in ((shown, False), (made.sums, True)):
        board = Board(MIXES)
        board.put_sums(sums, ATTEMPT, key)
        if good:
            for one in made.opened:
                board.put_nonce(one.site, one)
            assert node._recount(attempt, board).seed == made.seed.hex()
            continue
        for one in made.opened:
            with refused("PERMISSION_DENIED"):
                board.put_nonce(one.site, one)
            relabelled = one.model_copy(update={"sums": evidence.together(sums)})
            with refused("PERMISSION_DENIED"):
                board.put_nonce(one.site, relabelled)
        board.nonces = {one.site: one for one in made.opened}
        with refused("PERMISSION_DENIED"):
            node._recount(attempt, board)


class Site(Answering):
    """The real end of a site, at a hostile mix."""

    said: list[bytes]

    def __init__(self, name: str, made: Play, sums: tuple[Sum, ...], nonces: list[Opened]) -> None:
        party = made.parties[name]
        self._route = SimpleNamespace(masks=made.challenges)  # type: ignore[assignment]
        self._chosen, self._spoken, self._signer = (0, 1, 2), Spoken(None), KEYS[name]
        self._leaves, self._root, self._party = party.leaves, party.commitment.root, party
        self._keys = SimpleNamespace(roster=lambda: ROSTER)  # type: ignore[assignment]
        self._seat = SimpleNamespace(site=name, floor=lambda: 3, log=self._log)  # type: ignore[assignment]
        self._shown, self._nonces, self.said, self.reasons = sums, nonces, [], list[str]()
        self._metrics, self._federation = OFF, MALICIOUS

    def _log(self, event: str, **facts: Any) -> None:
        self.reasons.append(facts["reason"])

    def _nonce(self, at: At) -> bytes:
        return self._party.nonce

    def _answers(self, at: At, parts: Any, seed: bytes) -> Answered:
        return evidence.signed(Answered(attempt=ATTEMPT, seed=seed.hex(), by=self._seat.site, answers={}), self._signer)

    def _read(self, at: At, stage: str, *own: bytes) -> list[bytes]:
        self.said += own
        return [one.encode() for one in (self._shown if stage == "sums" else self._nonces)]


AT = At("run", 3, ATTEMPT)


def test_a_site_answers_only_if_every_other_opened_its_nonce_for_the_same_sums() -> None:
    """One site is shown other sums than the rest: neither it nor they answer."""
    made = play()
    second = other_sums(made, "mix-1")
    fooled = made.parties["a"].opened(second)
    mixed = [fooled, *made.opened[1:]]
    for name, sums in (("a", second), ("b", made.sums)):
        site = Site(name, made, sums, mixed)
        site._answer(AT, [], [])
        assert [Opened.decode(one).site for one in site.said] == [name]  # and no answers
        assert "opened for other sums" in site.reasons[0]
    honest = Site("b", made, made.sums, list(made.opened))
    honest._answer(AT, [], [])
    kinds: list[Any] = [Opened, Answered]
    assert [kind.decode(one).attempt for kind, one in zip(kinds, honest.said, strict=True)] == [ATTEMPT] * 2
    honest._shown, honest.said = second, []
    honest._answer(AT, [], [])
    assert honest.said == []
    assert "signed for others" in honest.reasons[-1]


@pytest.mark.parametrize("losses", [1, 2, 100])
def test_parts_that_a_mix_lost_are_sent_again_and_then_answered_for(losses: int) -> None:
    """Nobody asks for them a second time. A mix that says so for ever is not believed for ever."""

    class Waits(Site):
        times, told = 0, losses

        def _read(self, at: At, stage: str, *own: bytes) -> list[bytes]:
            if self.told:
                self.told -= 1
                raise ProtocolError("FAILED_PRECONDITION", LOST)
            return super()._read(at, stage, *own)

        def _send(self, *given: Any) -> None:
            self.times += 1

    made = play()
    site = Waits("b", made, made.sums, list(made.opened))
    site._answer(AT, [], [])
    assert site.times == min(losses, MALICIOUS.attempts)
    assert len(site.said) == (2 if losses < MALICIOUS.attempts else 0)


def test_answers_that_leave_a_mix_out_are_no_dispute() -> None:
    made = play()
    node, attempt = attempt_of(made, "mix-1")
    board = Board(MIXES)
    board.put_sums(made.sums, ATTEMPT, key)
    for one in made.opened:
        board.put_nonce(one.site, one)
    whole = made.answered("a", {name: made.held[name]["a"] for name in MIXES})
    few = whole.model_copy(update={"answers": {"mix-0": whole.answers["mix-0"]}})
    for said in (whole, evidence.signed(few, KEYS["a"])):
        with refused("PERMISSION_DENIED"):
            node._opening(attempt, board, said)


# What fails a round


@pytest.mark.parametrize("encode", ["rns", "fixed"])
@pytest.mark.parametrize("parameters", [1, 31, 300, 5000])
def test_a_share_with_a_bit_in_its_padding_is_refused_when_it_arrives(encode: str, parameters: int) -> None:
    """All residues are below their modulus; only the column count tells that this one does not belong there."""
    made = federation("malicious", encode)
    route: Any = made.route
    coding, columns = route.coding(made), route.columns(made, parameters)
    row = np.zeros(route.share_length(made, parameters), np.uint32)
    node = mix(made)
    attempt: Any = SimpleNamespace(coding=coding, parameters=parameters, terms=terms(1), decoder=None)
    node.journal = SimpleNamespace(released=lambda name: None)  # type: ignore[assignment]
    asyncio.run(node.reopened(SimpleNamespace(attempt=None), attempt))  # type: ignore[arg-type]
    attempt.decoder.check("a", row)
    for column in range(columns, -(-columns // 32) * 32):
        bad = row.copy()
        residues.put(bad, coding.moduli, columns, column, 1)
        coding.check(bad)
        with refused("INVALID_ARGUMENT"):
            attempt.decoder.check("a", bad)
    residues.put(row, coding.moduli, columns, columns - 1, 1)
    attempt.decoder.check("a", row)


@pytest.mark.parametrize("mixes", [2, 3, 8])
def test_the_sums_of_all_mixes_fit_into_one_message_for_the_longest_names(mixes: int) -> None:
    route: Any = federation("malicious", mixes=str(mixes)).route
    names = [f"{place:064d}" for place in range(route.most_checked)]
    members = tuple(Commitment(attempt=ATTEMPT, site=one, root="00" * 32, signature="00" * 72) for one in names)
    keys = {one: der("a") for one in (*names, "mix-0")}
    made = Sum(attempt=ATTEMPT, mix="mix-0", members=members, digest="00" * 32, signature="00" * 72, keys=keys)
    request = pb.CheckRequest(run="r" * 128, round=1, attempt=ATTEMPT, stage="sums", said=[made.encode()] * mixes)
    assert 0.95 * MAX_MESSAGE < request.ByteSize() <= MAX_MESSAGE


def test_a_reply_that_never_ends_is_left() -> None:
    with refused("INVALID_ARGUMENT"):
        gathered(lambda known: ([b""], False), time.monotonic() + 60)
    with refused("RESOURCE_EXHAUSTED"):
        gathered(lambda known: ([b"x"] * 10_000, False), time.monotonic() + 60)
    with refused("DEADLINE_EXCEEDED"):
        gathered(lambda known: ([b"x"], False), time.monotonic() + 0.01)
    assert gathered(lambda known: ([b"x"], known == 2), time.monotonic() + 60) == [b"x"] * 3


def test_a_statement_by_itself_names_the_mix_whose_sum_cannot_be_compared() -> None:
    made = play()
    one, output = made.sums[0], made.outputs["mix-0"]

    def found(said: Sum, signer: str = "mix-0", sites: tuple[str, ...] = SITES) -> str:
        said = evidence.signed(said, KEYS[signer])
        return charged("mix-0", said, ATTEMPT, sites, output, keys_in([said], ROSTER, MIXES))  # type: ignore[arg-type]

    assert found(one) == ""
    assert "other sites" in found(one.model_copy(update={"members": one.members[1:]}))
    assert "other sites" in found(one, sites=("a", "b", "c"))
    assert "another sum" in found(one.model_copy(update={"digest": "00" * 32}))
    assert "did not sign" in found(one, "mix-1")
    assert "key" in found(one.model_copy(update={"keys": {name: der(name) for name in ("mix-0", "a", "b", "c")}}))
    for members in (one.members[::-1], (*one.members, one.members[-1])):
        bad = evidence.signed(one.model_copy(update={"members": members}), KEYS["mix-0"])
        assert found(bad) == ""  # a verdict by what it signed
        (verdict,) = evidence.compared((bad, *made.sums[1:]), MIXES, ATTEMPT, key)
        assert (verdict.party, verdict.proven) == ("mix-0", True)


class Asked(Verifying):
    """The server, with what the mixes reply."""

    def __init__(self, replies: dict[str, list[bytes]]) -> None:
        self._replies = replies

    def _ask(self, ask: Any, place: int, stage: str, said: Any, until: float = 0.0) -> list[bytes]:
        return self._replies.get(f"{stage} {place}", [])


def test_what_a_mix_says_for_another_one_counts_for_nothing() -> None:
    """The first mix answers with a recount in the name of another, and opens another part than it was asked for."""
    made = play()
    false = made.answered("c", {name: made.held[name]["b"] for name in MIXES})
    case = made.case({"c": false})
    unsigned = made.answered("mix-2", made.held["mix-2"]).model_copy(update={"by": "mix-2", "signature": ""})
    own = {name: made.answered(name, made.held[name]) for name in MIXES}
    replies = {f"recount {place}": [own[name].encode()] for place, name in enumerate(MIXES)}
    replies["recount 0"] = [unsigned.encode()]
    replies |= {f"open {place}": [made.parties["c"].opening("mix-1").encode()] for place in range(3)}
    told = Asked(replies)._disputed(None, case, list(MIXES), key)  # type: ignore[arg-type]
    assert [one.by for one in told.recounts] == ["mix-1", "mix-2"]
    assert [(one.site, one.mix) for one in told.openings] == [("c", "mix-1")]


def test_a_site_that_does_not_answer_is_named_and_only_one_of_the_round() -> None:
    ask: Any = SimpleNamespace(cohort=["a", "b"])
    server = Asked({"silent 0": [b"b", b"somebody\n"]})
    server._round = SimpleNamespace(chosen=(1, 2))  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="mix-1 says that it waits for b \\(not proven\\)"):
        server._waited(ask, "answers", 0.0)


def test_a_board_takes_answers_to_its_own_challenge_and_says_who_is_silent() -> None:
    made = play()
    board = Board(MIXES)
    board.put_sums(made.sums, ATTEMPT, key)
    assert board.silent() == list(SITES)
    good = made.answered("a", {name: made.held[name]["a"] for name in MIXES})
    with refused("FAILED_PRECONDITION"):
        board.put_answers("a", good)
    for one in made.opened:
        board.put_nonce(one.site, one)
    bad = [good.model_copy(update={"seed": "00" * 32}), good.model_copy(update={"answers": {}})]
    for said in (*(evidence.signed(one, KEYS["a"]) for one in bad), good.model_copy(update={"signature": ""})):
        with refused("PERMISSION_DENIED"):
            board.put_answers("a", said)
    event = board.changed
    board.put_nonce("a", made.opened[0])
    assert board.changed is event
    board.put_answers("a", good)
    assert board.silent() == ["b", "c", "d"]


def test_a_sum_that_cannot_be_read_fails_the_attempt_and_names_its_mix() -> None:
    server = Verifying.__new__(Verifying)
    server._coding = MALICIOUS.route.coding(MALICIOUS)  # type: ignore[attr-defined]
    server._columns = 300
    ask: Any = SimpleNamespace(terms=terms(300))
    full = np.full(residues.words(server._coding.moduli, 300), 2**32 - 1, np.uint32)
    for data in (np.zeros(3, np.uint32), full):
        with pytest.raises(RoundFailed, match="mix-2: its sum cannot be read") as caught:
            server._readable(ask, "mix-2", data, 4)
        assert caught.value.number == 2


def test_two_processes_of_a_site_never_open_for_two_sets_of_sums(tmp_path: Path) -> None:
    def opens(number: int) -> bool:
        try:
            Spoken(tmp_path).opens("run", "ab", f"{number:02x}")
        except ProtocolError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(opens, range(24))) == 1
    (line,) = (tmp_path / "mixes" / "run.jsonl").read_text().splitlines()
    Spoken(tmp_path).opens("run", "ab", json.loads(line)["sums"])  # the same again is no other
