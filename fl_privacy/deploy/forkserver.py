"""`python -m fl_privacy.deploy.forkserver MODULE ...`: load modules once, then fork a process for each request.

Importing torch or Flower takes longer than most short runs train, and a federation on one machine would do it once for
every site. A fork behaves like the command it was asked for: its own session, log, environment and command line. It
has one thread and no secrets to inherit, because the fork server has only imported modules.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from fl_privacy.deploy.parent import die_with_parent

LARGEST = 2**17  # bytes of a message
ROOM = " " * 4096  # the last argument of the fork server: a fork writes its own command line over it
CMDLINE = slice(45, 47)  # fields of /proc/self/stat after the name: where the command line starts and ends
POLL = 0.02
FILE = struct.Struct("i")
IDLE = 300.0  # seconds without a fork after which a fork server ends; the next request starts another


def _line() -> tuple[int, int]:
    """Where the command line of this process, and of every fork of it, is in memory."""
    start, end = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[CMDLINE]
    return int(start), int(end)


LINE = _line() if sys.platform == "linux" else (0, 0)  # a confined process cannot read it


class Asked(NamedTuple):
    """What a fork is to be."""

    command: tuple[str, ...]
    env: dict[str, str]
    own_session: bool = True
    ends_with_server: bool = True


class Forked:
    """A process that a fork server started; the part of `subprocess.Popen` that its parent would use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exited(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(POLL)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """A process that forks others on request. It ends with us, and its forks end with it.

    It learns from its socket that we are gone: the kernel's signal would come when the thread ends that started it.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """`env` is what the modules see while they load; each fork has an environment of its own after that."""
        self._command = [sys.executable, "-m", __name__, *modules, ROOM]
        self._env = dict(env)
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}  # of those that have exited
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._forked = self._broken = False  # it has forked; it could not load

    def load(self) -> None:
        """Begin to load the modules, in the background; a fork server that was killed is started again."""
        with self._lock:
            self._load()

    def start(self, command: Sequence[str], env: Mapping[str, str], output: BinaryIO) -> Forked:
        """Fork a process that runs `command`; OSError if that is not possible."""
        return self._fork(Asked(tuple(command), dict(env)), output.fileno())

    def _fork(self, asked: Asked, output: int) -> Forked:
        text = json.dumps(asked).encode()
        if len(text) > LARGEST:
            raise OSError(f"a command and its environment of {len(text)} bytes are too long for a fork server")
        with self._lock:
            control = self._load()
            socket.send_fds(control, [text], [output])
            while (told := self._read(control)) is not None:
                if "started" in told:
                    self._forked = True
                    self._running.add(told["started"])
                    return Forked(self, told["started"])
            self._close()
            self._broken = not self._forked
        raise BrokenPipeError("the fork server exited")

    def exited(self, pid: int) -> int | None:
        """The exit code of a fork, or None while it runs."""
        with self._lock:
            self._drain()
            return self._codes.pop(pid, None)

    def stop(self) -> None:
        with self._lock:
            self._close()

    def _load(self) -> socket.socket:
        if self._broken:
            raise OSError("the fork server cannot load its modules")
        self._drain()  # it may have ended
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,  # what fails here fails again in a process of its own, with a log
                    stderr=subprocess.DEVNULL,
                    env=self._env,
                    start_new_session=True,
                )
        return self._control

    def _drain(self) -> None:
        """Read what it has told since."""
        while self._control is not None and _readable(self._control):
            if self._read(self._control) is None:
                self._close()

    def _read(self, control: socket.socket) -> dict[str, Any] | None:
        """The next message, or None if the fork server is gone; exit codes are kept."""
        try:
            text = control.recv(LARGEST)
        except OSError:
            return None
        if not text:
            return None
        told: dict[str, Any] = json.loads(text)
        if "exited" in told:
            self._codes[told["exited"]] = told["code"]
            self._running.discard(told["exited"])
        return told

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
        self._codes |= dict.fromkeys(self._running, -signal.SIGTERM)  # they end with their fork server
        self._running.clear()


def shared(modules: Iterable[str], env: Mapping[str, str]) -> ForkServer:
    """This process's own fork server with these modules: all runs that it starts use the same one."""
    return _shared(os.getpid(), tuple(sorted(set(modules))), frozenset(env.items()))


@cache
def _shared(owner: int, modules: tuple[str, ...], env: frozenset[tuple[str, str]]) -> ForkServer:
    return ForkServer(modules, dict(env))


class Nursery(ForkServer):
    """A fork server that is a fork of this process, made while it has one thread and nothing but modules.

    Its forks outlive it: whoever asks for them ends them. One that was killed is not started again.
    """

    def __init__(self, owner: str) -> None:
        """`owner` is whose programs it forks; `ps` shows it."""
        super().__init__((), {})
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gc.freeze()
        if not os.fork():
            self._control.close()
            _show([*self._command[:3], "for", owner])
            if command := _serve(theirs):
                _begin(command)
            os._exit(0)
        theirs.close()

    def popen(self, command: Sequence[str], stdout: int | None = None, **options: Any) -> Forked:
        """As `subprocess.Popen`, with the options that Flower uses; errors go where the output goes."""
        own_session = bool(options.get("start_new_session"))
        asked = Asked(tuple(command), dict(os.environ), own_session, ends_with_server=False)
        with open(os.devnull, "wb") if stdout == subprocess.DEVNULL else os.fdopen(os.dup(1), "wb") as output:
            return self._fork(asked, output.fileno())

    def _load(self) -> socket.socket:
        if self._control is None:
            raise BrokenPipeError("the fork server exited")
        return self._control


def become(command: Sequence[str]) -> None:
    """Run a command in place of this process: a module with what is loaded here, anything else by `exec`."""
    program, *rest = command
    if program != sys.executable or rest[0] != "-m":
        os.execvp(program, list(command))
    sys.modules.pop(_main_of(rest[1]), None)  # it runs as the main module, with its own imports loaded
    sys.argv = rest[1:]
    runpy.run_module(rest[1], run_name="__main__", alter_sys=True)


def _main_of(name: str) -> str:
    """The module that `python -m NAME` runs."""
    found = importlib.util.find_spec(name)
    return f"{name}.__main__" if found is not None and found.submodule_search_locations else name


def main() -> None:
    """Serve until the caller's end closes; a fork returns from `_serve` with its command."""
    control = socket.socket(fileno=os.dup(0))
    for name in sys.argv[1:-1]:
        importlib.import_module(_main_of(name))
    gc.collect()
    gc.freeze()
    if command := _serve(control, IDLE):
        _begin(command)
    _leave(None)


def _begin(command: Sequence[str]) -> NoReturn:
    """In a fork, which has no use for whatever files the fork server inherited."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    code: object = None
    try:
        become(command)
    except SystemExit as end:
        code = end.code
    _leave(code)


def _leave(code: object) -> NoReturn:
    """As `sys.exit`, but nothing that is loaded is freed: that would copy most of what a fork shares, for 0.2 s."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at any end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _serve(control: socket.socket, idle: float | None = None) -> list[str]:
    """The command of a fork, in the fork; nothing in the fork server, once nobody can ask it any more or does."""
    server, forks, room = os.getpid(), 0, bytearray(LARGEST)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        ready.register(ours, selectors.EVENT_READ)
        while True:
            found = ready.select(None if forks else idle)
            if not found and not forks:
                return []
            for key, _ in found:
                if key.fileobj is ours:
                    ours.recv(LARGEST)
                    forks -= _report(control)
                    continue
                size, file = _receive(control, room)
                if not size:
                    return []
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (ours, theirs, control):
                        end.close()
                    return _settle(Asked(*json.loads(room[:size])), file, server)
                room[:size] = bytes(size)  # a later fork must not find this one's environment in its memory
                forks += 1
                os.close(file)
                control.send(json.dumps({"started": pid}).encode())


def _receive(control: socket.socket, room: bytearray) -> tuple[int, int]:
    """A request into `room`: its size, 0 at the end, and the file that came with it."""
    size, extra, *_ = control.recvmsg_into([room], socket.CMSG_LEN(FILE.size))
    return size, FILE.unpack(extra[0][2])[0] if extra else -1


def _report(control: socket.socket) -> int:
    """Tell which forks have exited; returns how many."""
    count = 0
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return count
        if not pid:
            return count
        count += 1
        control.send(json.dumps({"exited": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _settle(asked: Asked, output: int, server: int) -> list[str]:
    """In a fork: take on what a new process of this command would have."""
    command = list(asked.command)
    if asked.own_session:
        os.setsid()
    if asked.ends_with_server:
        die_with_parent()
        if os.getppid() != server:
            sys.exit("the fork server is gone")
    nothing = os.open(os.devnull, os.O_RDONLY)
    for theirs, ours in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(theirs, ours)
    for file in (nothing, output):
        os.close(file)
    os.environ.clear()
    os.environ.update(asked.env)
    tempfile.tempdir = None
    sys.orig_argv = command
    _show(command)
    return command


def _show(command: Sequence[str]) -> None:
    """Let `ps` show the command: write it over our own command line, as far as there is room.

    The kernel takes a command line whose last byte is not zero for one that was changed, and ends it at the first zero.
    """
    start, end = LINE
    line = " ".join(command).encode()[: end - start - 2]
    ctypes.memmove(start, (line + b"\0").ljust(end - start), end - start)


def _readable(control: socket.socket) -> bool:
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        return bool(ready.select(0))


if __name__ == "__main__":
    from fl_privacy.deploy import forkserver  # forks ask this module, not its copy that runs as the main one

    forkserver.main()
