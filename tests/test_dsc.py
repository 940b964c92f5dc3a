"""DSC: subsets are uniform, compression is unbiased, both ends keep the same bits, and lost references are harmless."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from client_app.pipeline import Pipeline
from fl_privacy.config import Federation
from fl_privacy.crypto.keys import derive
from fl_privacy.errors import ConfigError, FederationError, ProtocolError
from fl_privacy.round.checkpoints import CheckpointError, Checkpoints
from fl_privacy.round.shard_store import ShardStore
from fl_privacy.shard.compressors import BLOCK, Quantised, Sparse
from fl_privacy.shard.subset import subset
from fl_privacy.steps.base import At, Seat
from fl_privacy.steps.compress.dsc import HEAD, Compressing, Dsc, DscMean, Message, Shift
from fl_privacy.vector import Vector
from helpers import refused
from profiles import examples

SHARDS = "name: a\nsites: 6\nrounds: 3\nroute: {kind: shards, aggregators: 2}\n"


def key(number: int) -> bytes:
    return derive(bytes(32), "test", number, "", "dsc")


def vector(d: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).normal(size=d).astype(np.float32)


@given(st.integers(0, 300), st.data())
def test_a_subset_is_ascending_without_repeats_and_depends_on_its_key_alone(d: int, data: Any) -> None:
    k, number = data.draw(st.integers(0, d)), data.draw(st.integers(0, 1000))
    chosen = subset(d, k, key(number))
    assert chosen.size == k
    assert (np.diff(chosen) > 0).all()
    assert not k or (chosen[0] >= 0 and chosen[-1] < d)
    assert np.array_equal(chosen, subset(d, k, key(number)))


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_every_subset_is_equally_likely(k: int) -> None:
    """Chi-squared over all subsets of 7; 6 standard deviations are one failure in 10^8."""
    d, draws = 7, 4000
    counts: dict[tuple[int, ...], int] = {}
    for number in range(draws):
        chosen = tuple(subset(d, k, key(number)).tolist())
        counts[chosen] = counts.get(chosen, 0) + 1
    kinds = math.comb(d, k)
    expected = draws / kinds
    statistic = sum((counts.get(c, 0) - expected) ** 2 for c in counts) / expected + (kinds - len(counts)) * expected
    assert abs(statistic - (kinds - 1)) < 6 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("compressor", [Sparse(60, 0.25), Sparse(60, 0.9), Quantised(60, 2), Quantised(60, 127)])
def test_compression_is_unbiased_with_the_variance_it_states(compressor: Any) -> None:
    """Over many keys the mean is the vector (5 standard errors), and the squared error at most omega |x|^2."""
    x, draws = vector(60), 3000
    decoded = np.zeros((draws, 60), np.float32)
    for number in range(draws):
        at = compressor.touched(key(number))
        decoded[number][at] = compressor.expand(compressor.compress(x[at], key(number)))
    errors = decoded - x
    assert (np.abs(errors.mean(axis=0)) <= 5 * decoded.std(axis=0) / math.sqrt(draws) + 1e-6).all()
    squared = np.square(errors, dtype=np.float64).sum(axis=1)
    bound = compressor.omega * float(np.square(x, dtype=np.float64).sum())
    assert squared.mean() <= bound + 5 * squared.std() / math.sqrt(draws)
    if isinstance(compressor, Sparse):  # there the bound is the variance itself
        assert squared.mean() >= bound - 5 * squared.std() / math.sqrt(draws)


@given(st.integers(1, 40), st.floats(0.05, 1), st.booleans(), st.integers(0, 2**20))
@examples(15)
def test_what_is_decoded_is_the_update_on_average_whatever_the_reference(
    d: int, p: float, quantised: bool, first: int
) -> None:
    """E[s + C(g - s)] = g. Bernstein: a mean of 400 draws is further off with a probability of at most 2 exp(-18)."""
    compressor = Quantised(d, 3) if quantised else Sparse(d, p)
    update, reference, draws = vector(d, first), vector(d, first + 1), 400
    shifts = [Shift(d, reference=reference.copy(), compressor=compressor) for _ in range(draws)]
    messages = [shift.encode(update, key(first + i)) for i, shift in enumerate(shifts)]
    decoded = [Shift(d, reference=reference.copy(), compressor=compressor).decode(message) for message in messages]
    error = np.mean(decoded, axis=0, dtype=np.float64) - update
    difference = np.abs(update - reference).astype(np.float64)
    step = np.full(d, np.linalg.norm(difference) / 3) if quantised else np.maximum(1, compressor.omega) * difference
    spread = step / 2 if quantised else math.sqrt(compressor.omega) * difference
    rounding = 2.0**-20 * (1 + compressor.omega) * (np.abs(update).max() + np.abs(reference).max())
    assert (np.abs(error) <= 6 * spread / math.sqrt(draws) + 12 * step / draws + rounding).all()


@given(st.integers(1, 400), st.floats(0.01, 1), st.booleans(), st.integers(1, 6))
@examples(30)
def test_both_ends_keep_the_same_reference_to_the_last_bit(d: int, p: float, quantised: bool, rounds: int) -> None:
    compressor = Quantised(d) if quantised else Sparse(d, p)
    sender, receiver = (Shift(d, compressor=compressor) for _ in range(2))
    for round in range(rounds):
        before, update = sender.reference.copy(), vector(d, round)
        message = sender.encode(update, key(round))
        assert message.packed.size == compressor.words
        decoded = receiver.decode(message)
        assert receiver.reference.tobytes() == sender.reference.tobytes()
        # s' = s + gamma v and the update is s + v
        assert np.allclose(sender.reference - before, sender.gamma * (decoded - before), rtol=1e-4, atol=1e-5)


@given(st.integers(1, 300), st.floats(0.01, 1), st.booleans(), st.lists(st.booleans(), min_size=1, max_size=9))
@examples(40)
def test_a_decoded_update_is_reference_plus_message_and_lasts_while_it_is_held(
    d: int, p: float, quantised: bool, holds: list[bool]
) -> None:
    """Its memory is used again, so that only touched coordinates cost time; `out` gives the same."""
    compressor = Quantised(d) if quantised else Sparse(d, p)
    sender, receiver, other = (Shift(d, compressor=compressor) for _ in range(3))
    held: list[tuple[Vector, Vector]] = []
    for round, hold in enumerate(holds):
        expected, at = receiver.reference.copy(), compressor.touched(key(round))
        message = sender.encode(vector(d, round), key(round))
        expected[at] += compressor.expand(message.packed)
        decoded = receiver.decode(message)
        assert decoded.tobytes() == expected.tobytes() == other.decode(message, np.empty(d, np.float32)).tobytes()
        assert not decoded.flags.writeable
        if hold:
            held.append((decoded, expected))
        del decoded
    assert all(np.array_equal(one, then) for one, then in held)


def test_large_vectors_use_compiled_kernels_that_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for backend in ("numba", "numpy"):
        monkeypatch.setenv("FL_PRIVACY_KERNELS", backend)
        sender, receiver = Shift(2000, 0.4), Shift(2000, 0.4)
        for round in range(3):
            subset.cache_clear()
            message = sender.encode(vector(2000, round), key(round))
            made.append((backend, message.packed.tobytes(), receiver.decode(message).tobytes()))
    assert [one[1:] for one in made[:3]] == [one[1:] for one in made[3:]]
    subset.cache_clear()


@pytest.mark.parametrize("kind", [Dsc, DscMean])
@given(d=st.integers(1, 200), p=st.floats(0.05, 1), rounds=st.integers(1, 5))
@examples(20)
def test_a_message_tells_its_coordinates_exactly_to_whoever_has_the_earlier_ones(
    kind: type[Dsc], d: int, p: float, rounds: int
) -> None:
    """g = s + v / (1 + omega) at the chosen coordinates, for every site, up to four roundings of float32."""
    step, sites = kind(p=p), ("one", "other")
    senders = {site: Shift(d, p) for site in sites}
    receiver = step.decoder(d)
    for round in range(1, rounds + 1):
        updates = [vector(d, 10 * round + number) for number in range(len(sites))]
        before = [senders[site].reference.copy() for site in sites]
        messages = [senders[site].encode(update, key(round)) for site, update in zip(sites, updates, strict=True)]
        words = [np.frombuffer(m.key, "<u4") for m in messages]
        rows = np.stack([np.r_[np.uint32(round - 1), k, m.packed] for k, m in zip(words, messages, strict=True)])
        for known, update, reference in zip(receiver.known(rows, sites, round), updates, before, strict=True):
            assert known.where is not None
            assert known.bare is not None
            assert np.array_equal(known.where, subset(d, Sparse(d, p).words, key(round)))
            allowed = 4 * np.finfo(np.float32).eps * (np.abs(reference) + np.abs(update - reference))[known.where]
            assert (np.abs(known.values - update[known.where]) <= allowed).all()
            assert (np.abs(known.bare - (update - reference)[known.where]) <= allowed).all()


def test_the_reference_follows_an_update_that_does_not_change() -> None:
    shift, update = Shift(200, 0.1), vector(200)
    errors = []
    for round in range(200):
        shift.encode(update, key(round))
        errors.append(float(np.linalg.norm(shift.reference - update)))
    assert errors[-1] < 0.05 * float(np.linalg.norm(update))


def test_only_a_key_and_the_values_travel() -> None:
    assert Dsc(kind="dsc", p=0.01).coding(None).length(11_200_000) == HEAD + 112_000  # type: ignore[arg-type]
    quantised = Dsc(kind="dsc", compressor="quantised").coding(None)  # type: ignore[arg-type]
    assert quantised.length(BLOCK * 10) == HEAD + 10 + BLOCK * 10 // 4


@pytest.mark.parametrize("p", [0, -1, 1.1, math.nan])
def test_a_fraction_outside_0_to_1_is_refused(p: float) -> None:
    with pytest.raises(FederationError, match="p: "):
        Shift(10, p)
    with pytest.raises(ConfigError, match=r"compress\.p"):
        Federation.parse(SHARDS + f"compress: {{kind: dsc, p: {p}}}")


def test_updates_and_messages_of_another_length_are_refused() -> None:
    shift = Shift(10, 0.5)
    with pytest.raises(FederationError, match="update: "):
        shift.encode(vector(9), key(1))
    with pytest.raises(FederationError, match="message: 4 words"):
        shift.decode(Message(key(1), np.zeros(4, np.uint32)))
    with pytest.raises(FederationError, match="too large"):
        shift.encode(np.full(10, 3e38, np.float32), key(1))
    assert not shift.reference.any()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("name: a\nsites: 6\nroute: {kind: shuffler}\ncompress: {kind: dsc}", "needs aggregators"),
        ("name: a\nsites: 6\nroute: {kind: server}\ncompress: {kind: dsc}", "needs aggregators"),
        (SHARDS + "quorum: 5\ncompress: {kind: dsc-mean}", "drifts unless every site takes part"),
    ],
)
def test_where_dsc_cannot_work_it_is_refused_when_the_config_is_read(config: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Federation.parse(config)


class Ends:
    """Sites and one aggregator that exchange messages as the route's two parts would, without a network."""

    def __init__(self, step: Dsc, d: int = 40, sites: int = 6) -> None:
        self.federation = Federation.parse(SHARDS + f"seed: 7\ncompress: {{kind: {step.kind}, p: {step.p}}}")
        self.names = [site.name for site in self.federation.sites][:sites]
        self.sizes = self.federation.route.cut(self.federation, d).sizes()  # type: ignore[attr-defined]
        work = type("Work", (), {"layout": type("Layout", (), {"size": d})})
        seats = [Seat(self.federation, name, work, 1, None) for name in self.names]  # type: ignore[arg-type]
        self.sites = {seat.site: Compressing(step, seat) for seat in seats}
        self.parts = self.federation.route.parts(self.federation, d)
        shard = [part.size for part in self.parts.split(vector(d))]
        self.decoders = [step.decoder(size) for size in shard]

    def send(self, site: str, update: Vector, round: int) -> list[Any]:
        """The site's message to every aggregator."""
        end = self.sites[site]
        end.compare([decoder.held(site) for decoder in self.decoders])
        payload = end.outward(update, At("run", round, "attempt"))
        messages = np.split(payload, np.cumsum(self.sizes)[:-1])
        for decoder, message in zip(self.decoders, messages, strict=True):
            decoder.check(site, message)
        return messages

    def round(self, updates: dict[str, Vector], round: int) -> Vector:
        """What the aggregators combine of these updates, in coordinate order."""
        sites, sent = sorted(updates), {site: self.send(site, update, round) for site, update in updates.items()}
        shards = []
        for index, decoder in enumerate(self.decoders):
            rows = decoder.decode(np.stack([sent[site][index] for site in sites]), sites, round)
            shards.append(rows.mean(axis=0).astype(np.float32))
        return self.parts.join(shards).copy()


