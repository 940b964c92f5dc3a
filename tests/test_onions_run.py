"""Route onions with real mix processes: sums are exact, and whoever puts onions in or leaves some out gains nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from chains import Chain, chain
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import RoundFailed
from fl_privacy.mix import bits, onion
from fl_privacy.routes.convicted import judged
from fl_privacy.routes.onions import BITS
from fl_privacy.transcript import open_run, verify
from sites import PARAMETERS
from test_mixes_processes import CHEATS
from test_onions_route import federation

pytestmark = pytest.mark.e2e
SMALL = Path(__file__).parent.parent / "configs" / "onions.yaml"
LIAR = "site-1"


@dataclass
class Playing:
    """A chain of three mixes; `lie` is what one site does from the next attempt on."""

    chain: Chain
    authority: bytes
    lie: str = ""
    number: int = 0

    def play(self, lie: str = "") -> Any:
        self.lie, self.number = lie, self.number + 1
        return self.chain.play(1, self.number)

    def refused(self, lie: str = "") -> str:
        """Why a round fails."""
        with pytest.raises((RoundFailed, grpc.RpcError)) as caught:
            self.play(lie)
        error: Any = caught.value
        return str(error) if isinstance(error, RoundFailed) else str(error.details())

    def named(self, error: RoundFailed) -> str:
        """Who is convicted, also by a third party."""
        (event,) = error.events
        verdicts = judged(event, error.seen, self.chain.federation, PARAMETERS, self.authority)
        assert tuple(map(str, verdicts)) == event.verdicts
        assert all(verdict.proven for verdict in verdicts)
        (name,) = event.verdicts
        return name

    def lies(self, name: str, end: Any) -> None:
        """Let a site do what `lie` says."""
        if name != LIAR:
            return
        hops, parts_of, answer = end._hops, end._parts_of, end._answer
        foreign = X25519PrivateKey.generate().public_key()

        def other_hops() -> Any:
            wrong = "mix-1" if self.lie == "keys" else ""
            return [onion.Hop(hop.name, foreign if hop.name == wrong else hop.key) for hop in hops()]

        def other_parts(at: Any, payload: Any) -> Any:
            first, *rest = parts_of(at, payload)
            data = first.payload.copy()
            data[40] ^= self.lie == "spoiled"
            return [type(first)(data, first.coding), *rest]

        def other_answer(at: Any, parts: Any, terms: Any) -> None:
            end._seed = bytes(32) if self.lie == "seed" else end._seed
            answer(at, parts, terms)

        end._hops, end._parts_of, end._answer = other_hops, other_parts, other_answer


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playing]:
    folder = tmp_path_factory.mktemp("onions")
    with chain(folder, federation({"trust": "malicious", "dummies": 60}, sites=3, deadline=120)) as made:
        found = Playing(made, (folder / "pki" / "ca" / "ca.pem").read_bytes())
        made.lies = found.lies
        yield found


def test_the_sum_is_exact_and_the_bytes_are_those_of_the_plan(playing: Playing) -> None:
    made = playing.chain
    outcome = playing.play()
    assert not made.errors
    np.testing.assert_allclose(outcome.mean, made.expected(), rtol=0, atol=1e-7)
    route: Any = made.federation.route
    server, *_ = route.cost(made.federation, PARAMETERS)
    assert len(outcome.seen[BITS]) == 3 * route.onions(made.federation, PARAMETERS)
    assert outcome.received == pytest.approx(server.updates[0], rel=0.02)


def test_what_a_server_changes_on_the_way_is_refused(playing: Playing) -> None:
    made = playing.chain
    relay, sent = made.end._round.relay, list[tuple[Any, bytes]]()

    def keeping(ask: Any, index: int, onions: Any, statement: bytes) -> None:
        sent.append((onions.copy(), statement))
        relay(ask, index, onions, statement)
        relay(ask, index, onions, statement)  # asked again: the same batch, and nothing new

    made.end._round.relay = keeping
    outcome = playing.play()

    def changed(how: Callable[[Any, Any, int], tuple[Any, Any, int]]) -> Callable[..., None]:
        def sends(ask: Any, index: int, onions: Any, statement: bytes) -> None:
            onions, statement, index = how(onions, statement, index)
            relay(ask, index, onions, statement)

        return sends

    route: Any = made.federation.route
    size, later = route.size(1), route.size(2)
    cheats: dict[str, Any] = {
        "are not the": lambda onions, statement, index: (onions[size:], statement, index),
        "gave other onions": lambda onions, statement, index: (np.roll(onions, size), statement, index),
        "not of mix-0 in this attempt": lambda onions, statement, index: (*sent[0], index),
        "takes onions from sites only": lambda onions, statement, index: (onions, statement, 0),
        "0 bytes are none of": lambda onions, statement, index: (onions, b"", index),
        "not of mix-1 in this": lambda onions, statement, index: (onions[: onions.size // size * later], statement, 2),
    }
    for reason, how in cheats.items():
        made.end._round.relay = changed(how)
        assert reason in playing.refused()
    made.end._round.relay = relay
    np.testing.assert_array_equal(playing.play().mean, outcome.mean)


def test_a_mix_that_gives_other_onions_than_it_signed_for_is_refused(playing: Playing) -> None:
    made = playing.chain
    given = made.end._round.given

    def altered(ask: Any, index: int) -> Any:
        found = given(ask, index)
        if index == 1:
            found.rows[0] ^= 1
        return found

    made.end._round.given = altered
    assert playing.refused().startswith("mix-1: it signed for other onions")
    made.end._round.given = given


def test_a_site_that_was_given_another_key_and_onions_that_do_not_open_release_nothing(playing: Playing) -> None:
    assert "sites were given different ones" in playing.refused("keys")
    assert "another recipient" in playing.refused("spoiled")


def test_a_site_cannot_frame_a_mix(playing: Playing) -> None:
    with pytest.raises(RoundFailed, match="void") as caught:
        playing.play("seed")
    assert playing.named(caught.value) == f"{LIAR}: revealed dummies that it did not send"


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_mix_that_tampers_is_named_and_nobody_else(guilty: int, tmp_path: Path) -> None:
    """In every way, an attempt for each."""
    checked = federation({"mixes": 2, "trust": "malicious", "dummies": 300}, sites=3, deadline=120)
    with chain(tmp_path, checked, {guilty: ",".join(CHEATS)}) as made:
        playing = Playing(made, (tmp_path / "pki" / "ca" / "ca.pem").read_bytes())
        for kind in CHEATS:
            with pytest.raises(RoundFailed) as caught:
                playing.play()
            assert not made.errors
            assert caught.value.number == playing.number + 1
            if kind == "dropped":  # too few of them are no batch
                assert str(caught.value).startswith(f"mix-{guilty}: ")
            else:
                assert playing.named(caught.value) == f"mix-{guilty}: lost onions that it took", kind


@pytest.mark.timeout(600)
def test_the_example_runs_and_each_party_saw_what_the_docs_say(tmp_path: Path) -> None:
    values = yaml.safe_load(SMALL.read_text())
    values |= {"rounds": 1, "audit": True, "evaluate": "server"}
    values["encode"] |= {"r": 1}
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
