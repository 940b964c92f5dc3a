"""Start kits on one machine: what `provision` writes, and the problems `preflight` finds in a kit, with their fixes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import cli, json_of
from fl_privacy.deploy.kits import kit_files
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.deploy.preflight import checks, of_kit
from fl_privacy.errors import ConfigError, FederationError, LaunchError
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority
from helpers import Keys
from kits import HERE, POLICY, change, contents, failures, federation, signed_site, write
from netns import left, quiet


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "ca")


@pytest.fixture
def site(tmp_path: Path, authority: Authority) -> Path:
    return signed_site(tmp_path, authority)


def test_every_party_of_twenty_sites_gets_a_kit_with_its_files(tmp_path: Path) -> None:
    config = write(tmp_path, federation(20))
    done = cli("provision", config, "--out", tmp_path / "kits", "--pki", tmp_path / "ca", "--sign", "--json")
    assert done.returncode == 0, done.stderr
    made = [Path(path) for path in json_of(done)["kits"]]
    assert len(made) == 23
    for path in made:
        assert Folder.open(path).keys.certificate_file.exists()
        assert {"kit.yaml", "federation.yaml", "README.md", "compose.yml"} <= {file.name for file in path.iterdir()}
        assert (path / f"fl-privacy-{path.name}.service").exists()
        assert path.stat().st_mode & 0o077 == 0
    assert len(list((tmp_path / "kits" / "superlink" / "nodes").glob("*.pub"))) == 20


def test_kits_can_be_made_with_the_authority_s_certificate_alone(tmp_path: Path, authority: Authority) -> None:
    config, public = write(tmp_path, federation()), tmp_path / "public"
    public.mkdir()
    authority.revoke("fl-privacy://kits/site/site-9")
    for name in ("ca.pem", "revoked.pem"):
        (public / name).write_bytes((authority.folder / name).read_bytes())
    for number, given in enumerate((public, public / "ca.pem")):
        out = tmp_path / f"kits-{number}"
        done = cli("provision", config, "--out", out, "--pki", given)
        assert done.returncode == 0, done.stderr
        assert (out / "site-0" / "keys" / "ca.pem").read_bytes() == authority.pem
        assert (out / "site-0" / "keys" / "revoked.pem").exists()
    refused = cli("provision", config, "--out", tmp_path / "signed", "--pki", public, "--sign").stderr
    assert "ca.key" in refused
    assert "remove" not in refused
    missing = cli("provision", config, "--out", tmp_path / "none", "--pki", tmp_path / "nowhere").stderr
    assert "fl-privacy pki init" in missing
    assert not (tmp_path / "nowhere").exists()


def test_a_kit_lists_every_setting_of_its_owner(tmp_path: Path, authority: Authority) -> None:
    provision(federation(), tmp_path / "kits", authority)
    kit, values = tmp_path / "kits" / "site-0", {"data": "/d", "device": "cuda:1", "proxy": "http://p:1"}
    for key, value in values.items():
        text = (kit / "kit.yaml").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith(f"# {key}: ")]
        (kit / "kit.yaml").write_text(text.replace(line, f"{key}: {value}"))
    assert {key: str(getattr(Folder.open(kit).kit, key)) for key in values} == values
    assert "# device:" not in (tmp_path / "kits" / "shuffler" / "kit.yaml").read_text()
    before = (kit / "kit.yaml").read_bytes()
    provision(federation(), tmp_path / "kits", authority)
    assert (kit / "kit.yaml").read_bytes() == before


def test_a_second_provisioning_changes_nothing(tmp_path: Path, authority: Authority) -> None:
    made = federation()
    provision(made, tmp_path / "kits", authority, sign=True)
    (tmp_path / "kits" / "site-0" / "state" / "ledger.jsonl").write_text("spent\n")
    before = contents(tmp_path / "kits")
    provision(made, tmp_path / "kits", authority, sign=True)
    assert contents(tmp_path / "kits") == before


def test_a_joining_site_does_not_change_the_keys_of_the_others(tmp_path: Path, authority: Authority) -> None:
    provision(federation(3), tmp_path / "kits", authority, sign=True)
    before = contents(tmp_path / "kits")
    provision(federation(4), tmp_path / "kits", authority, sign=True)
    after = contents(tmp_path / "kits")
    same = {name for name in before if before[name] == after[name]}
    kept = {name for name in before if "/keys/" in name or "/node/" in name or name.endswith("secret")}
    assert {name for name in kept if not name.endswith("roster.json")} <= same
    assert Folder.open(tmp_path / "kits" / "site-3").keys.certificate_file.exists()
    assert (tmp_path / "kits" / "superlink" / "nodes" / "site-3.pub").exists()


def test_a_site_s_settings_in_its_kit_are_kept(site: Path, tmp_path: Path, authority: Authority) -> None:
    own = {"proxy": "http://proxy.test:3128", "device": "cuda:1", "data": "/srv/data"}
    change(site, **own)
    provision(federation(4), tmp_path / "kits", authority, sign=True)
    assert (site / "policy.yaml").read_text() == POLICY
    kit = Folder.open(site).kit
    assert {name: str(getattr(kit, name)) for name in own} == own
    assert len(Folder.open(site).federation.sites) == 4


@pytest.mark.parametrize("key", ["policy", "trial"])
def test_a_kit_file_that_decides_about_the_policy_is_refused(site: Path, key: str) -> None:
    change(site, **{key: {"policy": "new.yaml", "trial": True}[key]})
    for command in ("preflight", "serve"):
        done = cli(command, site)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"kit.yaml: {key}: not decided by a kit; " in done.stderr


def test_no_shipped_file_names_drops_or_replaces_a_policy(site: Path, tmp_path: Path) -> None:
    """Neither what provisioning writes for a trial, nor a federation.yaml that names another policy for the site."""
    (tmp_path / "new.yaml").write_text(POLICY.replace("99", "1000"))
    made = Folder.open(site).federation
    sites = [one.model_copy(update={"policy": tmp_path / "new.yaml"}) for one in made.sites]
    (site / "federation.yaml").write_text(made.model_copy(update={"sites": tuple(sites)}).to_yaml())
    for trial in (False, True):
        folder = Folder.open(site, trial=trial)
        assert folder.policy == folder.own_federation.site("site-0").policy == site / "policy.yaml"
    (site / "policy.yaml").unlink()
    folder = Folder.open(site)
    assert folder.policy is folder.own_federation.site("site-0").policy is None
    assert "nothing leaves a site without it" in failures(site)["policy"]
    assert not any("--trial" in file.read_text() for file in site.iterdir() if file.is_file())


def test_no_shipped_file_chooses_the_folder_that_a_site_reads(site: Path, tmp_path: Path) -> None:
    """The digest, which approvals and tickets are bound to, does not cover paths: it would be the same."""
    made = Folder.open(site).federation
    sites = [one.model_copy(update={"data": tmp_path / "other-study"}) for one in made.sites]
    (site / "federation.yaml").write_text(made.model_copy(update={"sites": tuple(sites)}).to_yaml())
    folder = Folder.open(site)
    assert folder.federation.digest == made.digest
    assert folder.own_federation.site("site-0").data is folder.place.federation.site("site-0").data is None
    assert str(tmp_path / "other-study") not in kit_files.compose(folder) + kit_files.unit(folder)
    change(site, data="/srv/own")
    assert Folder.open(site).own_federation.site("site-0").data == Path("/srv/own")
    change(site, data=None)
    assert Folder.open(site, trial=True).own_federation.site("site-0").data == tmp_path / "other-study"


def test_a_policy_that_links_to_nothing_is_not_a_missing_one(site: Path) -> None:
    (site / "policy.yaml").unlink()
    (site / "policy.yaml").symlink_to("nowhere")
    assert Folder.open(site, trial=True).policy == site / "policy.yaml"
    assert "cannot be read" in failures(site)["policy"]


@pytest.mark.parametrize("metrics", ["0.0.0.0:9470", None])
def test_a_changed_metrics_address_is_kept(tmp_path: Path, authority: Authority, metrics: str | None) -> None:
    provision(federation(), tmp_path / "kits", authority, sign=True)
    kit = tmp_path / "kits" / "shuffler"
    assert Folder.open(kit).kit.metrics == "127.0.0.1:9464"
    change(kit, metrics=metrics)
    provision(federation(4), tmp_path / "kits", authority, sign=True)
    assert Folder.open(kit).kit.metrics == metrics


def test_another_authority_never_replaces_the_first(tmp_path: Path, authority: Authority) -> None:
    config = write(tmp_path, federation())
    provision(federation(), tmp_path / "kits", authority, sign=True)
    before = contents(tmp_path / "kits")
    done = cli("provision", config, "--out", tmp_path / "kits", "--pki", tmp_path / "other", "--sign")
    assert done.returncode == 2
    assert "another authority" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    kept = contents(tmp_path / "kits")
    assert {name for name in before if kept[name] != before[name]} == set()


def test_a_role_with_an_ipv6_address_listens_on_ipv6(tmp_path: Path) -> None:
    provision(federation(hosts={"superlink": "[fd00::2]:9443", "shuffler": "s.test:9444"}), tmp_path / "kits")
    kits = [Folder.open(tmp_path / "kits" / name).kit for name in ("superlink", "shuffler")]
    assert [(kit.listen, kit.hosts) for kit in kits] == [("[::]:9443", ("fd00::2",)), ("0.0.0.0:9444", ("s.test",))]


def test_provisioning_names_what_is_missing(tmp_path: Path, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="hosts: missing"):
        provision(federation(hosts=None), tmp_path / "kits")
    with pytest.raises(ConfigError, match="needs --pki"):
        provision(federation(), tmp_path / "kits", sign=True)


def test_a_full_disk_is_named(tmp_path: Path, authority: Authority) -> None:
    small = tmp_path / "small"
    small.mkdir()
    try:
        quiet(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)])
    except (subprocess.CalledProcessError, OSError):
        pytest.skip("needs permission to mount a small file system")
    try:
        with pytest.raises(LaunchError, match="No space left"):
            provision(federation(20), small / "kits", authority, sign=True)
    finally:
        quiet(["umount", str(small)])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda kit: (kit / "kit.yaml").unlink(), "has no kit.yaml"),
        (lambda kit: (kit / "kit.yaml").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda kit: (kit / "kit.yaml").write_text("{"), "not YAML"),
        (lambda kit: (kit / "kit.yaml").write_text("- 1"), "expected keys and values"),
        (lambda kit: change(kit, role="root"), "role: 'root'"),
        (lambda kit: change(kit, superlink="http://here/"), "superlink: "),
        (lambda kit: change(kit, proxy="http://me:word@proxy:1"), "proxy: "),
        (lambda kit: change(kit, surprise=1), "surprise: unknown key"),
        (lambda kit: change(kit, name="site-9"), "site 'site-9' is not in federation"),
        (lambda kit: (kit / "federation.yaml").unlink(), "federation.yaml"),
        (lambda kit: write(kit, federation(rounds=77)), "is for another federation"),
        (lambda kit: write(kit, federation(name="other")), "is for another federation"),
    ],
)
def test_an_incomplete_kit_is_refused_before_anything_starts(
    site: Path, damage: Callable[[Path], Any], said: str
) -> None:
    damage(site)
    with pytest.raises(FederationError) as caught:
        Folder.open(site)
    assert said in str(caught.value)


def test_a_good_kit_passes(site: Path) -> None:
    assert failures(site) == {}


def test_a_kit_without_keys_explains_how_to_get_them(tmp_path: Path) -> None:
    provision(federation(), tmp_path / "kits")
    found = failures(tmp_path / "kits" / "site-0", reach=True)
    assert found["certificate"] == "none yet"
    assert "no key" in found["node"]
    assert "refused" in found["peer"].lower()  # nothing listens on port 9, certificate or not


def test_certificates_that_do_not_belong_to_the_kit_are_named(site: Path, tmp_path: Path, authority: Authority) -> None:
    keys = Folder.open(site).keys
    me, other = Identity("kits", "site", "site-0"), Authority.open(tmp_path / "other")
    good = contents(keys.folder)

    def found(ring: Keyring, *files: str) -> dict[str, str]:
        for file in files:
            shutil.copy(ring.folder / file, keys.folder / file)
        try:
            return failures(site)
        finally:
            for name, data in good.items():
                (keys.folder / name).write_bytes(data)

    wrong = authority.issue(Identity("kits", "site", "site-1"), tmp_path / "wrong")
    foreign = other.issue(me, tmp_path / "foreign")
    elsewhere = authority.issue(Identity("elsewhere", "site", "site-0"), tmp_path / "elsewhere")
    old = Keys(tmp_path / "old", "kits")
    old.authority = authority
    assert "is fl-privacy://kits/site/site-1" in found(wrong, "key.pem", "cert.pem")["identity"]
    assert "not signed by ca.pem" in found(foreign, "key.pem", "cert.pem")["authority"]
    assert "elsewhere" in found(elsewhere, "key.pem", "cert.pem")["identity"]
    assert "expired" in found(old.expired("site", "site-0"), "key.pem", "cert.pem")["certificate"]
    assert "do not belong together" in found(wrong, "key.pem")["key"]
    assert failures(site) == {}


def test_a_damaged_node_key_is_named(site: Path) -> None:
    (site / "node" / "node.key").write_text("nothing")
    assert "cannot be read" in failures(site)["node"]


def test_a_damaged_certificate_is_reported_like_other_failures(site: Path) -> None:
    (site / "keys" / "cert.pem").write_text("nothing")
    assert set(failures(site, reach=True)) == {"keys", "peer"}


def test_what_a_machine_lacks_is_named(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "policy.yaml").write_text("epsilon_per_round: 1\nepsilon: 10\ntasks: [mnist]\n")
    change(site, device="cuda:7")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(total=1, used=1, free=2**20))
    found = failures(site)
    assert set(found) == {"disk", "device", "policy"}
    assert "1 MiB free" in found["disk"]
    assert "cuda:7" in found["device"]
    assert "task 'digits' is not allowed" in found["policy"]


def test_missing_data_are_named(tmp_path: Path, authority: Authority) -> None:
    provision(federation(task={"dataset": "mnist", "model": "lenet5"}), tmp_path / "kits", authority, sign=True)
    kit = tmp_path / "kits" / "site-0"
    change(kit, data=str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere" / "mnist") in failures(kit)["data"]
    (tmp_path / "nowhere" / "mnist").mkdir(parents=True)
    assert "data" not in failures(kit)


def test_a_taken_port_is_named(site: Path) -> None:
    """A role that cannot listen cannot start; a role without metrics can."""
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        change(site.parent / "shuffler", listen=f"{HERE}:{port}")
        change(site, metrics=f"{HERE}:{port}")
        assert f"{HERE}:{port}" in failures(site.parent / "shuffler")["port"]
        (warned,) = [check for check in of_kit.run(Folder.open(site), reach=False) if check.name == "metrics"]
        assert warned.ok
        assert f"{HERE}:{port} is in use" in warned.detail
        assert "`metrics` in kit.yaml" in warned.fix


def test_an_unknown_host_name_is_named(site: Path) -> None:
    change(site, superlink="nowhere.invalid:9443")
    assert "nowhere.invalid" in failures(site, reach=True)["name"]


def test_an_unresponsive_name_server_does_not_block_preflight(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    change(site, superlink="slow.invalid:9443", middleware=["slow.invalid:9444"])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(60))
    try:
        found = of_kit.run(Folder.open(site))
        assert {check.detail.split(":")[0] for check in found if not check.ok} == {"slow.invalid"}
    finally:
        answer.set()


def test_all_failures_are_listed_at_once(site: Path) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        change(
            site,
            superlink="nowhere.invalid:9443",
            device="cuda:7",
            metrics=f"{HERE}:{port}",
        )
        for name in ("policy.yaml", "node/node.key", "keys/cert.pem"):
            (site / name).unlink()
        done = cli("preflight", site, "--json")
        plain = cli("preflight", site)
    assert done.returncode == plain.returncode == 2
    failed = {check["name"] for check in json_of(done)["checks"] if not check["ok"]}
    assert failed == {"certificate", "device", "node", "policy", "name", "peer"}
    assert plain.stdout.count("FAIL") == plain.stdout.count("fix:") == len(failed)
    assert "Traceback" not in plain.stdout + plain.stderr


def test_a_site_that_cannot_start_leaves_nothing_behind(site: Path) -> None:
    change(site, device="cuda:7")
    before = set(os.listdir(site))
    done = cli("site", "start", site)
    assert done.returncode == 2
    assert "device: cuda:7" in done.stderr
    assert set(os.listdir(site)) == before
    assert cli("site", "status", site).returncode == 1
    assert cli("site", "stop", site).returncode == 0


def test_a_role_whose_port_is_taken_exits_with_the_reason_and_leaves_nothing_behind(site: Path) -> None:
    kit = site.parent / "shuffler"
    with socket.create_server((HERE, 0)) as taken:
        change(kit, listen=f"{HERE}:{taken.getsockname()[1]}")
        done = cli("serve", kit)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: shuffler: listen")
    assert "choose another port" in last
    assert left(kit) == []
    assert not (kit / "run" / "healthy").exists()
