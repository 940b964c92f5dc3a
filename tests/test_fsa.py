"""Federated shard aggregation is federated averaging (ERIS, 3.2), and a shard that was not agreed on is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.combine.rules import Combiner
from fl_privacy.config import Federation
from fl_privacy.ops.metrics import OFF
from fl_privacy.round.member import Answer, Member
from fl_privacy.round.sent import Sent
from fl_privacy.routes.ends import ServerSeat, SiteSeat
from fl_privacy.shard import masks
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import digest
from helpers import CALL, NONCE, Array, Deployment, Keys, deploy
from profiles import examples
from residents import LAYOUT, D, Guest, Uninvited, averaged, initial
from server_app.asking import Asking

RULES = ("fedavg", "fedprox", "fedadam", "fedyogi", "median", "trimmed-mean")
U32, U64 = 2.0**-24, 2.0**-53  # unit roundoff


@given(data=st.data(), d=st.integers(1, 300), clients=st.integers(3, 12), seed=st.integers(0, 2**32))
@examples(25)
def test_joined_shards_are_the_model_of_one_server_for_any_number_of_aggregators(
    data: Any, d: int, clients: int, seed: int
) -> None:
    """Bit for bit in the same order of summation; in other orders, and to the mean itself, within rounding."""
    aggregators = data.draw(st.integers(1, d))
    random = np.random.default_rng(seed)
    model, rows = random.normal(size=d).astype(np.float32), random.normal(size=(clients, d)).astype(np.float32)
    owners = masks.owners(d, aggregators, seed)

    def sharded(orders: Sequence[Array], **config: Any) -> Array:
        federation, made = Federation.model_validate({"sites": clients, **config}), []
        for a in range(aggregators):
            mine = owners == a
            made.append(Combiner(federation).step(model[mine], np.ascontiguousarray(rows[orders[a]][:, mine])))
        return masks.join(made, owners)

    same = [np.arange(clients)] * aggregators
    mixed = [random.permutation(clients) for _ in range(aggregators)]
    for kind in RULES:
        config: dict[str, Any] = {"combine": {"kind": kind}}
        whole = Combiner(Federation.model_validate({"sites": clients, **config})).step(model, rows)
        assert sharded(same, **config).tobytes() == whole.tobytes()
        exact = {**config, "reproducible": True}
        assert sharded(mixed, **exact).tobytes() == sharded(same, **exact).tobytes()
    # A mean is off by at most (K + 1) u64 of the sizes that it adds, and is rounded twice: as a mean, and as a model.
    mean, sizes = rows.astype(np.float64).mean(0), np.abs(rows.astype(np.float64)).sum(0) / clients
    exactly = model + mean
    bound = (clients + 2) * U64 * sizes + U32 * (np.abs(mean) + np.abs(exactly)) * (1 + 4 * U32) + 2 * U64
    for orders in (same, mixed):
        assert np.all(np.abs(sharded(orders) - exactly) <= bound)


# Aggregators that lie to one site

CONFIG = Federation.model_validate(
    {"name": "test", "sites": 4, "rounds": 9, "quorum": 3, "deadline": 10.0, "reproducible": True}
    | {"evaluate": "sites", "route": {"kind": "shards", "aggregators": 2, "n_min": 3}}
)


@pytest.fixture(scope="module")
def aggregators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Deployment]]:
    folder = tmp_path_factory.mktemp("aggregators")
    keys = Keys(folder / "pki")
    for name in CONFIG.site_names:
        keys.of("site", name)
    for role, name in (("server", "server"), ("evaluator", "evaluator"), *CONFIG.route.parties()):
        keys.of(role, name)
    made = [deploy(folder / str(k), keys, CONFIG, "aggregator", k) for k in range(2)]
    yield made
    for one in made:
        one.stop()


class Invited(Guest):
    """A site of aggregators that are processes of their own."""

    way: type[Member] = Member
    addresses: Sequence[str] = ()

    def end(self) -> Any:
        self.state.mkdir(parents=True, exist_ok=True)
        seat = SiteSeat(
            federation=CONFIG,
            layout=LAYOUT,
            keys=self.keys.of("site", self.name),
            middleware=list(self.addresses),
            site=self.name,
            tier="",
            floor=lambda: 2,
            sent=Sent(self.state),
            metrics=OFF,
            state=self.state,
            log=self.log,
        )
        return self.way(seat, CONFIG.route.cut(CONFIG, D))  # type: ignore[attr-defined]


class Lied(Member):
    """In round 2 the second aggregator gives it something else than its shard of the model."""

    lie: ClassVar[str]
    before: Array

    def _fetch(self, index: int, run: str, seen: pb.RoundHeader) -> Answer:
        answer = super()._fetch(index, run, seen)
        model, header = answer.model, answer.header
        if index != 1 or model is None:
            return answer
        if header.round == 1:
            self.before = model.copy()
        if header.round != 2:
            return answer
        given = {
            "another": lambda: model + np.float32(1),
            "of the round before": lambda: self.before,
            "longer": lambda: np.append(model, np.float32(0)),
        }[self.lie]()
        made = pb.RoundHeader()
        made.CopyFrom(header)
        made.digest, made.length = digest(given), given.size
        return Answer(made, given)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("another", "model: another one than this party has"),
        ("of the round before", "model: another one than this party has"),
        ("longer", "left: .*shard 1"),
    ],
)
def test_a_site_sends_nothing_on_a_shard_that_is_not_the_agreed_one(
    aggregators: list[Deployment], tmp_path: Path, lie: str, reason: str
) -> None:
    """The others go on, and the model and what every aggregator keeps are those of the others' updates."""
    run, keys, addresses = f"lie-{lie.replace(' ', '-')}", aggregators[0].keys, [one.address for one in aggregators]
    Lied.lie = lie
    guests = [Invited(CONFIG, keys, "", name, tmp_path / name) for name in CONFIG.site_names]
    for guest in guests:
        guest.addresses = addresses
    guests[3].way = Lied
    parts = CONFIG.route.parts(CONFIG, D).split(initial())  # type: ignore[attr-defined]
    for one, shard in zip(aggregators, parts, strict=True):
        client.seed(one.party("evaluator", "evaluator").stub, run, 0, shard.copy(), CALL)
    threads = [threading.Thread(target=guest.stay, args=(run,), daemon=True) for guest in guests]
    server = CONFIG.route.server(ServerSeat(CONFIG, LAYOUT, keys.of("server", "server"), addresses, Uninvited()))
    asking = Asking(CONFIG, LAYOUT, keys.of("server", "server"), run, NONCE, tmp_path)
    for thread in threads:
        thread.start()
    counts = []
    for round in (1, 2):
        model = server.digest(run, round - 1, None)
        counts.append(server.play(asking.make(round, list(CONFIG.site_names), 1, {}, model), None).count)
    stubs = [one.party("evaluator", "evaluator").stub for one in aggregators]
    left = [client.fetch(stub, pb.FetchRequest(run=run, newest=True), CALL)[1] for stub in stubs]
    server.finish(run)
    for thread in threads:
        thread.join(20)
    assert counts == [4, 3]
    (problem,) = guests[3].problems
    assert re.match(reason, problem), problem
    one = averaged(initial(), CONFIG.site_names, 1, CONFIG)
    parts = CONFIG.route.parts(CONFIG, D).split(averaged(one, CONFIG.site_names[:3], 2, CONFIG))  # type: ignore[attr-defined]
    assert all(np.array_equal(found, part) for found, part in zip(left, parts, strict=True))
