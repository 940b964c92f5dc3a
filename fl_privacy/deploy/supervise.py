"""Processes that are restarted when they exit: those of a kit, and those of a run on this machine."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fl_privacy.addresses import parse
from fl_privacy.deploy.commands import START, Process
from fl_privacy.deploy.processes import Child, Fleet
from fl_privacy.errors import LaunchError
from fl_privacy.ops.log import Log
from fl_privacy.ops.tail import Tail

POLL = 0.05
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
STEADY = 60.0  # seconds of running after which the pause before a restart is short again
OFTEN = 5  # exits within as many seconds: a run on this machine fails
FATAL = 2  # exit code of our processes for an error that somebody must fix
FAMILY_EVERY = 1.0  # seconds


class Backoff:
    """When something that keeps exiting is started again, and when to give it up."""

    def __init__(self, limit: int | None = None) -> None:
        """With a `limit`, so many exits within STEADY seconds are too many."""
        self._limit = limit
        self._exits: deque[float] = deque(maxlen=32)

    @property
    def pause(self) -> float:
        """Seconds to wait after the last exit."""
        return min(FIRST_PAUSE * 2.0 ** (len(self._exits) - 1), LONGEST_PAUSE)

    def exited(self, now: float, born: float) -> bool:
        """Note an exit of what started at `born`; False if there were too many."""
        if now - born > STEADY:
            self._exits.clear()
        self._exits.append(now)
        recent = sum(now - at <= STEADY for at in self._exits)
        return self._limit is None or recent < self._limit


@dataclass
class Watched:
    """A process and its recent history; `renew` is called before it is started again."""

    process: Process
    env: Mapping[str, str]
    renew: Callable[[], None] = lambda: None
    backoff: Backoff = field(default_factory=Backoff)
    born: float = 0.0
    due: float = 0.0
    up: bool = False
    address: str = ""  # where it says that it listens
    tail: Tail | None = None

    @property
    def name(self) -> str:
        return self.process.name

    def answers(self) -> bool:
        """Whether the process is up: it says that it listens, or a port of it accepts connections."""
        if not self.process.announces:
            return self.process.port is None or reachable(self.process.port)
        assert self.tail is not None
        for event in self.tail.poll():
            if event["event"] == "listening":
                self.address = str(event["address"])
                return True
        return False


@dataclass
class Supervisor:
    """Starts processes, and starts again what exited, with a growing pause."""

    fleet: Fleet
    log: Log
    watched: list[Watched] = field(default_factory=list)
    in_order: bool = False  # each starts once the one before it is up
    _looked: float = 0.0

    def step(self) -> None:
        """Look at every process once; LaunchError if one cannot be helped."""
        for one in self.watched:
            self._step(one)
            if self.in_order and not one.up:
                return  # the next ones need it
        self._look_at_families()

    def start(self, one: Watched) -> None:
        """Start a process at once, and watch it."""
        self._start(one, time.monotonic())
        self.watched.append(one)

    def wait(self, one: Watched) -> None:
        """Until it is up."""
        while not one.up:
            self.step()
            time.sleep(POLL)

    @property
    def all_up(self) -> bool:
        return all(one.up for one in self.watched)

    def _step(self, one: Watched) -> None:
        now = time.monotonic()
        child = self.fleet.children.get(one.name)
        if child is None:
            if now >= one.due:
                self._start_again(one, now)
        elif child.process.poll() is not None:
            self._fallen(one, child, now)
        elif not one.up:
            self._look_up(one, child, now)

    def _look_up(self, one: Watched, child: Child, now: float) -> None:
        one.up = one.answers()
        if one.up:
            self.log("up", process=one.name)
        elif now - one.born > START:
            raise LaunchError(f"{one.name} not up within {START:g} s: {child.tail()} (log: {child.log})")

    def _start(self, one: Watched, now: float) -> None:
        process = one.process
        child = self.fleet.start(process.name, process.command, one.env, process.confined)
        one.born, one.up, one.tail = now, False, Tail(child.log)

    def _start_again(self, one: Watched, now: float) -> None:
        try:
            if one.born:
                one.renew()
        except LaunchError as error:  # what it needs is away too
            self.log("waiting", process=one.name, reason=str(error))
            one.due = now + FIRST_PAUSE
            return
        self._start(one, now)

    def _fallen(self, one: Watched, child: Child, now: float) -> None:
        code, why = child.process.returncode, child.why()
        self.fleet.bury(one.name)
        if one.address:  # others know it by the port that it chose
            one.process = one.process.listening_at(one.address)
        if code == FATAL and (self.in_order or not one.address):  # its port may be taken for a moment
            raise LaunchError(f"{one.name}: {why}")
        if not one.backoff.exited(now, one.born):
            raise LaunchError(f"{one.name} exited {OFTEN} times within {STEADY:g} s; last reason: {why}")
        one.up, one.due = False, now + one.backoff.pause
        self.log("fell", process=one.name, code=code, reason=why[:500], again_in=one.backoff.pause)

    def _look_at_families(self) -> None:
        """Remember whom a process started outside its own group, while that can still be found."""
        now = time.monotonic()
        if now - self._looked < FAMILY_EVERY:
            return
        self._looked = now
        if any(one.process.detaches for one in self.watched):
            self.fleet.remember_families()


def reachable(address: str) -> bool:
    """Whether a process listens there."""
    host, port = parse(address)
    try:
        with socket.create_connection(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port), 1.0):
            return True
    except OSError:
        return False
