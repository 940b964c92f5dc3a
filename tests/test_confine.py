"""A confined process has its own folder, ports and processes: no files, sockets or processes of the site's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from fl_privacy.deploy import confine, environment
from fl_privacy.deploy.confine import Means, landlock, user
from fl_privacy.deploy.confine.landlock import Allowed
from ordinary import UID, prefix

pytestmark = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")

LOOPBACK = "127.0.0.1"
DENIED = ("PermissionError", "FileNotFoundError")  # the second where it sees a file system of its own
# What a confined process tries, by name: an expression each. The names in it are those of `World.facts`.
ATTEMPTS = {
    "write its own folder": "(own / 'note').write_text('mine')",
    "read its own folder": "(own / 'note').read_text()",
    "read what it was given": "given.read_text()",
    "change what it was given": "given.write_text('x')",
    "read a secret": "secret.read_text()",
    "write a secret": "secret.write_text('x')",
    "remove a secret": "secret.unlink()",
    "list a folder": "list(secret.parent.iterdir())",
    "link to a secret": "(own / 'hard').hardlink_to(secret)",
    "leave a link behind": "(own / 'link').symlink_to(secret)",
    "leave a pipe behind": "os.mkfifo(own / 'pipe')",
    "change the mode of a secret": "secret.chmod(0o666)",
    "change the mode of Python": "os.chmod(sys.prefix, 0o700)",
    "let a child read a secret": "subprocess.run(['cat', secret], check=True, capture_output=True)",
    "inspect a process": "open(f'/proc/{outside}/environ', 'rb').read()",
    "signal its child": "with_child(lambda child: child.kill())",
    "signal another process": "os.kill(outside, signal.SIGKILL)",
    "signal its parent": "os.kill(os.getppid(), 0)",
    "connect to the worker": "socket.socket(socket.AF_UNIX).connect(worker)",
    "connect to an agent": "socket.socket(socket.AF_UNIX).connect(agent)",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + abstract)",
    "bind its own port": "socket.create_server((loopback, free)).close()",
    "bind another port": "socket.socket().bind((loopback, other + 1))",
    "bind any port": "socket.socket().bind((loopback, 0))",
    "connect to the SuperLink": "socket.create_connection((loopback, superlink)).close()",
    "connect to another port": "socket.create_connection((loopback, other))",
    "use Multipath TCP": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)",
    "use UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "use UDP over IPv6": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "use netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "use vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "use fast open": "socket.socket().sendto(b'x', 0x20000000, (loopback, other))",
    "use fast open by sendmsg": "socket.socket().sendmsg([b'x'], [], 0x20000000, (loopback, other))",
    "use io_uring": "call(425, 1, 0)",
    "use a keyring": "call(250 if os.uname().machine == 'x86_64' else 219, 0, -3, 0)",
    "become root": "os.setuid(0)",
}
CODE = """
import ctypes, json, os, pathlib, signal, socket, subprocess, sys
facts, attempts, found = json.loads(sys.argv[1]), json.loads(sys.argv[2]), {}
globals().update(facts)
own, given, secret = map(pathlib.Path, (own, given, secret))
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    if libc.syscall(*words) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def with_child(action):
    with subprocess.Popen(["sleep", "60"]) as child:
        action(child)
for name, attempt in attempts.items():
    try:
        eval(attempt)
        found[name] = "done"
    except Exception as error:
        found[name] = type(error).__name__
found["user"], found["groups"] = list(os.getresuid()), os.getgroups()
print(json.dumps(found))
"""


@dataclass
class World:
    """A confined process's results, and what surrounded it."""

    found: dict[str, str]
    measures: Means
    node: Path
    secret: Path
    outside: bool  # whether the process outside is still alive

    def denied(self, *names: str) -> bool:
        return all(self.found[name] in (*DENIED, "OSError", "CalledProcessError") for name in names)


@contextmanager
def listening(family: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family) as listener:
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen()
        yield listener