def bias(step: Dsc, cohort: int, rounds: int = 400) -> float:
    """How far the mean over rounds of what is combined is from the mean of the updates, relative to it.

    Updates never change, and cohorts are drawn at random, so that the mean over cohorts is that over all sites.
    """
    ends, rng = Ends(step), np.random.default_rng(3)
    updates = {site: vector(40, number) + 1 for number, site in enumerate(ends.names)}
    truth, total = np.mean(list(updates.values()), axis=0), np.zeros(40)
    for round in range(1, rounds + 1):
        chosen = rng.choice(ends.names, cohort, replace=False)
        total += ends.round({site: updates[site] for site in chosen}, round)
    return float(np.linalg.norm(total / rounds - truth) / np.linalg.norm(truth))


def published_bias(cohort: int, rounds: int = 400) -> float:
    """The same for the published rule: v = s + mean_k v_k; s <- s + gamma mean_k v_k, over those that take part."""
    rng, updates = np.random.default_rng(3), [vector(40, number) + 1 for number in range(6)]
    sites, mean = [Shift(40, 0.25) for _ in updates], np.zeros(40)
    truth, total = np.mean(updates, axis=0), np.zeros(40)
    for round in range(rounds):
        chosen = rng.choice(6, cohort, replace=False)
        before = [sites[k].reference.copy() for k in chosen]
        for k in chosen:
            sites[k].encode(updates[k], key(6 * round + k))
        moved = np.mean([sites[k].reference - s for k, s in zip(chosen, before, strict=True)], axis=0)  # gamma v
        total += mean + moved / sites[0].gamma
        mean += moved
    return float(np.linalg.norm(total / rounds - truth) / np.linalg.norm(truth))


