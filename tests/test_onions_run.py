"""Route onions with real mix processes: sums are exact, and what a server or a mix puts in or leaves out is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

from chains import chain
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import RoundFailed
from fl_privacy.mix import bits, onion
from fl_privacy.routes.convicted import judged
from fl_privacy.routes.onions import BITS
from fl_privacy.transcript import open_run, verify
from fl_privacy.wire import client
from sites import PARAMETERS
from test_mixes_processes import CHEATS
from test_onions_route import federation

pytestmark = pytest.mark.e2e
SMALL = Path(__file__).parent.parent / "configs" / "onions.yaml"


def refused(play: Callable[[], Any]) -> str:
    """Why a round fails."""
    with pytest.raises((RoundFailed, grpc.RpcError)) as caught:
        play()
    error: Any = caught.value
    return str(error) if isinstance(error, RoundFailed) else str(error.details())


def test_sums_are_exact_and_what_a_server_changes_on_the_way_is_refused(tmp_path: Path) -> None:
    with chain(tmp_path, federation(deadline=60)) as made:
        relay, sent = made.end._round.relay, list[tuple[Any, bytes]]()

        def keeping(ask: Any, index: int, onions: Any, statement: bytes) -> None:
            sent.append((onions.copy(), statement))
            relay(ask, index, onions, statement)
            relay(ask, index, onions, statement)  # asked again: the same batch, and nothing new

        made.end._round.relay = keeping
        outcome = made.play(1, 1)
        np.testing.assert_allclose(outcome.mean, made.expected(), rtol=0, atol=1e-7)
        assert not made.errors
        taken = outcome.seen[BITS]
        assert len(taken) == 4 * made.federation.route.onions(made.federation, 50)

        def changed(how: Callable[[Any, Any, int], tuple[Any, Any, int]]) -> Callable[..., None]:
            def sends(ask: Any, index: int, onions: Any, statement: bytes) -> None:
                onions, statement, index = how(onions, statement, index)
                relay(ask, index, onions, statement)

            return sends

        size = made.federation.route.size(1)
        cheats: dict[str, Any] = {
            "are not the": lambda onions, statement, index: (onions[size:], statement, index),
            "gave other onions": lambda onions, statement, index: (np.roll(onions, size), statement, index),
            "not of mix-0 in this attempt": lambda onions, statement, index: (*sent[0], index),
            "takes onions from sites only": lambda onions, statement, index: (onions, statement, 0),
            "are none of a mix": lambda onions, statement, index: (onions, b"", index),
            "not of mix-1 in this attempt": lambda onions, statement, index: (
                onions[: onions.size // size * made.federation.route.size(2)],
                statement,
                2,
            ),
        }
        for number, (reason, how) in enumerate(cheats.items(), start=2):
            made.end._round.relay = changed(how)
            assert reason in refused(lambda number=number: made.play(1, number))
        made.end._round.relay = relay
        again = made.play(1, 2 + len(cheats))
        np.testing.assert_array_equal(again.mean, outcome.mean)


def test_a_site_that_was_given_another_key_and_onions_that_do_not_open_release_nothing(tmp_path: Path) -> None:
    with chain(tmp_path, federation(deadline=60)) as made:
        foreign = onion.X25519PrivateKey.generate().public_key()

        def other(name: str, end: Any) -> None:
            own = end._hops
            if name == "site-0":
                end._hops = lambda: [onion.Hop(hop.name, foreign if hop.name == "mix-1" else hop.key) for hop in own()]

        made.lies = other
        assert "sites were given different ones" in refused(lambda: made.play(1, 1))

    with chain(tmp_path / "bad", federation(deadline=60)) as made:

        def spoiled(name: str, end: Any) -> None:
            own = end._parts_of

            def parts(at: Any, payload: Any) -> Any:
                found = own(at, payload)
                data = found[0].payload.copy()
                data[40] ^= name == "site-0"
                return [type(found[0])(data, found[0].coding), *found[1:]]

            end._parts_of = parts

        made.lies = spoiled
        assert "another recipient" in refused(lambda: made.play(1, 1))


def test_a_mix_that_gives_other_onions_than_it_signed_for_is_refused_and_named(tmp_path: Path) -> None:
    with chain(tmp_path, federation(deadline=60)) as made:
        given = made.end._round.given

        def altered(ask: Any, index: int) -> client.Release:
            found = given(ask, index)
            if index == 1:
                found.rows[0] ^= 1
            return found

        made.end._round.given = altered
        assert refused(lambda: made.play(1, 1)).startswith("mix-1: it signed for other onions")


@pytest.mark.parametrize(
    ("guilty", "kinds"), [(0, "altered,replayed"), (1, ",".join(CHEATS)), (2, "altered,duplicated")]
)
def test_a_mix_that_tampers_is_named_and_nobody_else(guilty: int, kinds: str, tmp_path: Path) -> None:
    checked = federation({"trust": "malicious", "dummies": 300}, sites=3, deadline=60)
    with chain(tmp_path, checked, {guilty: kinds}) as made:
        authority = (tmp_path / "pki" / "ca" / "ca.pem").read_bytes()
        for number, kind in enumerate(kinds.split(","), start=1):
            with pytest.raises(RoundFailed) as caught:
                made.play(1, number)
            assert not made.errors
            assert caught.value.number == number + 1
            if kind == "dropped":  # too few of them are no batch
                assert str(caught.value).startswith(f"mix-{guilty}: ")
                continue
            (event,) = caught.value.events
            assert event.verdicts == (f"mix-{guilty}: lost onions that it took",), kind
            verdicts = judged(event, caught.value.seen, made.federation, PARAMETERS, authority)
            assert tuple(map(str, verdicts)) == event.verdicts
            assert all(verdict.proven for verdict in verdicts)


def test_honest_mixes_pass_the_check_and_a_site_cannot_frame_one(tmp_path: Path) -> None:
    checked = federation({"trust": "malicious", "dummies": 60}, sites=3, deadline=60)
    with chain(tmp_path, checked) as made:
        outcome = made.play(1, 1)
        np.testing.assert_allclose(outcome.mean, made.expected(), rtol=0, atol=1e-7)

        def other(name: str, end: Any) -> None:
            answer = end._answer

            def framing(at: Any, parts: Any, terms: Any) -> None:
                end._seed = bytes(32) if name == "site-1" else end._seed
                answer(at, parts, terms)

            end._answer = framing

        made.lies = other
    with chain(tmp_path / "framed", checked) as made:
        made.lies = other
        with pytest.raises(RoundFailed, match="void") as caught:
            made.play(1, 1)
        (event,) = caught.value.events
        assert event.verdicts == ("site-1: revealed dummies that it did not send",)
        authority = (tmp_path / "framed" / "pki" / "ca" / "ca.pem").read_bytes()
        (verdict,) = judged(event, caught.value.seen, made.federation, PARAMETERS, authority)
        assert str(verdict) == event.verdicts[0]


@pytest.mark.timeout(600)
def test_the_example_runs_and_each_party_saw_what_the_docs_say(tmp_path: Path) -> None:
    values = yaml.safe_load(SMALL.read_text())
    values |= {"rounds": 1, "audit": True, "evaluate": "server"}
    values["task"] |= {"hidden": [2]}
    made = Federation.parse(yaml.safe_dump(values))
    result = up(made, "local", tmp_path)
    assert result.status == "completed", result.reason
    path, route = Path(result.path), made.route
    assert verify(path, (tmp_path / "pki" / "ca.pem").read_bytes()).ok
    run: Any = open_run(path)
    first, second, third = (run.view(f"mix-{index}").round(1).arrays for index in range(3))
    server = run.view("server").round(1).arrays
    parameters = server["model"].size
    each = route.onions(made, parameters)
    assert first["shares"].shape == (3, each * route.size(0))
    for index, view in ((1, second), (2, third)):
        assert view["onions"].shape == (3 * each * route.size(index),)
        assert view["digests"].shape == (3, 32)
    # Bytes of fresh keys and ciphertexts: no mix can tell a set bit from another.
    for data in (first["shares"], second["onions"], third["onions"]):
        found = np.bincount(np.asarray(data).reshape(-1), minlength=256)
        expected = found.sum() / 256
        assert ((found - expected) ** 2 / expected).sum() < 255 + 5 * (2 * 255) ** 0.5 + 10
    assert server[BITS].shape == (3 * each, bits.SIZE)
    assert "updates" not in server
    sums = route.summed(made, parameters, server)
    assert sums.shape == (len(made.coding.moduli), parameters)
