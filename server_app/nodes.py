"""The sites as Flower sees them: who is connected, tickets to them, receipts from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fl_privacy.coding import Coding, Payload
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError, RoundFailed
from fl_privacy.vector import Vector
from fl_privacy.wire.stream import data_bytes

POLL = 0.2
GRACE = 10.0  # seconds
RECEIPTS = ("done", "abstain")


class Nodes:
    """Flower's control plane, with a deadline on every wait."""

    def __init__(self, grid: Grid, federation: Federation) -> None:
        self._grid, self._federation = grid, federation
        self._ids: dict[str, int] = {}
        self._pending: dict[str, str] = {}
        self._simulated = False
        self._seen: dict[str, float] = {}

    def wait(self, report: Callable[[int], None] = lambda count: None) -> list[str]:
        """The names of the connected sites: all of them, or after the deadline at least a quorum."""
        until, reported = time.monotonic() + self._federation.deadline, -1
        while True:
            self._ids = self._named()
            if len(self._ids) != reported:
                reported = len(self._ids)
                report(reported)
            if len(self._ids) == len(self._federation.sites) or time.monotonic() > until:
                break
            time.sleep(POLL)
        if len(self._ids) < self._federation.quorum:
            came = f"{len(self._ids)} of {len(self._federation.sites)} came in {self._federation.deadline:g} s"
            raise FederationError(f"sites: {came}, and the quorum is {self._federation.quorum}; see the sites' logs")
        return sorted(self._ids)

    def present(self) -> list[str]:
        """The sites connected now; if these are fewer than a quorum, all that ever were: they may come back."""
        now = self.refresh()
        return now if len(now) >= self._federation.quorum else sorted(self._ids)

    def refresh(self) -> list[str]:
        """The sites connected now or a moment ago: a short absence must not change who is drawn into a cohort."""
        now = time.monotonic()
        self._seen |= dict.fromkeys(self._now(), now)
        return sorted(site for site, seen in self._seen.items() if now - seen <= GRACE)

    def knows(self, site: str) -> bool:
        """Whether a site was ever connected."""
        return site in self._ids

    def await_back(self, sites: Iterable[str]) -> None:
        """Wait until all of these are back, or for one deadline: Flower refuses a killed node for a minute."""
        until, wanted = time.monotonic() + self._federation.deadline, set(sites)
        while not self._simulated and not wanted <= set(self._now()) and time.monotonic() < until:
            time.sleep(POLL)

    def _now(self) -> dict[str, int]:
        """The ids of the sites connected now; a site that came back may have another one."""
        named = self._ids if self._simulated else self._named()
        self._ids = self._ids | named
        return named

    def _named(self) -> dict[str, int]:
        """Site name to node id. In simulation nodes have no name; each is asked once for its partition."""
        known = set(self._federation.site_names)
        nodes = list(self._grid.get_nodes())
        named = {node.name: int(node.node_id) for node in nodes if node.name in known}
        if named or len(nodes) != len(self._federation.sites) or any(node.name for node in nodes):
            return named
        self._simulated = True
        return self._ask([int(node.node_id) for node in nodes])

    def _ask(self, ids: list[int]) -> dict[str, int]:
        messages = [Message(RecordDict(), node, "query") for node in ids]
        named = {}
        for reply in self._grid.send_and_receive(messages, timeout=self._federation.deadline):
            if reply.has_content():
                partition = int(reply.content.config_records["site"]["partition"])  # type: ignore[arg-type]
                named[self._federation.site_names[partition]] = reply.metadata.src_node_id
        return named

    def send(self, sites: Iterable[str], ticket: dict[str, Any], model: Vector | None = None) -> None:
        """Push a ticket to each site without waiting for replies. A site's older ticket is forgotten."""
        sites = list(sites)
        packed = {} if model is None else {"model": ArrayRecord({"vector": _array(model)})}
        contents = {name: RecordDict({"ticket": ConfigRecord(ticket), **packed}) for name in sites}
        group = str(ticket["first"])
        messages = [Message(content, self._ids[name], "train", group_id=group) for name, content in contents.items()]
        ids = list(self._grid.push_messages(messages))
        lost = [name for name, id in zip(sites, ids, strict=False) if not id]
        if len(ids) != len(sites) or lost:
            raise RoundFailed(f"tickets: Flower refused {len(sites) - len(ids) or len(lost)} of {len(sites)}")
        kept = {id: name for id, name in self._pending.items() if name not in sites}
        self._pending = {**kept, **dict(zip(ids, sites, strict=True))}

    def receipts(self, coding: Coding) -> list[tuple[str, str, Payload | None]]:
        """(site, status, update) of the replies since the last call. Errors from Flower itself count as failed."""
        if not self._pending:
            return []
        found = []
        for reply in self._grid.pull_messages(list(self._pending)):
            if (site := self._pending.pop(reply.metadata.reply_to_message_id, None)) is not None:
                status = _status(reply)
                found.append((site, status, _update(reply, coding) if status == "done" else None))
        return found


def _array(model: Vector) -> Array:
    return Array(dtype="<f4", shape=model.shape, stype="raw", data=bytes(data_bytes(model)))


def _update(reply: Message, coding: Coding) -> Payload | None:
    """The update in a reply; only its size is checked, to be a multiple of a number's."""
    record = reply.content.array_records.get("update")
    if record is None or "vector" not in record:
        return None
    data = record["vector"].data
    return np.frombuffer(data, coding.type) if len(data) % coding.type.itemsize == 0 else None


def _status(reply: Message) -> str:
    if reply.has_error():
        return "failed"
    record = reply.content.config_records.get("receipt")
    raw = record.get("receipt") if record else None
    status = raw.rstrip(b"\0").decode("ascii", "replace") if isinstance(raw, bytes) else ""
    return status if status in RECEIPTS else "failed"
