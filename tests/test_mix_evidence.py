"""Whoever tampers with a sum is caught at the predicted rate and named, and nobody else ever is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from fl_privacy.errors import ProtocolError
from fl_privacy.mix import check, evidence, shares
from fl_privacy.mix.evidence import Case, Commitment
from tampering import (
    ATTEMPT,
    KEYS,
    KINDS,
    MIXES,
    MODULI,
    POPULATIONS,
    SITES,
    Party,
    Play,
    honest,
    key,
    read,
    tampered,
    values,
)

TRIALS = 200


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_an_honest_round_passes_and_names_nobody() -> None:
    play = Play(rng())
    assert play.failing(play.case()) == []
    assert play.verdicts(play.case()) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES)
def test_a_tampering_mix_is_always_named_and_nobody_else(kind: str, mix: str) -> None:
    """200 trials; it recounts what it received, and what makes its sum add up, and is convicted in both cases."""
    for trial in range(TRIALS):
        play = Play(rng(trial), cheat={mix: kind})
        case = play.case()
        honest = case.model_copy(update={"recounts": (play.answered(mix, play.held[mix]),)})
        for told in (honest, lying_recount(play, case, mix)):
            assert play.verdicts(told) == [(mix, True)]


def lying_recount(play: Play, case: Case, mix: str) -> Case:
    """A recount that adds up to the wrong sum, by a lie about one site; then it has to open that site's part."""
    claimed = check.answers(play.outputs[mix], MODULI, play.seed, play.challenges)
    recount = play.answered(mix, play.held[mix])
    honest = {name: evidence.unpacked(one, MODULI, play.challenges) for name, one in recount.answers.items()}
    victim = play.rng.choice(SITES)
    rest = check.total([one for name, one in honest.items() if name != victim], MODULI)
    column = np.array(MODULI, np.uint64)[:, None]
    said = {name: evidence.packed(one) for name, one in honest.items()}
    said[victim] = evidence.packed((claimed + column - rest) % column)
    recount = recount.model_copy(update={"answers": said})
    opening = play.parties[victim].opening(mix)
    return case.model_copy(update={"recounts": (evidence.signed(recount, KEYS[mix]),), "openings": (opening,)})


def missed_by(kind: str, mix: str, challenges: int, trial: int) -> bool:
    """Whether a mix's wrong sum passes a challenge that it could not foresee."""
    draw = np.random.default_rng([trial, MIXES.index(mix)])
    _, held, before = honest(int(draw.integers(POPULATIONS)), challenges)
    seed = draw.bytes(32)
    wrong = shares.added(tampered(kind, held[mix], read(challenges, mix, before.parts[mix]), draw), MODULI)
    said = [check.answers(share, MODULI, seed, challenges) for share in held[mix].values()]
    return check.passes(check.answers(wrong, MODULI, seed, challenges), said, MODULI)


@pytest.mark.parametrize("challenges", [2, 4])
def test_one_altered_number_is_missed_at_the_predicted_rate(challenges: int) -> None:
    """Exactly 2^-t for one number: within four standard deviations of 600 trials."""
    trials, expected = 3 * TRIALS, 0.5**challenges
    missed = sum(missed_by("altered", MIXES[trial % 3], challenges, trial) for trial in range(trials))
    assert abs(missed / trials - expected) < 4 * (expected * (1 - expected) / trials) ** 0.5


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tampering_by_every_mix_is_missed_at_the_predicted_rate(kind: str, mix: str) -> None:
    """By one challenge: one number in half of the cases; whole shares, which are uniform, in one over the moduli."""
    expected = 0.5 if kind == "altered" else 1 / math.prod(MODULI)
    missed = sum(missed_by(kind, mix, 1, trial) for trial in range(TRIALS))
    low, high = binom.interval(1 - 1e-6, TRIALS, expected)
    assert low <= missed <= high


def test_two_tampering_mixes_do_not_cover_each_other() -> None:
    play = Play(rng(), cheat={"mix-0": "dropped", "mix-2": "duplicated"})
    case = play.case()
    recounts = tuple(play.answered(mix, play.held[mix]) for mix in ("mix-0", "mix-2"))
    told = case.model_copy(update={"recounts": recounts})
    assert play.verdicts(told) == [("mix-0", True), ("mix-2", True)]


