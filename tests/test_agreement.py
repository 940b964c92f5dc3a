"""The agreement on a secret: one secret whatever two of seven sites do, and who contradicts itself is named."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agreeing import DISK, Network, agreement_of, keys_of, problems, schedule, terms_of
from fl_privacy.agreement.conflicts import Proof
from fl_privacy.agreement.contributions import check_value
from fl_privacy.agreement.machine import DEADLINE, Agreement, Send, Stopped
from fl_privacy.agreement.messages import Message, Statement, Topic, decode, encode, sign
from fl_privacy.agreement.saved import restore, save
from fl_privacy.agreement.terms import Terms, public
from fl_privacy.errors import FederationError
from fl_privacy.identity.roster import Member, Roster
from fl_privacy.identity.signing import fingerprint
from helpers import refused

SCHEDULES = int(os.environ.get("FL_PRIVACY_SCHEDULES", "60"))
NAMES = terms_of(7).sites


def test_one_secret_in_every_random_schedule() -> None:
    """Seven sites, two of them faulty; messages late, lost, repeated and reordered; others restarted."""
    wrong = {seed: found for seed in range(SCHEDULES) if (found := problems(schedule(seed)))}
    assert not wrong


@pytest.mark.parametrize("how", ["equivocates", "silent", "lies", "slow", "dies"])
@pytest.mark.parametrize("faulty", [(0, 1), (5, 6)], ids=["heads", "replicas"])
def test_two_of_seven_faulty_sites_do_not_prevent_it(how: str, faulty: tuple[int, int]) -> None:
    for seed in range(3):
        network = Network(seed, {NAMES[index]: how for index in faulty})
        network.run()
        assert problems(network) == []


def test_sites_without_faults_agree_in_the_first_view_and_all_see_the_same_check_value() -> None:
    network = Network(2, {}, count=4)
    network.run()
    assert problems(network) == []
    outcomes = [site.agreement.outcome for site in network.correct]
    assert all(outcome is not None and len(outcome.contributors) >= 2 for outcome in outcomes)
    assert {site.agreement.ballot.view for site in network.correct} == {0}
    first = {site.agreement.check_value(1) for site in network.correct}
    assert len(first) == 1
    assert first != {site.agreement.check_value(2) for site in network.correct}


@pytest.mark.parametrize("lost", ["unsaved", "unsent", "half"])
def test_a_site_killed_at_any_step_continues_from_its_state(lost: str) -> None:
    """Every step of a replica and of both heads, before its state is saved, before it sends, and amid that."""
    whole = Network(3, {}, count=4)
    whole.run()
    for name in whole.terms.sites[:3]:
        for step in range(1, whole.sites[name][0].step + 1):
            network = Network(3, {}, count=4)
            network.run({name: {step: lost}})
            assert network.restarts <= 1
            assert problems(network) == [], (name, step)
            assert not any(site.agreement.proofs for site in network.correct), (name, step)


def test_a_late_site_receives_what_was_decided() -> None:
    network = Network(4, {NAMES[6]: "silent"})
    network.run()
    other = network.correct[0].agreement
    fresh = agreement_of(network.terms, NAMES[6], random.Random(9))
    assert other.outcome is not None
    for _ in range(2):
        asked = [output.data for output in fresh.start() if isinstance(output, Send)]
        for data in asked:
            for answer in other.receive(data):
                if isinstance(answer, Send) and answer.to == fresh.site:
                    fresh.receive(answer.data)
    assert fresh.outcome == other.outcome


def test_with_a_third_silent_it_stops_and_says_who_is_missing() -> None:
    network = Network(5, dict.fromkeys(NAMES[:3], "silent"))
    network.run(deadline=300.0)
    reasons = [event.reason for _, event in network.events if isinstance(event, Stopped)]
    assert len(reasons) == 4
    assert not network.secrets
    for reason in reasons:
        assert "4 of 7 sites answered, 5 are needed" in reason
        assert f"silent: {NAMES[0]}, {NAMES[1]}, {NAMES[2]}" in reason
    stopped = network.correct[0].agreement
    assert stopped.expired(DEADLINE) == []
    assert stopped.receive(b"") == []


@pytest.mark.parametrize("cut", [True, False], ids=["sides-apart", "sides-connected"])
@pytest.mark.parametrize("seed", range(5))
def test_three_of_seven_that_equivocate_together_are_named_by_what_they_signed(seed: int, cut: bool) -> None:
    """Beyond what PBFT bears: two secrets show in the check values, and the evidence of both sides names all three."""
    faulty = set(NAMES[:3])
    network = Network(seed, dict.fromkeys(faulty, "equivocates"), cut=cut)
    network.run(deadline=2000.0)
    sites = [site.agreement for site in network.correct]
    checks = {site.check_value(1) for site in sites if site.outcome is not None}
    assert len(checks) == len(network.secrets)
    assert len(checks) == 2 or not cut
    for site in sites:
        for other in sites:
            site.examine(other.evidence())
        assert set(site.proofs) == faulty
        for proof in site.proofs.values():
            assert Proof.decode(proof.encode()).reason(network.terms)
            assert not proof.reason(replace(network.terms, run="another"))


def test_evidence_holds_no_secret() -> None:
    network = Network(6, {NAMES[0]: "equivocates"})
    network.run()
    for site in network.correct:
        evidence, outcome = site.agreement.evidence(), site.agreement.outcome
        assert outcome is not None
        for secret in (outcome.secret, *(other.agreement.contribution for other in network.correct)):
            assert secret.hex().encode() not in evidence
            assert secret not in save(site.agreement, DISK)


# What is refused


def signed(terms: Terms, author: str, by: str, view: int = 0, topic: Topic = Topic.COMMITMENT) -> bytes:
    said = Statement(topic, author, 1, view, bytes(32))
    return encode(Message(sign(terms, keys_of(len(terms.sites))[by], said)))


def test_a_message_of_another_site_run_round_or_roster_is_refused() -> None:
    terms = terms_of(4)
    site = agreement_of(terms, NAMES[0], random.Random(1))
    site.receive(signed(terms, NAMES[1], NAMES[1]))
    others = (replace(terms, run="other"), replace(terms, round=2), replace(terms, roster="cd" * 32), terms_of(5))
    for foreign in others:
        with refused("PERMISSION_DENIED"):
            site.receive(signed(foreign, NAMES[1], NAMES[1]))
    for author in (NAMES[2], NAMES[0], "stranger"):
        with refused("PERMISSION_DENIED"):
            site.receive(signed(terms, author, NAMES[1]))


def test_a_signature_holds_for_one_sequence_number_view_topic_and_content() -> None:
    terms = terms_of(4)
    message = decode(signed(terms, NAMES[1], NAMES[1], topic=Topic.PREPARE), terms)
    said = message.said
    for other in (
        replace(said, height=2),
        replace(said, view=1),
        replace(said, topic=Topic.COMMIT),
        replace(said, content=bytes(31) + b"1"),
        replace(said, author=NAMES[2]),
    ):
        with refused("PERMISSION_DENIED"):
            decode(encode(Message(other)), terms)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"[[]]", b"\xff", b"[" * 10_000, b'["ask","a",1,true,"","","",[]]']
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with refused("INVALID_ARGUMENT"):
        agreement_of(terms_of(4), NAMES[0], random.Random(1)).receive(data)


def test_only_the_head_of_a_view_proposes_and_only_what_a_later_view_proves() -> None:
    terms = terms_of(4)
    site = agreement_of(terms, NAMES[3], random.Random(1))
    value = b"[]"
    for author, view in ((NAMES[1], 0), (NAMES[1], 1)):
        said = Statement(Topic.PROPOSE, author, 1, view, site.ballot.digest(value))
        with refused("PERMISSION_DENIED"):
            site.receive(encode(Message(sign(terms, keys_of(4)[author], said), value)))
    said = Statement(Topic.PROPOSE, NAMES[0], 1, 0, site.ballot.digest(value))
    with refused("INVALID_ARGUMENT"):  # no commitments in it
        site.receive(encode(Message(sign(terms, keys_of(4)[NAMES[0]], said), value)))
    assert site.ballot.accepted is None


def test_fewer_than_four_sites_are_refused() -> None:
    with pytest.raises(FederationError, match="3 sites cannot bear one faulty site; at least 4 are needed"):
        terms_of(3)
    assert [(terms_of(n).faults, terms_of(n).quorum) for n in (4, 5, 6, 7, 10)] == [
        (1, 3),
        (1, 4),
        (1, 4),
        (2, 5),
        (3, 7),
    ]


def test_terms_take_the_sites_and_keys_of_the_roster() -> None:
    keys = keys_of(4)
    members = [Member("site", name, fingerprint(key.public_key())) for name, key in keys.items()]
    roster = Roster.of("clinic", 1, members)
    given = {name: public(key) for name, key in keys.items()}
    assert Terms.of(roster, "run", 1, given).roster == roster.digest
    stranger = public(ec.generate_private_key(ec.SECP256R1()))
    for wrong in ({**given, NAMES[0]: stranger}, {**given, "other": stranger}, {NAMES[0]: given[NAMES[0]]}):
        with pytest.raises(FederationError, match="roster"):
            Terms.of(roster, "run", 1, wrong)


# State


def test_a_state_is_for_one_key_and_one_agreement() -> None:
    terms, key = terms_of(4), keys_of(4)[NAMES[0]]
    site = agreement_of(terms, NAMES[0], random.Random(1))
    site.start()
    data = save(site, DISK)
    assert restore(data, DISK, terms, key).contribution == site.contribution
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    attempts = (
        (data, bytes(32), terms),
        (data, DISK, replace(terms, round=2)),
        (damaged, DISK, terms),
        (b"", DISK, terms),
    )
    for given, disk, other in attempts:
        with pytest.raises(FederationError, match="damaged, or of another run"):
            restore(given, disk, other, key)


def test_a_restored_site_refuses_to_sign_what_contradicts_its_state() -> None:
    terms, key = terms_of(4), keys_of(4)[NAMES[0]]
    site = agreement_of(terms, NAMES[0], random.Random(1))
    site.start()
    again = restore(save(site, DISK), DISK, terms, key)
    again.contribution = bytes(32)
    with refused("ABORTED"):
        again.start()


def test_the_check_value_reveals_nothing_that_the_secret_is_made_of() -> None:
    terms = terms_of(4)
    values = {check_value(terms, secret, round) for secret in (bytes(32), bytes([1] * 32)) for round in (1, 2)}
    assert len(values) == 4
    assert check_value(terms, bytes(32), 1) != check_value(replace(terms, roster="cd" * 32), bytes(32), 1)


def test_the_docs_show_an_agreement_that_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "agreement.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})


def test_an_agreement_needs_the_key_of_its_site_and_a_whole_contribution() -> None:
    terms = terms_of(4)
    for site, key, contribution in (("stranger", NAMES[0], 32), (NAMES[1], NAMES[0], 32), (NAMES[0], NAMES[0], 31)):
        with pytest.raises(FederationError):
            Agreement(terms, site, keys_of(4)[key], bytes(contribution))