def test_the_published_shift_drifts_with_half_cohorts_and_ours_does_not() -> None:
    assert bias(Dsc(kind="dsc", p=0.25), 6) < 0.1
    assert bias(Dsc(kind="dsc", p=0.25), 3) < 0.1
    assert bias(DscMean(kind="dsc-mean", p=0.25), 6) < 0.1
    assert published_bias(6) < 0.1
    assert published_bias(3) > 0.4


def test_ends_that_lost_track_go_back_to_a_common_reference_or_to_zero() -> None:
    """With p = 1 what is decoded is the update itself, whatever the reference, if both ends use the same one."""
    ends = Ends(Dsc(kind="dsc", p=1.0))
    updates = {site: vector(40, number) for number, site in enumerate(ends.names)}
    truth = np.mean(list(updates.values()), axis=0)
    first, decoder = ends.names[0], ends.decoders[0]

    def holds(round: int) -> None:
        assert np.allclose(ends.round(updates, round), truth, atol=1e-5)

    holds(1)
    ends.send(first, updates[first], 2)  # this attempt is never counted
    holds(3)
    before = {name: array.copy() for name, array in decoder.state().items()}
    holds(4)
    decoder.restore(before)  # one aggregator goes back a round
    holds(5)
    saved = dict(ends.sites[first].state())
    holds(6)
    holds(7)
    ends.sites[first].restore(saved)  # a site goes back two rounds: there is no common reference
    assert ends.send(first, updates[first], 8)[0][0] == 0
    holds(8)
    ends.sites[first].restore({})  # a site lost its disk
    holds(9)
    decoder.restore({})  # an aggregator did
    holds(10)


