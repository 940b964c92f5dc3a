"""Route mixes with real mix processes: sums are exact, floors hold, and a mix or site that cheats is named."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from chains import chain, federation
from fl_privacy.errors import RoundFailed
from fl_privacy.routes.convicted import judged
from helpers import kill
from sites import PARAMETERS

pytestmark = pytest.mark.e2e
ROUTE = {"kind": "mixes", "mixes": 3, "trust": "malicious", "n_min": 3}
CHEATS = ("altered", "dropped", "duplicated", "replaced", "replayed")


@pytest.mark.parametrize("trust", ["semi-honest", "malicious"])
@pytest.mark.parametrize("encode", ["rns", "fixed"])
def test_the_sum_is_exactly_that_of_the_encoded_updates(trust: str, encode: str, tmp_path: Path) -> None:
    with chain(tmp_path, federation(trust, encode)) as made:
        for round in (1, 2, 3):  # every mix is once the one that gets data
            outcome = made.play(round, seed=round)
            assert outcome.count == 4
            np.testing.assert_allclose(outcome.mean, made.expected(), rtol=0, atol=1e-7)
            assert outcome.noted == {"clamped": 0}
        assert not made.errors


def test_what_sites_cut_off_at_the_range_is_reported_of_all_together(tmp_path: Path) -> None:
    made, narrow = federation(), {"kind": "rns", "range": 1.0e-6}
    with chain(tmp_path, type(made).model_validate({**made.model_dump(), "encode": narrow})) as one:
        assert 0.9 < one.play().noted["clamped"] <= 1


def test_one_trusted_mix_gives_the_same_sum_in_the_published_form_too(tmp_path: Path) -> None:
    for form in ("published", "carry-safe"):
        with chain(tmp_path / form, federation("trusted", f"rns, form: {form}", "1")) as one:
            np.testing.assert_allclose(one.play().mean, one.expected(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_a_mix_that_tampers_is_named_and_nothing_is_combined(guilty: int, tmp_path: Path) -> None:
    """Every mix in every way, an attempt for each; a replay last, when there is something to replay."""
    with chain(tmp_path, federation("malicious"), {guilty: ",".join(CHEATS)}) as made:
        authority = (tmp_path / "pki" / "ca" / "ca.pem").read_bytes()
        for number in range(1, 1 + len(CHEATS)):
            with pytest.raises(RoundFailed, match="void") as caught:
                made.play(1, number)
            (event,) = caught.value.events
            assert event.verdicts == (f"mix-{guilty}: its sum is not that of the parts that it counted",)
            assert caught.value.number == number + 1
            verdicts = judged(event, caught.value.seen, made.federation, PARAMETERS, authority)
            assert tuple(map(str, verdicts)) == event.verdicts
        assert not made.errors


def test_a_round_below_the_floor_of_a_mix_or_a_site_releases_nothing(tmp_path: Path) -> None:
    """A hostile server settles on too few, or on others than before."""
    with chain(tmp_path, federation("semi-honest")) as made:
        decided = made.end._decided
        made.end._decided = lambda releases, quorum: decided(releases, quorum)._replace(members=b"\x03")
        with pytest.raises(grpc.RpcError) as few:
            made.play(1, 1)
        assert few.value.code().name == "FAILED_PRECONDITION"
        made.end._decided = decided
        assert made.play(1, 2).count == 4
        made.end._decided = lambda releases, quorum: decided(releases, quorum)._replace(members=b"\x07")
        with pytest.raises(grpc.RpcError) as other:
            made.play(1, 3)
        assert "released for other sites" in other.value.details() or "too few" in other.value.details()


def test_a_retry_does_without_a_mix_that_died(tmp_path: Path) -> None:
    made = federation("malicious")
    some = type(made).model_validate({**made.model_dump(), "deadline": 6, "route": {**ROUTE, "mixes_needed": 2}})
    with chain(tmp_path, some) as one:
        kill(one.mixes[1])
        with pytest.raises(RoundFailed, match="does without a mix") as caught:
            one.play(1, 1)
        number = caught.value.number
        assert 1 not in some.route.taking_part(number)
        outcome = one.play(1, number)
        np.testing.assert_allclose(outcome.mean, one.expected(), rtol=0, atol=1e-7)
        one.mixes.pop(1)
