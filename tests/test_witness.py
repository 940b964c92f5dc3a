"""The rollback witness: what it keeps, what it refuses, and how a site finds that its ledger was set back."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.dp import witness
from fl_privacy.dp.ledger import Charge, Ledger, LedgerError
from fl_privacy.dp.witness import Statement, Witnesses, check, statement
from fl_privacy.errors import FederationError, ProtocolError

CHARGE = Charge(10.0, "site", "replace")
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
PUBLIC = KEY.public_key()


def opened(folder: Path) -> Ledger:
    return Ledger(folder / "ledger.jsonl", 10.0, 1e-5, "site-0")


def charged(folder: Path, *names: str) -> Ledger:
    ledger = opened(folder)
    for name in names:
        ledger.charge(name, CHARGE)
    return ledger


def said(ledger: Ledger, key: ec.EllipticCurvePrivateKey = KEY) -> Statement:
    return statement(ledger, "here", "site-0", key)


def test_a_statement_reads_back_as_written_and_holds_under_the_key_alone(tmp_path: Path) -> None:
    made = said(charged(tmp_path, "a"))
    assert Statement.decode(made.encode()) == made
    assert len(made.encode()) < witness.LONGEST
    assert made.is_signed_by(PUBLIC)
    assert not made.is_signed_by(OTHER.public_key())
    for change in ({"entries": 2}, {"site": "site-1"}, {"federation": "there"}, {"ledger": "b"}, {"signature": "?"}):
        assert not made.model_copy(update=change).is_signed_by(PUBLIC)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"{" * 2000])
def test_a_malformed_statement_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="statement of a ledger"):
        Statement.decode(data)


def test_the_newest_statement_is_kept_and_survives_a_restart(tmp_path: Path) -> None:
    ledger, witnesses = opened(tmp_path), Witnesses(tmp_path / "middleware")
    assert witnesses.newest("site-0", "site-0") is None
    for name in "abc":
        ledger.charge(name, CHARGE)
        newest = said(ledger)
        witnesses.take(newest, PUBLIC)
        witnesses.take(newest, PUBLIC)
    for found in (witnesses, Witnesses(tmp_path / "middleware")):
        assert found.newest("site-0", "site-0") == newest
        assert found.newest("site-1", "site-0") is None
    assert (newest.entries, newest.head) == ledger.head


def test_a_statement_with_another_signature_or_fewer_entries_is_refused(tmp_path: Path) -> None:
    ledger, witnesses = charged(tmp_path, "a"), Witnesses(tmp_path / "middleware")
    older = said(ledger)
    ledger.charge("b", CHARGE)
    newest = said(ledger)
    witnesses.take(newest, PUBLIC)
    with pytest.raises(ProtocolError, match="signature is wrong"):
        witnesses.take(said(charged(tmp_path, "c"), OTHER), PUBLIC)
    with pytest.raises(ProtocolError, match="1 entries, and 2 were seen"):
        witnesses.take(older, PUBLIC)
    forked = said(charged(tmp_path / "copy", "a", "b"))
    with pytest.raises(ProtocolError, match="2 entries, and 2 were seen"):
        witnesses.take(forked, PUBLIC)
    assert Witnesses(tmp_path / "middleware").newest("site-0", "site-0") == newest


def test_a_site_cannot_fill_the_witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "SLACK", 2048)
    ledger, witnesses = opened(tmp_path), Witnesses(tmp_path / "middleware")
    for round in range(20):
        ledger.charge(str(round), CHARGE)
        witnesses.take(said(ledger), PUBLIC)
    assert (tmp_path / "middleware" / "witness.jsonl").stat().st_size < 2048 + 2 * witness.LONGEST
    assert Witnesses(tmp_path / "middleware").newest("site-0", "site-0") == said_like(witnesses)
    for number in range(witness.MOST - 1):
        witnesses.take(said(Ledger(tmp_path / str(number), 10.0, 1e-5, f"data-{number}")), PUBLIC)
    with pytest.raises(ProtocolError, match=f"has {witness.MOST} others"):
        witnesses.take(said(Ledger(tmp_path / "more", 10.0, 1e-5, "more")), PUBLIC)


def said_like(witnesses: Witnesses) -> Statement | None:
    return witnesses.newest("site-0", "site-0")


def test_a_damaged_store_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    Witnesses(tmp_path).take(said(charged(tmp_path / "site", "a")), PUBLIC)
    (tmp_path / "witness.jsonl").write_bytes(b"{}\n")
    with pytest.raises(FederationError, match=r"witness\.jsonl: cannot be read; restore it"):
        Witnesses(tmp_path)


# At the site


def test_a_ledger_that_is_ahead_of_its_witness_is_fine(tmp_path: Path) -> None:
    """The site was killed between a charge and its report."""
    ledger = charged(tmp_path, "a")
    known = said(ledger)
    ledger.charge("b", CHARGE)
    for found in (None, known, said(ledger)):
        check(opened(tmp_path), found, PUBLIC)


def test_a_site_s_folder_that_was_set_back_as_a_whole_is_noticed(tmp_path: Path) -> None:
    ledger = charged(tmp_path / "site", "a")
    older = {file: file.read_bytes() for file in (tmp_path / "site").iterdir()}
    ledger.charge("b", CHARGE)
    known = said(ledger)
    for file, content in older.items():
        file.write_bytes(content)
    with pytest.raises(LedgerError, match=r"has 1 entries, and the middleware has seen 2; restore .* docs/privacy"):
        check(opened(tmp_path / "site"), known, PUBLIC)


def test_a_site_s_folder_that_was_deleted_is_noticed(tmp_path: Path) -> None:
    known = said(charged(tmp_path / "site", "a"))
    with pytest.raises(LedgerError, match="has 0 entries, and the middleware has seen 1"):
        check(opened(tmp_path / "again"), known, PUBLIC)
    with pytest.raises(LedgerError, match="is not the one that the middleware has seen"):
        check(charged(tmp_path / "again", "b", "c"), known, PUBLIC)


def test_a_head_that_the_site_never_signed_is_said_to_be_doubtful(tmp_path: Path) -> None:
    """Nothing is sent, but the operator learns that the middleware may be wrong."""
    ledger = charged(tmp_path, "a")
    invented = said(ledger, OTHER).model_copy(update={"entries": 7})
    with pytest.raises(LedgerError, match="present key did not sign that"):
        check(ledger, invented, PUBLIC)
    check(ledger, said(ledger, OTHER), PUBLIC)  # the key was renewed, and the head is ours
    with pytest.raises(LedgerError, match="answered for the ledger 'other'"):
        check(ledger, said(Ledger(tmp_path / "x", 10.0, 1e-5, "other")), PUBLIC)


def test_a_witness_sees_charges_of_other_processes_too(tmp_path: Path) -> None:
    """A site may run twice in a simulation: what one process reported, the other finds on the disk."""
    first, second = opened(tmp_path), opened(tmp_path)
    first.charge("a", CHARGE)
    check(second, said(first), PUBLIC)