@pytest.mark.parametrize("mix", MIXES)
def test_a_site_that_answers_for_something_else_is_named_and_not_the_mix(mix: str) -> None:
    plays = [Play(rng(trial)) for trial in range(TRIALS // 10)]
    for trial in range(TRIALS):
        play, (liar, victim) = plays[trial % len(plays)], rng(trial).choice(SITES, 2, replace=False).tolist()
        other = {one: play.held[one][liar] for one in MIXES} | {mix: play.held[mix][victim]}
        case = play.case({liar: play.answered(liar, other)})
        recount, opening = play.answered(mix, play.held[mix]), play.parties[liar].opening(mix)
        told = case.model_copy(update={"recounts": (recount,), "openings": (opening,)})
        assert evidence.disputes(told, mix) == [liar]
        assert play.verdicts(told) == [(liar, True)]
        if trial < len(plays):
            assert play.failing(case) == [mix]


def test_a_site_and_a_mix_that_both_lie_are_both_named() -> None:
    play = Play(rng())
    false = {one: play.held[one]["c"] for one in MIXES} | {"mix-0": play.held["mix-0"]["b"]}
    case = play.case({"c": play.answered("c", false)})
    held = play.held["mix-0"] | {"d": play.held["mix-0"]["a"], "a": play.held["mix-0"]["d"]}
    recount = play.answered("mix-0", held)
    openings = tuple(play.parties[name].opening("mix-0") for name in ("a", "c", "d"))
    told = case.model_copy(update={"recounts": (recount,), "openings": openings})
    assert sorted(play.verdicts(told)) == [("c", True), ("mix-0", True)]


def test_a_mix_cannot_open_another_part_than_it_received() -> None:
    play = Play(rng(), cheat={"mix-0": "replaced"})
    case = lying_recount(play, play.case(), "mix-0")
    victim = case.openings[0].site
    forged = play.parties[victim].opening("mix-0", play.parties["a" if victim != "a" else "b"].parts["mix-0"])
    assert play.verdicts(case.model_copy(update={"openings": (forged,)})) == [("mix-0", False)]
    assert play.verdicts(case.model_copy(update={"openings": ()})) == [("mix-0", False)]
    assert play.verdicts(case.model_copy(update={"recounts": ()})) == [("mix-0", False)]


def test_a_site_that_signs_two_roots_is_named_and_the_mixes_are_not() -> None:
    play = Play(rng())
    second = Party("b", values(play.rng), play.rng.bytes(32), play.challenges)
    members = tuple(second.commitment if one.site == "b" else one for one in play.sums[2].members)
    sums = (*play.sums[:2], evidence.signed(play.sums[2].model_copy(update={"members": members}), KEYS["mix-2"]))
    assert [str(one) for one in evidence.compared(sums, MIXES, ATTEMPT, key)] == [
        "b: signed two different roots in one attempt"
    ]


def test_a_mix_that_invents_a_root_is_named_and_the_site_is_not() -> None:
    play = Play(rng())
    forged = Commitment(attempt=ATTEMPT, site="b", root="00" * 32, signature=play.sums[0].members[0].signature)
    members = tuple(forged if one.site == "b" else one for one in play.sums[0].members)
    bad = evidence.signed(play.sums[0].model_copy(update={"members": members}), KEYS["mix-0"])
    assert [one.party for one in evidence.compared((bad, *play.sums[1:]), MIXES, ATTEMPT, key)] == ["mix-0"]


def test_sums_of_other_sites_attempts_or_signers_are_refused() -> None:
    play = Play(rng())
    few = evidence.signed(play.sums[0].model_copy(update={"members": play.sums[0].members[1:]}), KEYS["mix-0"])
    late = evidence.signed(play.sums[0].model_copy(update={"attempt": "cd" * 32}), KEYS["mix-0"])
    foreign = evidence.signed(play.sums[0], KEYS["mix-1"])
    for bad in (few, late, foreign):
        with pytest.raises(ProtocolError):
            evidence.compared((bad, *play.sums[1:]), MIXES, ATTEMPT, key)


def test_only_the_nonces_that_were_committed_to_make_a_challenge() -> None:
    play = Play(rng())
    other = Party("a", values(play.rng), play.rng.bytes(32), play.challenges).opened(play.sums)
    for opened in (play.opened[1:], (other, *play.opened[1:]), (*play.opened, play.opened[0])):
        with pytest.raises(ProtocolError, match="nonce"):
            evidence.challenge(play.sums, opened, ATTEMPT, key)


def test_the_challenge_depends_on_every_sum_and_every_nonce() -> None:
    play, seeds = Play(rng()), set()
    for mix in MIXES:
        changed = play.outputs[mix].copy()
        changed[0, 0] = (int(changed[0, 0]) + 1) % MODULI[0]
        sums = tuple(
            one.model_copy(update={"digest": evidence.digest_of(changed)}) if one.mix == mix else one
            for one in play.sums
        )
        opened = tuple(one.opened(sums) for one in play.parties.values())
        seeds.add(evidence.challenge(sums, opened, ATTEMPT, key))
    assert len({play.seed, *seeds}) == 4


def test_a_case_reads_back_and_whoever_has_the_keys_finds_the_same() -> None:
    play = Play(rng(), cheat={"mix-1": "replayed"})
    case = play.case(recounts=(play.answered("mix-1", play.held["mix-1"]),))
    assert play.verdicts(Case.decode(case.encode())) == [("mix-1", True)]
    with pytest.raises(ProtocolError, match="not one of this form"):
        Case.decode(case.encode()[:-1])


def test_answers_of_all_parts_together_do_not_tell_the_sum_over_a_subset() -> None:
    """The masks of all parts add up to a uniform number: over many rounds the answers add up to all residues alike."""
    zero = np.zeros((1, 4), np.uint16)
    found = []
    for trial in range(600):
        secret = trial.to_bytes(32, "big")
        seeds, data = shares.split(check.masked(zero, (5,), secret[::-1], 1), (5,), 3, secret)
        parts = [*(shares.expanded([seed], (5,), 5) for seed in seeds), data]
        found.append(int(check.total([check.answers(part, (5,), b"c" * 32, 1) for part in parts], (5,))[0, 0]))
    counts = np.bincount(found, minlength=5)
    assert ((counts - 120) ** 2 / 120).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001
