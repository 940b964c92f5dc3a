"""How a roster gets from the authority to the parties: signed files bring it, sites accept it, preflight checks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enrolling import make_kit
from fl_privacy.cli import app
from fl_privacy.config import Federation
from fl_privacy.deploy import rosters
from fl_privacy.deploy.kits import enrol
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.deploy.kits.serve import check_own
from fl_privacy.errors import FederationError, LaunchError
from fl_privacy.identity import accepted
from fl_privacy.identity.anchor import Anchor
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import Authority
from helpers import HOSTS
from kits import failures, federation, signed_site

FEDERATION = Federation.parse("name: test\nsites: 3")  # as in the kits of `make_kit`
PARTIES = {"superlink": "superlink", "server": "server", "shuffler": "shuffler", "site-0": "site", "site-1": "site"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority", "test")


@pytest.fixture
def kits(tmp_path: Path) -> dict[str, Path]:
    """Everybody but site-2."""
    listening = ("superlink", "shuffler")
    return {
        name: make_kit(tmp_path / "kits", role, name, hosts=HOSTS if name in listening else ())
        for name, role in PARTIES.items()
    }


def join(authority: Authority, kits: dict[str, Path], *names: str) -> None:
    """Request, sign with the next roster and install."""
    made = enrol.sign(authority, [enrol.request(kits[name])[0] for name in names], federation=FEDERATION)
    for name, one in zip(names, made, strict=True):
        enrol.install(kits[name], Path(one["file"]))


def serial(kit: Path) -> int:
    return Keyring(kit / "keys").roster().serial


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    app([*map(str, words), "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_signed_files_bring_the_roster_that_has_their_keys(authority: Authority, kits: dict[str, Path]) -> None:
    join(authority, kits, *kits)
    found = {Keyring(kit / "keys").roster() for kit in kits.values()}
    assert len(found) == 1
    assert {member.party for member in found.pop().members} == {(role, name) for name, role in PARTIES.items()}


def test_a_join_is_one_file_for_everybody_else(authority: Authority, kits: dict[str, Path], tmp_path: Path) -> None:
    join(authority, kits, "shuffler", "site-0")
    before = authority.roster_file("test").read_bytes()
    join(authority, kits, "site-1")
    assert [serial(kits[name]) for name in ("shuffler", "site-0", "site-1")] == [1, 1, 2]
    found = enrol.install(kits["shuffler"], authority.roster_file("test"))
    assert (found["installed"], found["serial"], serial(kits["shuffler"])) == ("roster", 2, 2)
    (tmp_path / "old").write_bytes(before)
    with pytest.raises(LaunchError, match="older than the one in place"):
        enrol.install(kits["shuffler"], tmp_path / "old")
    assert serial(kits["shuffler"]) == 2


def test_a_roster_has_the_newest_key_that_is_not_revoked(authority: Authority, kits: dict[str, Path]) -> None:
    join(authority, kits, "shuffler", "site-0", "site-1")
    first = authority.roster("test")
    assert first is not None
    [made] = enrol.sign(authority, [enrol.renew(kits["site-0"], new_key=True)[0]], federation=FEDERATION)
    second = authority.roster("test")
    assert second is not None
    assert first.key_of("site", "site-0") != second.key_of("site", "site-0") == made["key"]
    assert first.key_of("site", "site-1") == second.key_of("site", "site-1")
    authority.revoke("fl-privacy://test/site/site-1")
    found = rosters.make(FEDERATION, authority)
    assert found["changes"] == ["- site site-1 of site-1"]
    assert found["missing"] == ["superlink superlink", "server server", "site site-1", "site site-2"]


def test_a_renewal_changes_no_roster(authority: Authority, kits: dict[str, Path]) -> None:
    join(authority, kits, "shuffler", "site-0")
    enrol.sign(authority, [enrol.renew(kits["site-0"])[0]], federation=FEDERATION)
    assert rosters.make(FEDERATION, authority)["serial"] == 1


def test_organisations_come_from_the_config(authority: Authority, kits: dict[str, Path]) -> None:
    join(authority, kits, "site-0", "site-1")
    sites = [{"name": "site-0", "organisation": "trust"}, {"name": "site-1", "organisation": "trust"}, {"name": "x"}]
    changed = Federation.model_validate({"name": "test", "sites": sites})
    assert changed.digest != Federation.parse("name: test\nsites: [{name: site-0}, {name: site-1}, {name: x}]").digest
    rosters.make(changed, authority)
    found = authority.roster("test")
    assert found is not None
    assert found.organisations(["site-0", "site-1"]) == 1


def test_an_organisation_that_is_the_site_itself_changes_no_digest() -> None:
    one, two = "sites: [{name: a}, {name: b}, {name: c}]", "sites: [{name: a, organisation: a}, {name: b}, {name: c}]"
    assert Federation.parse(one).digest == Federation.parse(two).digest


def test_rosters_of_others_are_not_installed(authority: Authority, kits: dict[str, Path], tmp_path: Path) -> None:
    join(authority, kits, "shuffler")
    other = Authority.create(tmp_path / "other")
    other.enlist("test", [])
    loose = Authority.open(authority.folder)
    loose.enlist("elsewhere", [], tmp_path / "elsewhere.json")
    for file, reason in ((other.roster_file("test"), "not signed by"), (tmp_path / "elsewhere.json", "'elsewhere'")):
        with pytest.raises(LaunchError, match=reason):
            enrol.install(kits["shuffler"], file)
    with pytest.raises(LaunchError, match="no authority yet"):
        enrol.install(kits["site-0"], authority.roster_file("test"))
    with pytest.raises(LaunchError, match="this authority is for 'test'"):
        rosters.make(Federation.parse("name: elsewhere\nsites: 3"), authority)
    with pytest.raises(LaunchError, match="of federation 'test', not 'elsewhere'"):
        enrol.sign(
            authority, [enrol.request(kits["site-0"])[0]], federation=Federation.parse("name: elsewhere\nsites: 3")
        )


def test_a_kit_without_a_usable_roster_does_not_start(authority: Authority, kits: dict[str, Path]) -> None:
    [made] = enrol.sign(authority, [enrol.request(kits["shuffler"])[0]])
    enrol.install(kits["shuffler"], Path(made["file"]))
    with pytest.raises(FederationError, match=r"roster\.json is missing"):
        check_own(Folder.open(kits["shuffler"]))
    authority.enlist("test", [])
    enrol.install(kits["shuffler"], authority.roster_file("test"))
    with pytest.raises(FederationError, match=r"is not in the roster \(serial 1\)"):
        check_own(Folder.open(kits["shuffler"]))
    rosters.make(FEDERATION, authority)
    enrol.install(kits["shuffler"], authority.roster_file("test"))
    check_own(Folder.open(kits["shuffler"]))


# A site accepts


def test_the_operator_of_a_site_sees_who_takes_part_before_accepting(
    authority: Authority, kits: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    join(authority, kits, "shuffler", "site-0")
    words = ["site", "accept", str(kits["site-0"])]
    monkeypatch.setattr("typer.confirm", lambda question: False)
    with pytest.raises(FederationError, match="not accepted; nothing was changed"):
        app(words, standalone_mode=False)
    said = capsys.readouterr().out
    assert "1 sites of 1 organisations" in said
    assert "shuffler shuffler, key sha256:" in said
    with pytest.raises(FederationError, match="not accepted"):
        app([*words, "--json"], standalone_mode=False)
    with pytest.raises(FederationError, match="not accepted at this site"):
        check_own(Folder.open(kits["site-0"]))
    monkeypatch.setattr("typer.confirm", lambda question: True)
    app(words, standalone_mode=False)
    check_own(Folder.open(kits["site-0"]))


def test_a_join_counts_at_a_site_once_its_operator_accepted_it(
    authority: Authority, kits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    join(authority, kits, "shuffler", "site-0")
    site = Folder.open(kits["site-0"])
    assert run(capsys, "site", "accept", site.path, "--yes")["accepted"]
    join(authority, kits, "site-1")
    found = run(capsys, "pki", "install", site.path, authority.roster_file("test"))
    assert (found["installed"], found["accept"]) == ("roster", 2)
    with pytest.raises(FederationError, match="serial 2 is not accepted"):
        site.keys.roster()
    found = run(capsys, "site", "accept", site.path, "--yes")
    [joined] = found["changes"]
    assert joined.startswith("+ site site-1 of site-1, key sha256:")
    assert site.keys.roster().key_of("site", "site-1")
    assert "accept" not in run(capsys, "pki", "install", site.path, authority.roster_file("test"))


def test_only_a_site_accepts_rosters(authority: Authority, kits: dict[str, Path]) -> None:
    join(authority, kits, "shuffler")
    with pytest.raises(FederationError, match="only a site accepts rosters"):
        app(["site", "accept", str(kits["shuffler"]), "--yes"], standalone_mode=False)


def test_the_roster_command_writes_a_file_to_send(
    authority: Authority, kits: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    join(authority, kits, "shuffler", "site-0")
    config = tmp_path / "test.yaml"
    config.write_text(FEDERATION.to_yaml())
    found = run(capsys, "pki", "roster", authority.folder, config, "--out", tmp_path)
    assert (found["serial"], found["file"], found["changes"]) == (1, str(tmp_path / "roster.json"), [])
    assert "site site-1" in found["missing"]
    assert enrol.install(kits["shuffler"], tmp_path / "roster.json")["digest"] == found["digest"]


# Kits


def test_kits_signed_on_one_machine_have_an_accepted_roster(tmp_path: Path) -> None:
    """Provisioning again without a change keeps it; a join makes the next one."""
    authority, out = Authority.open(tmp_path / "ca"), tmp_path / "kits"
    site = signed_site(tmp_path, authority)
    assert Folder.open(site).keys.roster().serial == 1
    assert failures(site) == {}
    provision(federation(3), out, authority, sign=True)
    assert Folder.open(site).keys.roster().serial == 1
    provision(federation(4), out, authority, sign=True)
    assert {Folder.open(kit).keys.roster().serial for kit in out.iterdir()} == {2}


def test_kits_provisioned_later_have_the_newest_roster(tmp_path: Path) -> None:
    """Also from the public half of the authority's folder; they are not accepted for anybody."""
    authority = Authority.open(tmp_path / "ca")
    signed_site(tmp_path, authority)
    provision(federation(3), tmp_path / "later", Anchor.read(authority.folder))
    site = Folder.open(tmp_path / "later" / "site-0")
    assert serial(site.path) == 1
    assert accepted.last(site.state) is None


def without(kit: Path) -> None:
    (kit / "keys" / "roster.json").unlink()


def unlisted(kit: Path) -> None:
    Authority.open(kit.parent.parent / "ca").enlist("kits", [], kit / "keys" / "roster.json")


def unaccepted(kit: Path) -> None:
    (kit / "state" / "roster.accepted").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(without, "is missing"), (unlisted, "is not in the roster"), (unaccepted, "serial 1 is not accepted")],
)
def test_preflight_names_what_is_wrong_with_a_roster(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    site = signed_site(tmp_path, Authority.open(tmp_path / "ca"))
    damage(site)
    found = failures(site)
    assert set(found) == {"roster"}
    assert reason in found["roster"]
