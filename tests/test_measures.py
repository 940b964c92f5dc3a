"""Which measures confine a SuperNode on which kernel, what is missing without them, and what processes inherit."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fl_privacy.deploy import confine, environment
from fl_privacy.deploy.confine import Means, __main__ as command, landlock, seccomp
from fl_privacy.deploy.kits import background
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.preflight import of_kit
from fl_privacy.errors import LaunchError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import Authority, load_key
from fl_privacy.identity.tls import server_context
from kits import failures, signed_site

SECRETS = {
    "SSH_AUTH_SOCK": "/run/agent",
    "AWS_SECRET_ACCESS_KEY": "wJalr",
    "GITHUB_TOKEN": "ghp",
    "FLWR_MODEL_API_KEY": "key",
    "PGPASSWORD": "pass",
}
KEPT = {
    "FL_PRIVACY_DATA": "/data",
    "CUDA_VISIBLE_DEVICES": "1",
    "https_proxy": "http://proxy:1",
    "LC_ALL": "C.UTF-8",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return signed_site(tmp_path, Authority.open(tmp_path / "ca"))


# What other kernels and architectures get


@pytest.mark.parametrize(
    ("abi", "files", "ports", "scopes"),
    [
        (1, 0x1FFF, 0, 0),
        (2, 0x3FFF, 0, 0),
        (3, 0x7FFF, 0, 0),
        (4, 0x7FFF, 3, 0),
        (5, 0xFFFF, 3, 0),
        (6, 0xFFFF, 3, 3),
        (7, 0xFFFF, 3, 3),
        (8, 0xFFFF, 3, 3),
        (9, 0x1FFFF, 3, 3),
        (20, 0x1FFFF, 3, 3),
    ],
)
def test_every_right_is_used_where_the_kernel_has_it(abi: int, files: int, ports: int, scopes: int) -> None:
    made = landlock.Ruleset.of(abi)
    assert bytes(made) == struct.pack("=QQQ", files, ports, scopes)


def test_rules_have_the_kernel_s_layout() -> None:
    assert bytes(landlock._Beneath(5, 7)) == struct.pack("=Qi", 5, 7)
    assert bytes(landlock._Port(1, 8443)) == struct.pack("=QQ", 1, 8443)


CALLS = [
    ("socket", (socket.AF_INET, socket.SOCK_STREAM, 0), True),
    ("socket", (socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP), True),
    ("socket", (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0), True),
    ("socket", (socket.AF_UNIX, socket.SOCK_DGRAM, 0), False),
    ("socket", (socket.AF_INET, socket.SOCK_STREAM, 262), False),
    ("socket", (socket.AF_INET, socket.SOCK_DGRAM, 0), False),
    ("socket", (socket.AF_INET, socket.SOCK_RAW, 255), False),
    ("socket", (17, socket.SOCK_RAW, 3), False),
    ("sendto", (3, 0, 1, 0), True),
    ("sendto", (3, 0, 1, 0x20000040), False),
    ("sendmsg", (3, 0, 0x4000), True),
    ("sendmsg", (3, 0, 0x20000000), False),
    ("sendmmsg", (3, 0, 1, 0x20000000), False),
    ("keyctl", (0,), False),
]


def verdict(program: bytes, architecture: int, call: int, arguments: tuple[int, ...]) -> int:
    """Run a BPF program as the kernel does."""
    data = struct.pack("=IIQ6Q", call, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps, at, word = list(struct.iter_unpack("=HBBI", program)), 0, 0
    tests = {seccomp.EQUAL: int.__eq__, seccomp.AT_LEAST: int.__ge__, seccomp.ANY_BIT: lambda a, b: bool(a & b)}
    while True:
        operation, yes, no, operand = steps[at]
        at += 1
        if operation == seccomp.RETURN:
            return int(operand)
        if operation == seccomp.LOAD:
            word = struct.unpack_from("=I", data, operand)[0]
        elif operation == seccomp.MASK:
            word &= operand
        else:
            at += yes if tests[operation](word, operand) else no


@pytest.mark.parametrize("machine", list(seccomp.ARCHITECTURES))
@pytest.mark.parametrize(("name", "arguments", "allowed"), CALLS)
def test_the_filter_allows_tcp_and_unix_sockets_alone(
    machine: str, name: str, arguments: tuple[int, ...], allowed: bool
) -> None:
    call, architecture = seccomp.kernel.NUMBERS[machine][name], seccomp.ARCHITECTURES[machine]
    expected = seccomp.ALLOW if allowed else seccomp.REFUSE
    assert verdict(seccomp.program(machine), architecture, call, arguments) == expected


@pytest.mark.parametrize("machine", list(seccomp.ARCHITECTURES))
def test_the_filter_refuses_other_calling_conventions(machine: str) -> None:
    program, own = seccomp.program(machine), seccomp.ARCHITECTURES[machine]
    assert verdict(program, own, 0, ()) == seccomp.ALLOW
    assert verdict(program, own, seccomp.X32, ()) == seccomp.REFUSE
    assert verdict(program, 0x40000003, 0, ()) == seccomp.REFUSE
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64")


# What is missing, and what follows

FULL = Means(7, True, True, True, ())


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (FULL, ""),
        (Means(9, False, True, False, ("/run/agent",)), ""),
        (Means(7, False, True, False, ()), ""),
        (Means(7, False, True, False, ("/run/agent",)), "/run/agent"),
        (Means(6, True, False, False), "any port"),
        (Means(5, True, True, False), "kill"),
        (Means(5, True, True, True), ""),
        (Means(3, True, True, True), "any port"),
        (Means(0, True, True, True), "keys and data"),
    ],
)
def test_what_is_missing_is_named(found: Means, missing: str) -> None:
    assert len(found.missing) <= 2
    assert missing in "; ".join(found.missing)
    assert bool(missing) == bool(found.missing)


def test_where_it_is_required_nothing_starts_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "confine", lambda *_: Means(3, True, True, True))
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr(sys, "argv", ["confine", f"--node={tmp_path}", "--required", "--", "true"])
    with pytest.raises(SystemExit, match=str(command.FAILED)):
        command.main()
    assert "connect to any port" in capsys.readouterr().err
    monkeypatch.setattr(confine, "means", lambda: Means(3, True, True, True))
    confine.demand(False)
    with pytest.raises(LaunchError, match="confinement: required, but code of a run could connect to any port"):
        confine.demand(True)


@pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")
def test_the_measures_of_this_machine_are_found_by_trying() -> None:
    found = confine.means()
    assert found.landlock == landlock.version()
    assert found.user == (os.geteuid() == 0)


# The environment


def test_confined_processes_inherit_nothing_but_the_locale(tmp_path: Path) -> None:
    made = environment.confined(tmp_path, {**SECRETS, **KEPT, "PATH": "/home/me/bin"})
    own = {"HOME", "TMPDIR", "FLWR_HOME", "PATH", *environment.SET}
    assert made.keys() == {"LC_ALL", *own}
    assert made["PATH"] == os.pathsep.join((str(Path(sys.executable).parent), os.defpath))


def test_our_own_processes_inherit_what_they_need_but_no_secret() -> None:
    made = environment.own({**SECRETS, **KEPT, "PATH": "/usr/bin"})
    assert not made.keys() & SECRETS.keys()
    assert KEPT.items() <= made.items()
    assert environment.own({**SECRETS, environment.KEEP: "PGPASSWORD, OTHER"})["PGPASSWORD"] == "pass"


# Preflight


def found(kit: Path) -> dict[str, tuple[bool, str, str]]:
    return {check.name: (check.ok, check.detail, check.fix) for check in of_kit.run(Folder.open(kit), reach=False)}


def policy(kit: Path, text: str) -> None:
    (kit / "policy.yaml").write_text(
        f"{{epsilon_per_round: 9, epsilon: 99, tasks: [digits], allow_plain: true, {text}}}"
    )


def test_preflight_says_what_holds_for_code_of_a_run(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "means", lambda: FULL)
    assert found(site)["confinement"] == (
        True, "code of a run is confined: Landlock 7, own user, own file system, socket filter", ""
    )  # fmt: skip


def test_preflight_warns_of_missing_confinement_and_fails_where_the_policy_requires_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confine, "means", lambda: Means(5, True, True, False))
    ok, detail, fix = found(site)["confinement"]
    assert ok
    assert fix
    assert "code of a run could kill processes of this user" in detail
    policy(site, "confinement: preferred")
    assert found(site)["confinement"][0]
    policy(site, "confinement: required")
    assert "the policy requires confinement" in failures(site)["confinement"]


@pytest.mark.parametrize(
    ("name", "mode", "fix"),
    [
        ("keys/key.pem", 0o640, "chmod 600"),
        ("keys/key.pem", 0o604, "chmod 600"),
        ("node/node.key", 0o644, "chmod 600"),
        ("state", 0o750, "chmod 700"),
        ("kit.yaml", 0o666, "chmod o-w"),
        ("federation.yaml", 0o646, "chmod o-w"),
    ],
)
def test_preflight_names_files_that_others_may_read_or_change(site: Path, name: str, mode: int, fix: str) -> None:
    assert "modes" not in found(site)
    (site / name).chmod(mode)
    assert found(site)["modes"] == (False, found(site)["modes"][1], f"{fix} {site / name}")
    assert f"mode {mode:04o}" in failures(site)["modes"]


def test_preflight_names_a_secret_and_a_policy_that_others_may_use(site: Path) -> None:
    (site.parent / "superlink" / "secret").chmod(0o644)
    assert "secret" in failures(site.parent / "superlink")["modes"]
    policy(site, "")
    (site / "policy.yaml").chmod(0o602)
    assert "policy.yaml" in failures(site)["modes"]


def test_a_private_key_that_others_may_read_is_refused_at_the_start(site: Path) -> None:
    keys = Keyring(site / "keys")
    keys.key_file.chmod(0o640)
    contexts = partial(server_context, keys.certificate_file, keys.key_file)
    for use in (keys.read, partial(load_key, keys.key_file), contexts):
        with pytest.raises(LaunchError, match=r"key.pem: mode 0640 lets other users read it; run chmod 600 "):
            use()
    with pytest.raises(LaunchError, match="chmod 600"):
        background.start(Folder.open(site))


@pytest.mark.e2e
@pytest.mark.parametrize("module", ["shuffler_app", "client_app.worker"])
def test_a_process_whose_key_others_may_read_does_not_start(site: Path, module: str, tmp_path: Path) -> None:
    Keyring(site / "keys").key_file.chmod(0o644)
    words = [sys.executable, "-m", module, "--config", str(site / "federation.yaml"), "--keys", str(site / "keys")]
    words += ["--state", str(site / "state")]
    if module == "client_app.worker":
        words += ["--trial", "--site", "site-0", "--socket", str(tmp_path / "s"), "--middleware", "127.0.0.1:1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "mode 0644 lets other users read it" in done.stdout + done.stderr
