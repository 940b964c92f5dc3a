"""The server's end of route `onions` where mixes are checked: sites reveal their dummies, and none may be missing."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.errors import ProtocolError, RoundFailed, require
from fl_privacy.identity.roster import Roster
from fl_privacy.mix import dummies
from fl_privacy.mix.batch import Revealed
from fl_privacy.mix.dummies import Case
from fl_privacy.mix.evidence import Verdict
from fl_privacy.round.board import MOST, NONCE, OPEN, SUMS, gathered
from fl_privacy.round.collector import CALL
from fl_privacy.round.member import POLL
from fl_privacy.routes.ends import Ask
from fl_privacy.routes.unwrapping import Unwrapping
from fl_privacy.transcript.events import Tampering
from fl_privacy.wire import federation_pb2 as pb

GAVE, SENT = "onions-", "sent-"  # and the name of a mix or a site: arrays of a void attempt


class Revealing(Unwrapping):
    """It reads what sites reveal at the first mix, and asks that mix for the onions of a site in dispute."""

    def _check(self, ask: Ask) -> None:
        try:
            case = self._case(ask)
            gave = [_split(data, self._route_size(place + 1)) for place, (_, data) in enumerate(self._batches)]
            lost = dummies.missing(case, gave)
            if not (lost or dummies.faked(case) or dummies.swapped(case)):
                return
            sent = self._sent(ask, case, {one.site for one in lost if one.place == 0})
        except ProtocolError as error:
            raise RoundFailed(f"the mixes could not be checked: {error}", ask.terms.number + 1) from None
        listed = {site: _split(data, self._route_size(0)) for site, data in sent.items()}
        raise self._void(ask, case, sent, dummies.judge(case, gave, listed))

    def _case(self, ask: Ask) -> Case:
        said = [one for one, _ in self._batches]
        roster = self._keys.roster()
        dummies.sound(said, self._route.middleware(), ask.attempt, roster.key_of)
        self._ask(ask, SUMS, [one.encode() for one in said])
        until = time.monotonic() + self._federation.deadline
        revealed = [Revealed.decode(one) for one in self._ask(ask, NONCE, (), until)]
        case = Case(
            attempt=ask.attempt,
            federation=self._federation.name,
            run=ask.run,
            round=ask.round,
            count=self._dummies,
            mixes=tuple(self._route.middleware()),
            said=tuple(said),
            revealed=tuple(revealed),
        )
        check(case, roster)
        return case

    def _sent(self, ask: Ask, case: Case, sites: Iterable[str]) -> dict[str, Payload]:
        """The onions of sites as the first mix got them, if it shows those that they signed."""
        found = dict[str, Payload]()
        for site in sorted(sites):
            try:
                data = np.frombuffer(b"".join(self._ask(ask, OPEN, [site.encode()])), np.uint8)
            except (grpc.RpcError, ProtocolError):
                continue  # it does not answer for itself, and the verdict says so
            if is_sent(case, site, data):
                found[site] = data
        return found

    def _ask(self, ask: Ask, stage: str, said: Sequence[bytes], until: float = 0.0) -> list[bytes]:
        end = max(until, time.monotonic() + self._federation.deadline)
        most = MOST + self._route.share_length(self._federation, self._size)

        def page(known: int) -> tuple[Sequence[bytes], bool]:
            while True:
                request = pb.CheckRequest(**ask.where, stage=stage, said=said, wait=POLL, after=known)
                reply = self._round.asked[0].check(request, timeout=POLL + CALL)
                if reply.said or reply.complete:
                    return reply.said, reply.complete
                require(time.monotonic() < until, "check: not all sites revealed their dummies in time; see their logs")

        return gathered(page, end, most)

    def _void(self, ask: Ask, case: Case, sent: Mapping[str, Payload], verdicts: Sequence[Verdict]) -> RoundFailed:
        """Nothing is combined; what was said and every batch is recorded, so that others find the same."""
        told = tuple(map(str, verdicts))
        event = Tampering(case=case.model_dump_json(), roster=self._keys.roster_file.read_text(), verdicts=told)
        seen = {GAVE + one.by: data for one, data in self._batches}
        seen |= {SENT + site: data for site, data in sent.items()}
        return RoundFailed(f"void: {'; '.join(told)}", ask.terms.number + 1, seen, [event])


def check(case: Case, roster: Roster) -> None:
    """Refuse a case in which anybody says what is not signed, or not of this attempt."""
    members = [one.by for one in case.said[0].members]
    named = [one.by for one in case.revealed]
    require(sorted(named) == members, "check: not every site that was counted revealed its dummies once")
    for one in case.revealed:
        one.check(case.attempt, one.by, roster.key_of("site", one.by))
        require(one.given == case.said[-1].given, f"check: {one.by} revealed its dummies for other batches")
        require(case.agrees(one), f"check: {one.by} made its dummies for another round or config")


def is_sent(case: Case, site: str, data: Payload) -> bool:
    """Whether these are the onions that a site signed."""
    signed = next((one.digest for one in case.said[0].members if one.by == site), "")
    return hashlib.sha256(data.tobytes()).hexdigest() == signed


def judged(
    case: Case, arrays: Mapping[str, Any], mixes: Sequence[str], sizes: Sequence[int], roster: Roster
) -> list[Verdict]:
    """The verdicts that follow from a case and the batches recorded with it."""
    require(case.mixes == tuple(mixes), "case: of other mixes than the run's")
    dummies.sound(case.said, mixes, case.attempt, roster.key_of)
    check(case, roster)
    gave = [np.asarray(arrays[GAVE + one.by]) for one in case.said]
    for one, data in zip(case.said, gave, strict=True):
        same = hashlib.sha256(data.tobytes()).hexdigest() == one.given
        require(same, f"{one.by}: the batch recorded is not the one that it signed")
    batches = [_split(data, size) for data, size in zip(gave, sizes[1:], strict=False)]
    shown = {name.removeprefix(SENT): np.asarray(data) for name, data in arrays.items() if name.startswith(SENT)}
    sent = {site: _split(data, sizes[0]) for site, data in shown.items() if is_sent(case, site, data)}
    return dummies.judge(case, batches, sent)


def _split(data: Payload, size: int) -> set[bytes]:
    whole = data.tobytes()
    return {whole[start : start + size] for start in range(0, len(whole), size)}