@pytest.fixture(scope="module", params=["root", "ordinary"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """All attempts in one process, which root or an ordinary user started."""
    is_root, of_root = os.geteuid() == 0, request.param == "root"
    if of_root and not is_root:
        pytest.skip("only root gives a SuperNode a user of its own")
    folder = tmp_path_factory.mktemp("world")
    places = {name: folder / name for name in ("own", "keys", "run", "agent")}
    for place in places.values():
        place.mkdir(mode=0o700)
    secret, given = places["keys"] / "key.pem", folder / "relay.pem"
    for path, mode in ((secret, 0o600), (given, 0o644)):
        path.write_text("text")
        path.chmod(mode)
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:
        if not of_root:
            patch.setattr(user, "of", lambda node: None)
        user.share(places["run"], user.of(places["own"]))
        sockets = [str(places[name] / "socket") for name in ("run", "agent")]
        abstract = f"fl-privacy-{os.getpid()}"
        for address in (*sockets, f"\0{abstract}"):
            held.enter_context(listening(socket.AF_UNIX, address))
        for path in sockets:
            Path(path).chmod(0o660)
        ports = [held.enter_context(listening(socket.AF_INET, (LOOPBACK, 0))).getsockname()[1] for _ in range(2)]
        with socket.create_server((LOOPBACK, 0)) as probe:
            free = probe.getsockname()[1]
        before = prefix(folder) if is_root and not of_root else []
        demote = partial(os.setuid, UID) if before else None
        outside = held.enter_context(subprocess.Popen(["sleep", "60"], preexec_fn=demote))
        held.callback(outside.kill)
        facts = {"own": str(places["own"]), "given": str(given), "secret": str(secret), "outside": outside.pid}
        facts |= dict(zip(("worker", "agent"), sockets, strict=True)) | {"abstract": abstract, "loopback": LOOPBACK}
        facts |= {"superlink": ports[0], "other": ports[1], "free": free}
        code = [sys.executable, "-c", CODE, json.dumps(facts), json.dumps(ATTEMPTS)]
        ways = Allowed((given,), (places["own"],), (), (places["run"],), (free,), (ports[0], free))
        env, run = (
            environment.confined(places["own"]),
            partial(subprocess.run, capture_output=True, text=True, timeout=60),
        )
        probed = run([*before, *confine.probe(places["own"])], env=env)
        done = run([*before, *confine.wrapped(code, places["own"], ways)], env=env)
        assert done.returncode == 0, done.stderr
        alive = outside.poll() is None
    return World(json.loads(done.stdout), confine.parsed(probed.stdout), places["own"], secret, alive)


# Files


def test_it_uses_its_own_folder_and_reads_what_it_was_given(world: World) -> None:
    assert world.found["write its own folder"] == world.found["read its own folder"] == "done"
    assert world.found["read what it was given"] == "done"


def test_it_has_no_other_files(world: World) -> None:
    assert world.denied("read a secret", "write a secret", "remove a secret", "list a folder", "link to a secret")
    assert world.denied("change what it was given")
    assert world.secret.read_text() == "text"


def test_its_children_are_confined_too(world: World) -> None:
    assert world.denied("let a child read a secret")


def test_it_leaves_nothing_behind_on_which_a_later_start_could_stumble(world: World) -> None:
    assert world.denied("leave a link behind", "leave a pipe behind")


def test_it_cannot_change_the_modes_of_the_site_s_files(world: World) -> None:
    """Landlock does not forbid it."""
    if not (world.measures.view or world.measures.user):
        pytest.skip("neither a file system nor a user of its own is possible here")
    assert world.denied("change the mode of a secret", "change the mode of Python")
    assert world.secret.stat().st_mode & 0o777 == 0o600


def test_flower_s_side_of_a_site_can_be_imported(tmp_path: Path) -> None:
    code = "import client_app.app, flwr.supernode.cli.flower_supernode"
    words = confine.wrapped([sys.executable, "-c", code], tmp_path, Allowed())
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment.confined(tmp_path))
    assert done.returncode == 0, done.stderr


# Processes


def test_it_cannot_inspect_a_process_outside(world: World) -> None:
    assert world.denied("inspect a process")


def test_it_signals_its_children_but_nobody_outside(world: World) -> None:
    if world.measures.landlock < confine.SIGNALS and not world.measures.user:
        pytest.skip("this kernel's Landlock has no rules for signals")
    assert world.found["signal its child"] == "done"
    assert world.denied("signal another process", "signal its parent")
    assert world.outside


def test_root_starts_it_as_a_user_who_owns_its_folder_alone(world: World) -> None:
    if not world.measures.user:
        pytest.skip("only root gives a SuperNode a user of its own")
    uid = user.of(world.node)
    assert world.found["user"] == [uid] * 3
    assert world.found["groups"] == []
    assert world.denied("become root")
    assert {path.stat().st_uid for path in (world.node, world.node / "note")} == {uid}
    assert world.secret.stat().st_uid == 0
    assert user.of(world.node.parent) != uid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root owns what others may not")
def test_a_link_in_its_folder_gives_nothing_away(tmp_path: Path) -> None:
    own, outside = tmp_path / "own", tmp_path / "outside"
    for folder in (own, outside):
        folder.mkdir()
    (outside / "file").write_text("ours")
    (own / "link").symlink_to(outside)
    user.give(own, UID)
    assert (own / "link").lstat().st_uid == UID
    assert {outside.stat().st_uid, (outside / "file").stat().st_uid} == {0}


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A change of user clears what the kernel was asked to do then."""
    words = confine.wrapped(["sleep", "60"], tmp_path, Allowed())
    code = f"import subprocess; p = subprocess.Popen({words!r}, stdout=1); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment.confined(tmp_path))
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
        assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    assert parent.stdout.read() == b""  # at its end nobody holds the pipe any more
    parent.stdout.close()
    parent.wait()


# Sockets and ports


def test_it_connects_to_the_worker_but_to_no_agent(world: World) -> None:
    """Before version 9, Landlock does not forbid it."""
    assert world.found["connect to the worker"] == "done"
    if world.measures.landlock < confine.SOCKETS and not (world.measures.view or world.measures.user):
        pytest.skip("nothing here keeps it from connecting to sockets by their path")
    assert world.denied("connect to an agent")


def test_it_connects_to_no_abstract_socket(world: World) -> None:
    if world.measures.landlock < confine.SIGNALS:
        pytest.skip("this kernel's Landlock has no rules for abstract sockets")
    assert world.denied("connect to an abstract socket")


def test_it_uses_the_ports_it_was_given_and_no_others(world: World) -> None:
    if world.measures.landlock < confine.PORTS:
        pytest.skip("this kernel's Landlock has no rules for ports")
    assert world.found["bind its own port"] == world.found["connect to the SuperLink"] == "done"
    assert world.denied("bind another port", "bind any port", "connect to another port")


def test_no_way_leads_round_the_rules_for_ports(world: World) -> None:
    """Landlock itself restricts connections of TCP that `connect` makes, and nothing else."""
    if not world.measures.filter:
        pytest.skip("there is no filter for this architecture")
    ways = [name for name in ATTEMPTS if name.startswith("use ")]
    assert {world.found[name] for name in ways} == {"PermissionError"}


def test_sockets_of_other_programs_are_found(tmp_path: Path) -> None:
    paths = [tmp_path / name / "socket" for name in ("agent", "own")]
    with ExitStack() as held:
        for path in paths:
            path.parent.mkdir()
            held.enter_context(listening(socket.AF_UNIX, str(path)))
        found = confine.reachable_sockets((paths[1].parent,))
    assert str(paths[0]) in found
    assert str(paths[1]) not in found