def test_a_damaged_reference_is_not_used() -> None:
    ends = Ends(Dsc(kind="dsc", p=1.0))
    updates = {site: vector(40, number) for number, site in enumerate(ends.names)}
    ends.round(updates, 1)
    site = ends.names[0]
    damaged = {name: array + np.float32(1) for name, array in ends.sites[site].state().items()}
    ends.sites[site].restore(damaged)
    assert [message[0] for message in ends.send(site, updates[site], 2)] == [0, 0]


def test_reference_files_that_are_damaged_or_of_another_run_or_round_are_not_used(tmp_path: Path) -> None:
    """A site's, on its disk: a damaged one is refused with what to do, others are not what the aggregators have."""
    ends, updates = Ends(Dsc(kind="dsc", p=1.0), sites=1), vector(40, 5)
    (site,) = ends.names
    seat = replace(ends.sites[site]._seat, state=tmp_path)
    parts = [part.copy() for part in ends.parts.split(updates)]

    def sent(run: str, round: int) -> list[int]:
        """After which rounds the references are that a restarted site builds on."""
        pipeline, at = Pipeline(seat), At(run, round, f"{run} {round}")
        pipeline.inward(vector(40), at, [decoder.held(site) for decoder in ends.decoders])
        messages = np.split(pipeline.outward(updates, at), np.cumsum(ends.sizes)[:-1])
        for decoder, message, part in zip(ends.decoders, messages, parts, strict=True):
            decoder.check(site, message)
            assert np.allclose(decoder.decode(message[None], [site], round)[0], part, atol=1e-5)
        return [int(message[0]) for message in messages]

    def file(run: str, round: int) -> Path:
        return tmp_path / "steps" / run / "compress" / f"round-{round:06d}.safetensors"

    count = len(ends.decoders)
    assert [sent("run", round) for round in (1, 2, 3)] == [[0] * count, [1] * count, [2] * count]
    # From the future: a later round's file is not read, and the last common one is used.
    shutil.copy(file("run", 3), file("run", 9))
    assert sent("run", 4) == [3] * count
    # Of another run: its digest is not the one that the aggregators name.
    other = Dsc(kind="dsc", p=1.0).start(seat)
    other.compare([b""] * count)
    other.outward(vector(40, 6), At("other", 4, "a"))
    Checkpoints(file("run", 4).parent).save(4, other.state())
    file("run", 9).unlink(missing_ok=True)
    assert sent("run", 5) == [0] * count
    assert sent("run", 6) == [5] * count
    # Truncated: refused, and nothing is sent or forgotten.
    whole, before = file("run", 6).read_bytes(), [dict(decoder.state()) for decoder in ends.decoders]
    file("run", 6).write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match="delete it to go back a round"):
        sent("run", 7)
    assert file("run", 6).read_bytes() == whole[:-7]
    now = [dict(decoder.state()) for decoder in ends.decoders]
    assert all(np.array_equal(b[name], n[name]) for b, n in zip(before, now, strict=True) for name in b)
    file("run", 6).unlink()
    assert sent("run", 7) == [0] * count  # the aggregators have gone on


