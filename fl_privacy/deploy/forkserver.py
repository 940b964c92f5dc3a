"""`python -m fl_privacy.deploy.forkserver MODULE ...`: load modules once, then fork a process for each request.

Importing torch or Flower takes longer than most short runs train, and a federation on one machine would do it once for
every site. A fork behaves like the command it was asked for: its own session, log, environment and command line. It
has one thread and no secrets to inherit, because the fork server has only imported modules.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fl_privacy.deploy.parent import die_with_parent, dying_with_us

LARGEST = 2**17  # bytes of a message
ROOM = " " * 4096  # the last argument of the fork server: a fork writes its own command line over it
CMDLINE = slice(45, 47)  # fields of /proc/self/stat after the name: where the command line starts and ends
POLL = 0.02
_forked = False


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
    """A process that forks others on request. It ends with us, and its forks end with it."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """`env` is what the modules see while they load; each fork has an environment of its own after that."""
        self._command = [sys.executable, "-m", __name__, *modules, ROOM]
        self._env = dict(env)
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}  # of those that have exited
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def load(self) -> None:
        """Begin to load the modules, in the background; a fork server that was killed is started again."""
        with self._lock:
            self._load()

    def start(self, command: Sequence[str], env: Mapping[str, str], output: BinaryIO) -> Forked:
        """Fork a process that runs `command`; OSError if that is not possible."""
        asked = json.dumps({"command": list(command), "env": dict(env)}).encode()
        with self._lock:
            control = self._load()
            socket.send_fds(control, [asked], [output.fileno()])
            while (told := self._read(control)) is not None:
                if "started" in told:
                    self._running.add(told["started"])
                    return Forked(self, told["started"])
            self._close()
        raise BrokenPipeError("the fork server exited")

    def exited(self, pid: int) -> int | None:
        """The exit code of a fork, or None while it runs."""
        with self._lock:
            while self._control is not None and _readable(self._control):
                if self._read(self._control) is None:
                    self._close()
            return self._codes.pop(pid, None)

    def stop(self) -> None:
        with self._lock:
            self._close()

    def _load(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    dying_with_us(self._command),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,  # what fails here fails again in a process of its own, with a log
                    stderr=subprocess.DEVNULL,
                    env=self._env,
                    start_new_session=True,
                )
        return self._control

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
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
        self._codes |= dict.fromkeys(self._running, -signal.SIGTERM)  # they end with their fork server
        self._running.clear()


def become(command: Sequence[str]) -> None:
    """Run a command in place of this process: by `exec`, or in a fork with what it has loaded."""
    program, *rest = command
    if not _forked:
        os.execvp(program, list(command))
    elif program == sys.executable and rest[0] == "-m":
        sys.modules.pop(_main_of(rest[1]), None)  # it runs as the main module, with its own imports loaded
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif Path(program).parent == Path(sys.executable).parent:  # a script of this environment
        sys.argv = list(command)
        runpy.run_path(program, run_name="__main__")
    else:
        os.execvp(program, list(command))


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
    if command := _serve(control):
        become(command)


def _serve(control: socket.socket) -> list[str]:
    """The command of a fork, in the fork; nothing in the fork server, once nobody can ask it any more."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        ready.register(ours, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is ours:
                    ours.recv(LARGEST)
                    _report(control)
                    continue
                text, files, *_ = socket.recv_fds(control, LARGEST, 1)
                if not text:
                    return []
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (ours, theirs, control):
                        end.close()
                    return _settle(json.loads(text), files[0])
                os.close(files[0])
                control.send(json.dumps({"started": pid}).encode())


def _report(control: socket.socket) -> None:
    """Tell which forks have exited."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        control.send(json.dumps({"exited": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _settle(asked: dict[str, Any], output: int) -> list[str]:
    """In a fork: take on what a new process of this command would have."""
    global _forked
    parent, command = os.getppid(), [str(word) for word in asked["command"]]
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        sys.exit("the fork server is gone")
    nothing = os.open(os.devnull, os.O_RDONLY)
    for theirs, ours in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(theirs, ours)
    for file in (nothing, output):
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    _forked, sys.orig_argv = True, command
    _show(command)
    return command


def _show(command: Sequence[str]) -> None:
    """Let `ps` show the command: write it over our own command line, as far as there is room.

    The kernel takes a command line whose last byte is not zero for one that was changed, and ends it at the first zero.
    """
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[CMDLINE])
    line = " ".join(command).encode()[: end - start - 2]
    ctypes.memmove(start, (line + b"\0").ljust(end - start), end - start)


def _readable(control: socket.socket) -> bool:
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        return bool(ready.select(0))


if __name__ == "__main__":
    from fl_privacy.deploy import forkserver  # forks ask this module, not its copy that runs as the main one

    forkserver.main()
