"""Sites of an agreement in one process, over one mailbox without a network."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_privacy.errors import ProtocolError
from fl_privacy.identity import accepted
from fl_privacy.identity.keyring import Keyring
from fl_privacy.round.agreeing import Agreeing, Pace
from fl_privacy.round.mailbox import Mailbox
from fl_privacy.wire import federation_pb2 as pb
from helpers import Keys

FAST = Pace(busy=0.02, idle=0.2, settled=1.0, resend=0.5, view=1.5, most_doublings=3, looking=10.0)


@dataclass
class Post:
    """A mailbox, and everything that passed through it."""

    boxes: dict[str, Mailbox] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    hidden: dict[str, set[str]] = field(default_factory=dict)  # by site: whose letters it does not get


@dataclass
class Slot:
    """One site's stub."""

    post_office: Post
    site: str

    def post(self, letter: Any, timeout: float = 0) -> Any:
        with self.post_office.lock:
            made = pb.Letter(
                sender=self.site, **{n: getattr(letter, n) for n in ("run", "recipient", "topic", "content")}
            )
            self.post_office.seen.append(made.SerializeToString())
            self.post_office.boxes.setdefault(letter.run, Mailbox()).post(made, time.monotonic())
        return pb.Empty()

    def pickup(self, request: Any, timeout: float = 0) -> Any:
        with self.post_office.lock:
            box = self.post_office.boxes.setdefault(request.run, Mailbox())
            letters, last = box.pickup(self.site, request.topic, time.monotonic(), request.after)
        away = self.post_office.hidden.get(self.site, set())
        return pb.Letters(letters=[one for one in letters if one.sender not in away], last=last)


@dataclass
class House:
    """The sites of one roster, each with a folder of its own."""

    folder: Path
    count: int = 4
    post: Post = field(default_factory=Post)
    logs: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    wait: float = 60.0

    def __post_init__(self) -> None:
        self.keys = Keys(self.folder / "pki")
        self.sites: dict[str, Agreeing] = {}
        self.names = [f"site-{index}" for index in range(self.count)]
        for name in self.names:
            self.keys.of("site", name)
        self.accept()

    def accept(self) -> None:
        """Every operator accepts the newest roster."""
        for name in self.names:
            self.state(name).mkdir(parents=True, exist_ok=True)
            accepted.accept(Keyring(self.keys.of("site", name).folder).roster(), self.state(name))

    def state(self, name: str) -> Path:
        return self.folder / "state" / name

    def start(self, *names: str, pace: Pace = FAST) -> None:
        for name in names or self.names:

            def log(event: str, _name: str = name, **fields: Any) -> None:
                self.logs.append((_name, event, fields))

            keys = Keyring(self.keys.of("site", name).folder, self.state(name))
            slot = Slot(self.post, name)
            made = Agreeing("test", name, keys, self.state(name), lambda slot=slot: slot, self.wait, log, pace)
            self.sites[name] = made.start()

    def stop(self, *names: str) -> None:
        for name in names or list(self.sites):
            self.sites.pop(name).stop()

    def events(self, event: str) -> list[tuple[str, dict[str, Any]]]:
        return [(name, fields) for name, found, fields in self.logs if found == event]


def problem_of(site: Agreeing) -> str:
    try:
        site.agreed()
    except ProtocolError as error:
        return str(error)
    return ""
