"""What colluding sites of a simulated federation without a server saw of the others: parts of models or of updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from attacks.common.attack import Unsuitable
from attacks.common.fetched import Models
from attacks.membership import seen
from attacks.membership.seen import Ints, Part, Seen, Vector
from fl_privacy.config import Federation
from fl_privacy.errors import TranscriptError
from fl_privacy.roles import PEER
from fl_privacy.transcript.events import Row
from fl_privacy.transcript.read import View


def observe(views: Mapping[str, View], federation: Federation, models: Models, parameters: int) -> Iterator[Seen]:
    """Every round as these parties saw it; where sites are among them, as the sites did."""
    route, sites = federation.route, federation.route.observers(federation)
    peers = [view for name, view in views.items() if name in sites]
    if not peers:
        yield from seen.observe(views, federation, models, parameters)
        return
    own = peers[0].observer.removeprefix(PEER) if len(peers) == 1 else ""
    others, empty = [name for name in federation.site_names if name != own], True
    for round in sorted({number for view in peers for number in view.rounds}):
        there = [view for view in peers if round in view.rounds]
        messages = [message for view in there for message in received(view, round, parameters, route.sends_models)]
        if messages:
            empty = False
            yield Seen(round, _own(there[0], round), _next(there[0], round), parts(messages, others, parameters))
    if empty:
        raise Unsuitable(f"observer: {', '.join(views)} received nothing in this run; use another observer")


@dataclass(frozen=True)
class Received:
    """One message as an update at some coordinates; the sender is empty if the recipient does not know it."""

    sender: str
    where: Ints
    values: Vector


def received(view: View, round: int, parameters: int, models: bool) -> Iterator[Received]:
    """The messages of a round. One with a model tells an update as the difference to the recipient's own model."""
    arrays, own = view.round(round).arrays, _own(view, round)
    if "values" not in arrays:
        return
    sizes, values = arrays.get("sizes", np.empty(0, np.int64)), arrays["values"]
    everywhere = np.tile(np.arange(parameters), len(sizes))
    where = arrays.get("where", everywhere)
    sound = own.shape == (parameters,) and values.shape == where.shape == (int(sizes.sum()),) and (sizes >= 0).all()
    if not sound or (len(where) and not 0 <= where.min() <= where.max() < parameters):
        raise TranscriptError(f"{view.folder}: round {round} does not have the form of a site's view; record it again")
    names = {event.row: event.name for event in view.events(round) if isinstance(event, Row)}
    ends = np.cumsum(sizes)[:-1]
    for row, (at, sent) in enumerate(zip(np.split(where, ends), np.split(values, ends), strict=True)):
        yield Received(names.get(row, ""), at, sent - own[at] if models else sent)


def parts(messages: list[Received], others: list[str], parameters: int) -> dict[str, Part]:
    """By site: the union of what it sent. What has no sender may be anybody's: all share the mean of it."""
    found: dict[str, Part] = {}
    for sender in {message.sender for message in messages}:
        total, times = np.zeros(parameters), np.zeros(parameters, np.int64)
        for message in messages:
            if message.sender == sender:
                total[message.where] += message.values
                times[message.where] += 1
        where = np.flatnonzero(times)
        values = (total[where] / times[where]).astype(np.float32)
        members = 1 if sender else max(1, round(float(times[where].mean())))
        part = Part(values, None if len(where) == parameters else where, members)
        found |= dict.fromkeys([sender] if sender else others, part)
    return found


def _own(view: View, round: int) -> Vector:
    arrays = view.round(round).arrays
    if "model" not in arrays:
        raise TranscriptError(f"{view.folder}: round {round} has no model of the site's own; record it again")
    return arrays["model"]


def _next(view: View, round: int) -> Vector | None:
    return _own(view, round + 1) if round + 1 in view.rounds else None
