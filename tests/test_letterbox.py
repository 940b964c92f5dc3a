"""The mailbox process of `route: {kind: server}`: sites agree over it, also if it is killed; it is closed to others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boards import FAST, House
from fl_privacy.config import Federation
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.roster import Roster
from fl_privacy.round.agreeing import Agreeing
from fl_privacy.round.mailbox import LARGEST
from fl_privacy.round.noticeboard import run_of
from fl_privacy.wire import federation_pb2 as pb, rpc
from helpers import CALL, Deployment, deploy, eventually, kill, open_round, round_header, status

NAMES = tuple(f"site-{index}" for index in range(4))


def federation() -> Federation:
    values: dict[str, Any] = {"name": "test", "sites": 4, "task": {"dataset": "digits"}, "evaluate": "sites"}
    return Federation.model_validate(
        {**values, "permute": {"kind": "tazza"}, "route": {"kind": "server", "mailbox": True}}
    )


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(tmp_path)
    for party in (("server", "server"), ("mailbox", "mailbox")):
        made.keys.of(*party)
    made.accept()
    return made


@pytest.fixture
def mailbox(house: House) -> Iterator[Deployment]:
    made = deploy(house.folder / "m", house.keys, federation(), "mailbox")
    yield made
    made.stop()


def roster_of(house: House) -> Roster:
    return Keyring(house.keys.of("server", "server").folder).roster()


def start(house: House, mailbox: Deployment, *names: str) -> None:
    """Sites that dial the process, as workers do."""
    for name in names:

        def log(event: str, _name: str = name, **fields: Any) -> None:
            house.logs.append((_name, event, fields))

        keys = Keyring(house.keys.of("site", name).folder, house.state(name))

        def dial(keys: Keyring = keys) -> rpc.Stub:
            return rpc.middleware(rpc.channel(mailbox.address, keys, mailbox.identity))

        house.sites[name] = Agreeing("test", name, keys, house.state(name), dial, house.wait, log, FAST).start()


def test_sites_agree_over_the_process_although_it_is_killed_in_between(
    house: House, mailbox: Deployment, tmp_path: Path
) -> None:
    start(house, mailbox, "site-0", "site-1")
    eventually(lambda: all(site._part is not None and site._begun > 3 for site in house.sites.values()))
    kill(mailbox)
    again = deploy(tmp_path / "m", house.keys, federation(), "mailbox", options=("--listen", mailbox.address))
    try:
        start(house, again, "site-2", "site-3")
        secrets = {site.agreed().secret for site in house.sites.values()}
        assert len(secrets) == 1
        house.stop()
        (secret,) = secrets
        kept = b"".join(path.read_bytes() for path in (tmp_path / "m").rglob("*") if path.is_file())
        assert secret not in kept
        assert secret.hex().encode() not in kept
    finally:
        house.stop()
        again.stop()


def test_only_sites_use_it_and_only_under_the_roster_in_force(house: House, mailbox: Deployment) -> None:
    site, run = mailbox.site(0), run_of(roster_of(house).digest)
    letter = {"topic": "card", "content": b"x"}
    site.post(pb.Letter(run=run, **letter), timeout=CALL)
    assert [one.sender for one in mailbox.site(1).pickup(pb.PickupRequest(run=run, topic="card")).letters] == ["site-0"]
    wrong = {
        "of the server": (mailbox.server.post, pb.Letter(run=run, **letter), "PERMISSION_DENIED"),
        "of another roster": (site.post, pb.Letter(run=run_of("ab" * 32), **letter), "NOT_FOUND"),
        "of a run": (site.post, pb.Letter(run="run-1", **letter), "NOT_FOUND"),
        "read by the server": (mailbox.server.pickup, pb.PickupRequest(run=run, topic="card"), "PERMISSION_DENIED"),
        "too long": (site.post, pb.Letter(run=run, topic="card", content=bytes(LARGEST + 1)), "INVALID_ARGUMENT"),
    }
    for name, (call, request, code) in wrong.items():
        assert status(call, request, timeout=CALL) == code, name
    header = round_header("run-1", 1, 10)
    assert status(open_round, mailbox.server, header, np.zeros(10, np.float32)) == "UNIMPLEMENTED"


class Sites:
    """Sites that are processes of their own."""

    def __init__(self, house: House, mailbox: Deployment) -> None:
        self._house, self._mailbox, self._folder = house, mailbox, house.folder / "out"
        self._folder.mkdir()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, faces: int = 1) -> None:
        script, keys = Path(__file__).parent / "agreeing_site.py", self._house.keys.of("site", name).folder
        command = [sys.executable, str(script), str(keys), str(self._house.state(name)), self._mailbox.address, name]
        with (self._folder / name).open("ab") as out:
            self.running[name] = subprocess.Popen([*command, str(faces)], stdout=out)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lives(self, name: str) -> int:
        return sum(line["event"] == "started" for line in self.lines(name))

    def digest(self, name: str) -> str:
        return next((line["digest"] for line in reversed(self.lines(name)) if line["event"] == "secret"), "")


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_real_processes_agree_though_one_is_killed_again_and_again_and_one_contradicts_itself(
    house: House, mailbox: Deployment
) -> None:
    sites = Sites(house, mailbox)
    try:
        sites.start("site-3", faces=2)
        for name in NAMES[:3]:
            sites.start(name)
        for life, pause in enumerate((0.3, 0.6, 0.1), start=1):  # amid whatever it does then, after it began
            eventually(lambda life=life: sites.lives("site-0") >= life, 120.0)  # type: ignore[misc]
            time.sleep(pause)
            sites.kill("site-0")
            sites.start("site-0")
        eventually(lambda: all(sites.digest(name) for name in NAMES[:3]), 120.0)
        assert len({sites.digest(name) for name in NAMES[:3]}) == 1
        caught = {line["site"] for name in NAMES[:3] for line in sites.lines(name) if line["event"] == "equivocated"}
        assert caught <= {"site-3"}
    finally:
        for name in list(sites.running):
            sites.kill(name)
