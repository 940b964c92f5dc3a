"""A ledger on a disk that fills up, loses files or is set back; and the policy's limit for a round."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.config import Federation
from fl_privacy.config.policy import Policy, PolicyError, open_ledger
from fl_privacy.deploy import ledgers
from fl_privacy.dp import ldp
from fl_privacy.dp.ledger import Charge, Ledger, LedgerError, compose
from fl_privacy.errors import FederationError
from fl_privacy.journal import LONGEST_LINE, beside
from sites import Idle

DELTA = 1e-5
CHARGE = Charge(10.0, "site", "replace")
CONFIG = "name: here\nsites: {count: 3, epsilon: 1}\nprivatise: {kind: ldp}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def opened(path: Path) -> Ledger:
    return Ledger(path, 10.0, DELTA, "site-0")


def charged(path: Path, *names: str) -> Ledger:
    ledger = opened(path)
    for name in names:
        assert ledger.charge(name, CHARGE)
    return ledger


# Writes


def test_a_write_in_several_pieces_is_one_charge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    charged(path, "a")
    monkeypatch.undo()
    assert opened(path).holds("a")


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file may become larger: the system writes what fits, then refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_charge_that_does_not_fit_on_the_disk_is_refused_and_leaves_nothing(path: Path) -> None:
    ledger, before = charged(path, "a"), path.read_bytes()
    with room(len(before) + 50), pytest.raises(LedgerError, match="nothing was sent"):
        ledger.charge("b", CHARGE)
    assert path.read_bytes() == before
    assert not ledger.holds("b")
    assert ledger.charge("b", CHARGE)


def test_a_charge_that_is_not_synced_is_refused_and_charged_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = charged(path, "a")

    def fails(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(LedgerError, match="nothing was sent"):
        ledger.charge("b", CHARGE)
    with pytest.raises(LedgerError, match="nothing was sent"):
        ledger.charge("a", CHARGE)
    monkeypatch.undo()
    assert ledger.charge("b", CHARGE)


def test_a_charge_too_long_to_be_read_again_is_refused(path: Path) -> None:
    ledger = charged(path, "a")
    with pytest.raises(LedgerError, match=f"use at most {LONGEST_LINE}"):
        ledger.charge("b" * LONGEST_LINE, CHARGE)
    assert opened(path).report()["charges"] == 1


def test_many_at_once_make_one_ledger_and_lose_no_charge(path: Path) -> None:
    threads = [threading.Thread(target=charged, args=(path, f"{i}-a", f"{i}-b")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened(path).report()["charges"] == 16
    assert sorted(file.name for file in path.parent.iterdir()) == ["ledger.jsonl", "ledger.jsonl.head"]


# Files that are not what they were


def copied(path: Path, names: str = "ledger.jsonl*") -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.parent.glob(names)}


@pytest.mark.parametrize("size", [0, 1, 40, -1])
def test_a_ledger_with_a_torn_first_line_is_refused_and_left_as_it_is(path: Path, size: int) -> None:
    opened(path)
    beside(path).unlink()
    path.write_bytes(path.read_bytes()[:size])
    before = copied(path)
    with pytest.raises(LedgerError, match=r"no complete first line; restore .* docs/privacy\.md"):
        opened(path)
    assert copied(path) == before


def test_a_deleted_ledger_is_refused_and_not_made_again(path: Path) -> None:
    ledger = charged(path, "a")
    path.unlink()
    for use in (lambda: ledger.charge("b", CHARGE), lambda: opened(path)):
        with pytest.raises(LedgerError, match=r"was here and is missing; restore .* docs/privacy\.md"):
            use()
    assert not path.exists()


def test_an_older_copy_is_refused_and_the_newest_accepted(path: Path) -> None:
    ledger = charged(path, "a")
    older = path.read_bytes()
    ledger.charge("b", CHARGE)
    newest = path.read_bytes()
    path.write_bytes(older)
    for use in (lambda: ledger.charge("c", CHARGE), lambda: opened(path)):
        with pytest.raises(LedgerError, match=r"has 1 entries, and ledger\.jsonl\.head has seen 2; restore"):
            use()
    path.write_bytes(newest)
    assert opened(path).charge("c", CHARGE)


@pytest.mark.parametrize("left", [1, 20, 100])
def test_a_charge_that_was_acknowledged_is_never_taken_for_a_torn_one(path: Path, left: int) -> None:
    charged(path, "a")
    cut = path.read_bytes()[:-left]
    path.write_bytes(cut)
    with pytest.raises(LedgerError, match="restore the newest copy"):
        opened(path)
    assert path.read_bytes() == cut


def test_another_ledger_of_the_same_site_is_refused(path: Path, tmp_path: Path) -> None:
    charged(path, "a")
    charged(tmp_path / "other", "a", "b")
    shutil.copy(tmp_path / "other", path)
    with pytest.raises(LedgerError, match=r"not the one that ledger\.jsonl\.head has seen"):
        opened(path)


def test_a_lost_note_is_written_again(path: Path) -> None:
    charged(path, "a")
    note = beside(path).read_bytes()
    beside(path).unlink()
    opened(path)
    assert beside(path).read_bytes() == note


def test_a_name_twice_is_damage(path: Path) -> None:
    """Composed as one charge, it would refund the other."""
    ledger = charged(path, "a")
    with ledger.held():
        ledger.append(ledger.entries[0])
    with pytest.raises(LedgerError, match="line 3 was changed or damaged"):
        opened(path)


def test_a_ledger_of_the_first_format_is_continued(path: Path) -> None:
    first = '{"entry": {"format": 1, "site": "site-0"}, "head": "%s"}\n'
    path.write_text(first % "0fea2ab1d8bc3fbdc5b29c8f7a1a2f16f8b1a8f1ad3d8f56ac2b3f7ad5a0ed5f")
    with pytest.raises(LedgerError, match="line 1 was changed"):
        opened(path)
    import hashlib

    fields = json.dumps({"format": 1, "site": "site-0"}, sort_keys=True)
    path.write_text(first % hashlib.sha256(fields.encode()).hexdigest())
    charged(path, "a")
    assert opened(path).holds("a")


def test_a_run_does_not_start_without_a_ledger_that_was_there(tmp_path: Path) -> None:
    made = Federation.parse(CONFIG)
    ledgers.check_unit(made, "site-0", tmp_path)
    assert not list(tmp_path.iterdir())
    open_ledger(made, "site-0", tmp_path)
    ledgers.check_unit(made, "site-0", tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="was here and is missing"):
        ledgers.check_unit(made, "site-0", tmp_path)
    assert ledgers.reports(made, {"site-0": tmp_path}) == []


# The policy's limit for a round


def ones(fit: Any = None) -> np.ndarray:
    return np.ones(50, np.float32)


def test_a_policy_of_half_an_epsilon_never_sends_ten(tmp_path: Path) -> None:
    """At its own large delta, a federation calls noise 0.5 that is 10 at the policy's delta."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("epsilon_per_round: 0.5\nepsilon: 20\ntasks: [digits]\n")
    sites = [{"name": name, "epsilon": 0.5, "policy": str(policy)} for name in "abc"]
    made = Federation.model_validate({"sites": sites, "privatise": {"kind": "ldp", "delta": 0.6}})
    assert compose([ldp.charge(0.5, 0.6)], DELTA) > 10
    Policy.load(policy).check(made, "a")
    with pytest.raises(PolicyError, match=r"epsilon 10\.\d+ per round at delta 1e-05 is more than the 0\.5 allowed"):
        Idle(made, "a", tmp_path / "a").prepare("run", 1, "attempt", ones)
    assert not (tmp_path / "a" / "ledger.jsonl").exists()


def test_an_update_that_cannot_be_kept_is_neither_charged_nor_sent(tmp_path: Path) -> None:
    site = Idle(Federation.parse(CONFIG), "site-0", tmp_path)
    with room(60), pytest.raises(FederationError, match="nothing was spent or sent"):
        site.prepare("run", 1, "attempt", ones)
    assert site.ledger.report()["charges"] == 0
    site.prepare("run", 1, "attempt", ones)
    assert site.ledger.report()["charges"] == 1
