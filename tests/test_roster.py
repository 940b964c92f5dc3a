"""The roster: who is in a federation, signed by its authority, and accepted by every site."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.files import write_public
from fl_privacy.identity import accepted, roster
from fl_privacy.identity.keyring import Identity, Keyring, accepted_roster
from fl_privacy.identity.pki import Authority, load_certificate
from fl_privacy.identity.roster import Member, Roster
from helpers import Keys, refused

NAMES = st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True)


def key(number: int) -> str:
    return f"sha256:{number:064x}"


def site(number: int, organisation: str = "") -> Member:
    return Member("site", f"site-{number}", key(number), organisation)


def made(*members: Member, serial: int = 1) -> Roster:
    return Roster.of("test", serial, members or [site(0), site(1, "trust"), site(2, "trust")])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("pki") / "ca")


@given(st.dictionaries(NAMES, NAMES, max_size=8), st.integers(1, 2**31 - 1))
def test_a_signed_roster_is_read_as_it_was_made(authority: Authority, sites: dict[str, str], serial: int) -> None:
    members = [Member("site", name, key(number), sites[name]) for number, name in enumerate(sites)]
    roster_made = Roster.of("test", serial, members)
    found = roster.load(roster.sign(roster_made, authority.key), authority.certificate)
    assert (found, found.digest) == (roster_made, roster_made.digest)


def test_it_knows_keys_and_organisations() -> None:
    found = made()
    assert found.key_of("site", "site-1") == key(1)
    assert found.key_of("server", "site-1") is None
    assert found.organisation_of("site-0") == "site-0"
    assert found.organisations(["site-0", "site-1", "site-2", "site-1"]) == 2
    with refused("FAILED_PRECONDITION"):
        found.organisations(["site-0", "site-9"])


def test_the_digest_depends_on_everything_and_not_on_the_order() -> None:
    one = made(site(0), site(1))
    others = [made(site(0)), made(site(0), site(1, "x")), made(site(0), site(1), serial=2), made(site(0), site(2))]
    others.append(Roster.of("else", 1, [site(0), site(1)]))
    assert one.digest == made(site(1), site(0)).digest
    assert len({one.digest, *(other.digest for other in others)}) == 1 + len(others)


GOOD = {"role": "site", "name": "a", "key": key(1), "organisation": "a"}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"federation": "Test"},
        {"federation": 3},
        {"serial": 0},
        {"serial": True},
        {"serial": 1.0},
        {"serial": 2**31},
        {"members": {}},
        {"members": [GOOD, GOOD]},
        {"members": [{**GOOD, "name": "b"}, GOOD]},
        {"members": [GOOD, {**GOOD, "name": "b"}]},
        {"members": [{**GOOD, "role": "janitor"}]},
        {"members": [{**GOOD, "name": "A"}]},
        {"members": [{**GOOD, "name": "a\n"}]},
        {"members": [{**GOOD, "key": "sha256:1"}]},
        {"members": [{**GOOD, "organisation": "a b"}]},
        {"members": [{**GOOD, "organisation": None}]},
        {"members": [{**GOOD, "role": []}]},
        {"members": [{**GOOD, "extra": ""}]},
        {"members": ["site"]},
        {"extra": 1},
    ],
)
def test_anything_but_a_well_formed_roster_is_refused(changes: dict[str, Any]) -> None:
    values = {"version": 1, "federation": "test", "serial": 1, "members": [GOOD]}
    assert roster.parse(json.dumps(values).encode()).serial == 1
    with pytest.raises(ValueError, match=r"\w"):
        roster.parse(json.dumps({**values, **changes}).encode())


def test_a_roster_that_the_authority_did_not_sign_is_refused(authority: Authority, tmp_path: Path) -> None:
    data = roster.sign(made(), authority.key)
    other = Authority.create(tmp_path / "other")
    values = json.loads(data)
    forged = [
        roster.sign(made(), other.key),
        data.replace(b'"serial": 1', b'"serial": 2'),
        data.replace(b"trust", b"trast"),
        roster.parse(made().canonical).canonical,
        json.dumps({**values, "signature": ""}).encode(),
        json.dumps({**values, "signature": 7}).encode(),
        b"[" * 100_000,
        b"\xff",
        data + b" " * roster.MAX_BYTES,
    ]
    for wrong in forged:
        with pytest.raises(ValueError, match=r"\w"):
            roster.load(wrong, authority.certificate)


def test_ten_thousand_sites_are_signed_and_read_in_no_time(authority: Authority) -> None:
    """And they fit: the longest names that are allowed."""
    long = "n" * 58
    members = [Member("site", f"{long}{n:05}", key(n), f"{long}{n:05}") for n in range(10_000)]
    began = time.process_time()
    data = roster.sign(Roster.of("test", 1, members), authority.key)
    found = roster.load(data, authority.certificate)
    assert found.organisations(member.name for member in members) == 10_000
    assert time.process_time() - began < 5  # a tenth of a second here; only a quadratic algorithm takes seconds
    assert len(data) < roster.MAX_BYTES


# The authority's next roster


def test_the_serial_grows_by_one_with_every_change_and_only_then(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    first = authority.enlist("test", [site(0)])
    assert (first.serial, authority.enlist("test", [site(0)])) == (1, first)
    assert authority.enlist("test", [site(1), site(0)]).serial == 2
    assert authority.enlist("test", [site(0)]).serial == 3
    assert authority.enlist("other", [site(0)]).serial == 1
    authority.roster_file("test").write_bytes(b"{}")
    with pytest.raises(LaunchError, match="restore it from a backup"):
        authority.enlist("test", [site(0)])


def test_an_older_roster_never_replaces_a_newer_one(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "keys" / "roster.json"
    old, new = (roster.sign(made(serial=serial), authority.key) for serial in (1, 2))
    assert roster.install(file, new, authority.certificate) == made(serial=2)
    assert roster.install(file, old, authority.certificate) is None
    assert roster.install(file, new, authority.certificate) == made(serial=2)
    with pytest.raises(LaunchError, match="same serial 2"):
        roster.install(file, roster.sign(made(site(5), serial=2), authority.key), authority.certificate)
    assert file.read_bytes() == new


# A party's keyring


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "pki")


def test_a_changed_roster_counts_at_once(keys: Keys, tmp_path: Path) -> None:
    own, caller = keys.of("shuffler", "shuffler"), keys.of("site", "site-0")
    certificate = load_certificate(caller.certificate_file)
    assert own.admit(certificate) == Identity("test", "site", "site-0")
    fresh = keys.enlist(keys.authority.issue(Identity("test", "site", "site-0"), tmp_path / "fresh"))
    with pytest.raises(ProtocolError, match="has another key than the roster's"):
        own.admit(certificate)
    assert own.admit(load_certificate(fresh.certificate_file)).name == "site-0"


def test_a_renewed_certificate_needs_no_new_roster(keys: Keys) -> None:
    own, caller = keys.of("shuffler", "shuffler"), keys.of("site", "site-0")
    assert own.admit(load_certificate(keys.renewed(caller).certificate_file)).name == "site-0"


def test_certificates_of_the_authority_outside_the_roster_are_refused(keys: Keys, tmp_path: Path) -> None:
    own = keys.of("shuffler", "shuffler")
    keys.of("site", "site-0")
    for number, (federation, role, name) in enumerate(
        [
            ("test", "site", "site-0"),
            ("test", "server", "site-0"),
            ("test", "site", "site-1"),
            ("else", "site", "site-0"),
        ]
    ):
        other = keys.authority.issue(Identity(federation, role, name), tmp_path / str(number))
        with refused("PERMISSION_DENIED"):
            own.admit(load_certificate(other.certificate_file))


def test_without_a_valid_roster_everybody_is_refused(keys: Keys, tmp_path: Path) -> None:
    own, caller = keys.of("shuffler", "shuffler"), load_certificate(keys.of("site", "site-0").certificate_file)
    real = keys.roster_file.read_bytes()
    foreign = Keys(tmp_path / "foreign")
    foreign.of("site", "site-0")
    own.roster_file.unlink()
    with pytest.raises(ProtocolError, match=r"roster\.json is missing; install"):
        own.admit(caller)
    for wrong in (b"", b"{}", b"\xff", real[:-9], foreign.roster_file.read_bytes()):
        write_public(own.roster_file, wrong)
        with pytest.raises(ProtocolError, match="cannot be verified"):
            own.admit(caller)
    write_public(own.roster_file, real)
    assert own.admit(caller).name == "site-0"


# Acceptance


def test_a_site_obeys_a_roster_only_once_it_is_accepted(keys: Keys, tmp_path: Path) -> None:
    state = tmp_path / "state"
    own = Keyring(keys.of("site", "site-0").folder, state)
    with pytest.raises(ProtocolError, match=r"serial 1 is not accepted at this site.*fl-privacy site accept"):
        accepted_roster(own, state)
    accepted.accept(Keyring(own.folder).roster(), state)
    assert accepted_roster(own, state) == own.roster() == Keyring(own.folder).roster()
    keys.of("site", "site-1")
    with pytest.raises(ProtocolError, match="serial 2 is not accepted"):
        own.roster()
    accepted.accept(Keyring(own.folder).roster(), state)
    assert own.roster().serial == 2
    with pytest.raises(LaunchError, match="--state"):
        accepted_roster(own, None)


def test_the_acceptance_of_a_kit_is_for_one_roster_and_that_of_an_engine_for_each(tmp_path: Path) -> None:
    one, two = made(serial=1), made(serial=2)
    accepted.accept(one, tmp_path)
    accepted.accept(two, tmp_path)
    assert [accepted.is_accepted(each, tmp_path) for each in (one, two)] == [False, True]
    accepted.accept_here(one, tmp_path)
    assert [accepted.is_accepted(each, tmp_path) for each in (one, two)] == [True, True]
    assert accepted.last(tmp_path) == two


def test_what_differs_is_listed() -> None:
    old = made(site(0), site(1), site(2), site(3))
    new = made(site(0), Member("site", "site-1", key(9)), site(2, "trust"), site(4, "trust"))
    assert list(accepted.changes(old, new)) == [
        f"~ site site-1: new key {key(9)}, was {key(1)}",
        "~ site site-2: of trust, was of site-2",
        "- site site-3 of site-3",
        f"+ site site-4 of trust, key {key(4)}",
    ]
    assert list(accepted.changes(new, new)) == []