def test_an_aggregator_s_damaged_file_is_refused_and_stays(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    for round in (1, 2):
        store.save("run", round, vector(9, round), {"decoder": {"site-0": vector(9)}})
    path = tmp_path / "run" / "round-000002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ProtocolError, match="delete it to go back a round"):
        store.load("run", 2)
    assert path.read_bytes() == whole[: len(whole) // 2]
    assert np.array_equal(store.load("run", 1)[0], vector(9, 1))
    with pytest.raises(ProtocolError, match="none after round 3"):
        store.load("run", 3)


def test_a_site_that_lost_its_state_cannot_continue_with_the_published_shift() -> None:
    ends = Ends(DscMean(kind="dsc-mean", p=0.5))
    updates = {site: vector(40, number) for number, site in enumerate(ends.names)}
    ends.round(updates, 1)
    ends.sites[ends.names[0]].restore({})
    with refused("DATA_LOSS"):
        ends.send(ends.names[0], updates[ends.names[0]], 2)


@pytest.mark.parametrize("kind", [Dsc, DscMean])
def test_messages_that_no_honest_site_sends_are_refused(kind: type[Dsc]) -> None:
    ends = Ends(kind(kind=kind.model_fields["kind"].default, p=0.5))
    updates = {site: vector(40, number) for number, site in enumerate(ends.names)}
    ends.round(updates, 1)
    site, decoder = ends.names[0], ends.decoders[0]
    message, before = ends.send(site, updates[site], 2)[0], {n: a.copy() for n, a in decoder.state().items()}
    for position, word in (
        (0, 7),
        (HEAD, np.float32(np.nan)),
        (HEAD + 1, np.float32(np.inf)),
        (HEAD, np.float32(1e35)),
    ):
        bad = message.copy()
        bad[position] = word if position == 0 else np.array([word], np.float32).view(np.uint32)[0]
        with pytest.raises(ProtocolError):
            decoder.check(site, bad)
    after = decoder.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_retry_shows_the_same_coordinates() -> None:
    ends = Ends(Dsc(kind="dsc", p=0.2))
    first, second = (ends.send(ends.names[0], vector(40, n), 1) for n in range(2))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one[1:HEAD], other[1:HEAD])
