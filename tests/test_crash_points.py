"""A site's files after a crash at every byte of every write and between any two file operations."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from client_app.outbox import Outbox, Parcel
from crashing import Crash, crashes, lay_out, moments, recorded
from fl_privacy.dp.ledger import Charge, Ledger, compose
from fl_privacy.dp.witness import Witnesses, statement
from fl_privacy.round.journal import Entry, Journal
from fl_privacy.round.sent import Sent
from fl_privacy.steps.base import At
from helpers import refused
from test_attempts import terms as attempt_of

DELTA = 1e-5
CHARGE = Charge(10.0, "site", "replace")
NAMES = ("a", "b")
NOTE = "state/ledger.jsonl.head"


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that stands for a disk after a crash need not survive another one."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def disks() -> Iterator[Path]:
    """In memory if possible: hundreds of disks are made."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def opened(folder: Path) -> Ledger:
    return Ledger(folder / "state" / "ledger.jsonl", 10.0, DELTA, "site-0")


def check_ledger(crash: Crash, folder: Path) -> None:
    """It can be read, has every acknowledged charge and at most the one in flight besides, and can be charged.

    After the first charge, it would also be missed if it were deleted.
    """
    ledger = opened(folder)
    assert not crash.acknowledged or NOTE in crash.tree
    held = [str(entry["name"]) for entry in ledger.entries]
    assert {*crash.acknowledged} <= {*held} <= {*NAMES[: len(crash.acknowledged) + 1]}
    assert ledger.spent() == compose([CHARGE] * len(held), DELTA)
    assert ledger.charge(NAMES[-1], CHARGE) == (NAMES[-1] not in held)
    assert {str(entry["name"]) for entry in opened(folder).entries} == {*held, NAMES[-1]}


def test_a_crash_anywhere_loses_no_acknowledged_charge_and_refunds_nothing(disks: Path) -> None:
    (disks / "run").mkdir()
    with recorded(disks / "run") as run:
        for name in NAMES:
            opened(disks / "run").charge(name, CHARGE)
            run.done(name)
    for count, crash in enumerate(crashes(run.events)):
        check_ledger(crash, lay_out(crash.tree, disks / str(count)))


def test_what_a_killed_process_left_is_synced_before_it_is_acknowledged(disks: Path) -> None:
    """First the process is killed, and another one acknowledges what it finds; then the power is cut."""
    (disks / "run").mkdir()
    with recorded(disks / "run") as run:
        opened(disks / "run").charge("a", CHARGE)
    for number, disk in enumerate(moments(run.events)):
        folder = lay_out(disk.killed(), disks / f"killed-{number}")
        for charged, name in enumerate(NAMES, start=1):
            with recorded(folder, disk) as again:
                opened(folder).charge(name, CHARGE)
            for event in again.events:
                disk.apply(event)
            for variant, tree in enumerate(disk.cut()):
                crash = Crash(NAMES[:charged], tree)
                check_ledger(crash, lay_out(tree, disks / f"cut-{number}-{charged}-{variant}"))


def test_a_crash_anywhere_leaves_the_last_update_or_the_next_one_to_resend(disks: Path) -> None:
    at = [At("run", round, "attempt") for round in (1, 2)]
    parcels = [
        Parcel(np.arange(3, dtype=np.float32), np.arange(4, dtype=np.uint64)),
        Parcel(np.ones(5, np.float32)),
    ]
    (disks / "run").mkdir()
    with recorded(disks / "run") as run:
        for place, parcel in zip(at, parcels, strict=True):
            Outbox(disks / "run").keep(place, parcel)
            run.done(str(place.round))
    for count, crash in enumerate(crashes(run.events)):
        outbox = Outbox(lay_out(crash.tree, disks / str(count)))
        found = [outbox.find(place) for place in at]
        for kept, parcel in zip(found, parcels, strict=True):
            assert kept is None or [part is not None and part.tobytes() for part in kept] == [
                part is not None and part.tobytes() for part in parcel
            ]
        assert any(found[max(0, len(crash.acknowledged) - 1) :]) or not crash.acknowledged
        outbox.keep(at[1], parcels[1])
        assert Outbox(disks / str(count)).find(at[1]) is not None


def test_a_crash_anywhere_leaves_a_witness_with_what_it_acknowledged(disks: Path) -> None:
    key, ledger = ec.generate_private_key(ec.SECP256R1()), opened(disks)
    said = []
    for name in NAMES:
        ledger.charge(name, CHARGE)
        said.append(statement(ledger, "here", "site-0", key))
    (disks / "run").mkdir()
    with recorded(disks / "run") as run:
        for found in said:
            Witnesses(disks / "run").take(found, key.public_key())
            run.done(str(found.entries))
    for count, crash in enumerate(crashes(run.events)):
        witnesses = Witnesses(lay_out(crash.tree, disks / str(count)))
        known = witnesses.newest("site-0", "site-0")
        assert known in said[max(0, len(crash.acknowledged) - 1) :] or not crash.acknowledged
        witnesses.take(said[-1], key.public_key())
        assert Witnesses(disks / str(count)).newest("site-0", "site-0") == said[-1]


def test_a_crash_anywhere_leaves_what_a_site_sent(disks: Path) -> None:
    """Otherwise it would send its update for the same model to a second cohort."""
    (disks / "run").mkdir()
    sent = [attempt_of(model=bytes([number])) for number in (1, 2)]
    with recorded(disks / "run") as run:
        for terms in sent:
            Sent(disks / "run").keep(terms)
            run.done(terms.name)
    for count, crash in enumerate(crashes(run.events)):
        after = Sent(lay_out(crash.tree, disks / str(count)))
        for terms in sent[: len(crash.acknowledged)]:
            with refused("PERMISSION_DENIED"):
                after.check(dataclasses.replace(terms, root=b"other"), frozenset())
        after.keep(sent[-1])


def test_a_crash_anywhere_leaves_what_a_middleware_released(disks: Path) -> None:
    (disks / "run").mkdir()
    with recorded(disks / "run") as run:
        for round, name in enumerate(NAMES, start=1):
            journal = Journal(disks / "run" / "state")
            journal.open(Entry("run", round, name, f"model {name}", False))
            journal.release(name, "abc", b"", [], ())
            run.done(name)
    for count, crash in enumerate(crashes(run.events)):
        after = Journal(lay_out(crash.tree, disks / str(count)) / "state")
        for round, name in enumerate(crash.acknowledged, start=1):
            assert after.released(name) == b""
            after.open(Entry("run", round, f"again {name}", f"model {name}", False))
            with refused("FAILED_PRECONDITION"):
                after.release(f"again {name}", "abd", b"", [], ())
