"""Sites that try to frame a mix, with real mix processes: no honest party is ever named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

from chains import Chain, chain, federation
from fl_privacy.crypto import merkle
from fl_privacy.errors import RoundFailed
from fl_privacy.mix import evidence
from fl_privacy.mix.evidence import Answered, Commitment

pytestmark = pytest.mark.e2e
LIAR = "site-2"
SHORT = federation("malicious")  # for rounds that wait in vain
PATIENT = type(SHORT).model_validate({**SHORT.model_dump(), "deadline": 60})
Lie = Callable[[Any], None]


def about(place: int) -> Lie:
    """It answers for another part than the one that it sent to this mix."""

    def lie(end: Any) -> None:
        honest, other = end._answers, (place + 1) % 3

        def answers(at: Any, parts: Any, seed: bytes) -> Answered:
            false = {f"mix-{place}": honest(at, parts, seed).answers[f"mix-{other}"]}
            made = honest(at, parts, seed)
            return evidence.signed(made.model_copy(update={"answers": made.answers | false}), end._signer)

        end._answers = answers

    return lie


def two_roots(end: Any) -> None:
    """It signs another root for the second mix, over the same parts with another nonce."""

    def papers(self: Any, at: Any, parts: Any) -> list[dict[str, Any]]:
        made = type(self)._papers(self, at, parts)
        digests = {mix: part.digest for mix, part in zip(self._mixes, parts, strict=True)}
        leaves = evidence.leaves(at.attempt, self._seat.site, b"n" * 32, digests)
        root = Commitment(attempt=at.attempt, site=self._seat.site, root=merkle.root(leaves).hex())
        signature = bytes.fromhex(evidence.signed(root, self._signer).signature)
        made[1] = {"root": merkle.root(leaves), "signature": signature, "path": merkle.path(leaves, 2)}
        return made

    end._papers = MethodType(papers, end)


def another_part(end: Any) -> None:
    """What it sends to the second mix is not what its root says."""
    honest = end._papers

    def papers(at: Any, parts: Any) -> list[dict[str, Any]]:
        made = honest(at, parts)
        made[1] = made[1] | {"path": made[0]["path"]}
        return list(made)

    end._papers = papers


def another_nonce(end: Any) -> None:
    """It opens a nonce that it had not committed to, to choose the challenge."""
    honest = end._opens

    def opens(at: Any, sums: Any) -> Any:
        made = honest(at, sums).model_copy(update={"nonce": "00" * 32})
        return evidence.signed(made, end._signer)

    end._opens = opens


def silence(end: Any) -> None:
    """It sends its parts and says nothing afterwards."""
    end._answer = lambda at, parts: None


def failed(made: Chain, number: int, lie: Lie) -> RoundFailed:
    made.lies = lambda name, end: lie(end) if name == LIAR else None
    with pytest.raises(RoundFailed) as caught:
        made.play(1, number)
    return caught.value


@pytest.mark.parametrize(
    ("lie", "verdict"),
    [
        (about(0), f"{LIAR}: answered for something else than its part at mix-0"),
        (about(1), f"{LIAR}: answered for something else than its part at mix-1"),
        (about(2), f"{LIAR}: answered for something else than its part at mix-2"),
        (two_roots, f"{LIAR}: signed two different roots in one attempt"),
    ],
    ids=["answers-0", "answers-1", "answers-2", "two-roots"],
)
def test_a_site_that_contradicts_what_it_signed_is_convicted_and_no_mix(lie: Lie, verdict: str, tmp_path: Path) -> None:
    with chain(tmp_path, PATIENT) as made:
        (event,) = failed(made, 1, lie).events
        assert event.verdicts == (verdict,)


def test_a_part_that_is_not_under_its_root_is_refused_on_arrival(tmp_path: Path) -> None:
    with chain(tmp_path, SHORT) as made:
        error = failed(made, 1, another_part)
        assert not error.events
        assert "not under the root that its sender signed" in str(made.errors[LIAR])


@pytest.mark.parametrize("lie", [another_nonce, silence], ids=["nonce", "silence"])
def test_a_site_that_spoils_a_check_is_waited_for_and_nobody_is_convicted(lie: Lie, tmp_path: Path) -> None:
    with chain(tmp_path, SHORT) as one:
        error = failed(one, 1, lie)
        assert not error.events
        assert str(error).endswith(f"mix-0 says that it waits for {LIAR} (not proven); see the sites' logs")
