"""The server's end of route `mixes` where sums are checked: a round counts only if every sum passes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import grpc

from fl_privacy.errors import ProtocolError, RoundFailed, require
from fl_privacy.mix import evidence
from fl_privacy.mix.evidence import Answered, Case, Key, Opened, Opening, Sum, Verdict
from fl_privacy.mix.shares import Residues
from fl_privacy.round.board import ANSWERS, MOST, NONCE, OPEN, RECOUNT, SILENT, SUMS, gathered, keys_in
from fl_privacy.round.collector import CALL
from fl_privacy.round.member import POLL
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat
from fl_privacy.routes.sharing import share_of
from fl_privacy.routes.totals import AtServer
from fl_privacy.transcript.events import Tampering
from fl_privacy.wire import client, federation_pb2 as pb

if TYPE_CHECKING:
    from fl_privacy.routes.mixes import MixesRoute


class Verifying(AtServer):
    """It reads the answers of the sites at the first mix, and asks a mix whose sum fails what it counted."""

    def __init__(self, route: MixesRoute, seat: ServerSeat) -> None:
        super().__init__(route, seat)
        self._keys = seat.keys

    def _verify(
        self,
        ask: Ask,
        outcome: Outcome,
        outputs: Mapping[str, Residues],
        releases: Sequence[client.Release],
        settled: Sequence[str],
    ) -> None:
        try:
            case = self._case(ask, list(outputs), releases)
            if unfit := self._unfit(case, outputs, settled):
                raise RoundFailed(f"void: {'; '.join(map(str, unfit))}", ask.terms.number + 1)
            key = keys_in(case.sums, self._keys.roster(), case.mixes)
            early = evidence.compared(case.sums, case.mixes, case.attempt, key)
            if not early:
                case = self._answered(ask, case)
                failing = evidence.failing(case, outputs, key)
                if not failing:
                    return
                case = self._disputed(ask, case, failing, key)
            verdicts = early or evidence.judge(case, outputs, key, partial(self._share, ask))
        except ProtocolError as error:
            raise RoundFailed(f"the sums could not be checked: {error}", ask.terms.number + 1) from None
        raise self._void(ask, outcome, case, verdicts)

    def _case(self, ask: Ask, mixes: Sequence[str], releases: Sequence[client.Release]) -> Case:
        sums = tuple(_statement(mix, release) for mix, release in zip(mixes, releases, strict=True))
        return Case(
            attempt=ask.attempt,
            mixes=tuple(mixes),
            moduli=self._coding.moduli,
            challenges=self._route.masks,
            sums=sums,
            opened=(),
            answers=(),
        )

    def _unfit(self, case: Case, outputs: Mapping[str, Residues], settled: Sequence[str]) -> list[Verdict]:
        """The mixes whose sum cannot even be compared with the others'; what they did not sign proves nothing."""
        roster, found = self._keys.roster(), list[Verdict]()
        for mix, one in zip(case.mixes, case.sums, strict=True):
            if charge := charged(mix, one, case.attempt, settled, outputs[mix], keys_in([one], roster, case.mixes)):
                found.append(Verdict(mix, charge, proven=False))
        return found

    def _answered(self, ask: Ask, case: Case) -> Case:
        """With the nonces and the answers of all members, after every mix has the sums of all."""
        said = [one.encode() for one in case.sums]
        for place in range(len(case.mixes)):
            self._ask(ask, place, SUMS, said)
        until = time.monotonic() + self._federation.deadline
        opened = [Opened.decode(one) for one in self._waited(ask, NONCE, until)]
        answers = [Answered.decode(one) for one in self._waited(ask, ANSWERS, until)]
        return case.model_copy(update={"opened": tuple(opened), "answers": tuple(answers)})

    def _disputed(self, ask: Ask, case: Case, failing: Sequence[str], key: Key) -> Case:
        """With the recounts of the mixes whose sums fail, and the parts about which they and a site disagree."""
        recounts, openings = list[Answered](), list[Opening]()
        seed = evidence.challenge(case.sums, case.opened, case.attempt, key)
        nonces = [one.encode() for one in case.opened]
        for mix in failing:
            place = case.mixes.index(mix)
            try:
                recount = Answered.decode(b"".join(self._ask(ask, place, RECOUNT, nonces)))
                evidence.complete(recount, mix, case.sums[0].sites, seed, case, key)
                recounts.append(recount)
                case = case.model_copy(update={"recounts": tuple(recounts)})
                for site in evidence.disputes(case, mix):
                    said = next(one for one in case.answers if one.by == site).encode()
                    opening = Opening.decode(b"".join(self._ask(ask, place, OPEN, [said])))
                    asked = (opening.site, opening.mix) == (site, mix) and evidence.is_opening(opening, case)
                    require(asked, f"part: not the one that {site} sent to {mix}", "PERMISSION_DENIED")
                    openings.append(opening)
            except (grpc.RpcError, ProtocolError):
                continue  # it does not answer for itself, and the verdict says so
        return case.model_copy(update={"openings": tuple(openings)})

    def _waited(self, ask: Ask, stage: str, until: float) -> list[bytes]:
        """What all members say in a stage."""
        found = self._ask(ask, 0, stage, (), until)
        if not found:
            said = {one.decode("ascii", "replace") for one in self._ask(ask, 0, SILENT, ())}
            named = ", ".join(sorted(said & set(ask.cohort))) or "nobody"
            why = f"check: {self._first} says that it waits for {named} (not proven); see the sites' logs"
            raise ProtocolError("DEADLINE_EXCEEDED", why)
        return found

    @property
    def _first(self) -> str:
        return f"mix-{self._round.chosen[0]}"

    def _ask(self, ask: Ask, place: int, stage: str, said: Sequence[bytes], until: float = 0.0) -> list[bytes]:
        end = max(until, time.monotonic() + self._federation.deadline)
        most = MOST + 8 * self._route.share_length(self._federation, self._size)  # a part is in hexadecimal digits
        return gathered(lambda known: self._page(ask, place, stage, said, known, until), end, most)

    def _page(
        self, ask: Ask, place: int, stage: str, said: Sequence[bytes], known: int, until: float
    ) -> tuple[Sequence[bytes], bool]:
        while True:
            request = pb.CheckRequest(**ask.where, stage=stage, said=said, wait=POLL, after=known)
            reply = self._round.asked[place].check(request, timeout=POLL + CALL)
            if reply.said or reply.complete or time.monotonic() >= until:
                return reply.said, True if not reply.said else reply.complete

    def _share(self, ask: Ask, mix: str, part: bytes) -> Residues:
        seeded = mix != f"mix-{self._route.data_mix(ask.terms.number, ask.round)}"
        return share_of(part, self._coding, self._columns, seeded)

    def _void(self, ask: Ask, outcome: Outcome, case: Case, verdicts: Sequence[Verdict]) -> RoundFailed:
        """Nothing is combined; what was said is recorded, so that others find the same."""
        told = tuple(str(one) for one in verdicts)
        roster = self._keys.roster_file.read_text()
        event = Tampering(case=case.model_dump_json(), roster=roster, verdicts=told)
        seen = {name: array for name, array in outcome.seen.items() if name.startswith("sum-")}
        reason = "; ".join(told) or "a sum failed its check, and nobody is convicted"
        return RoundFailed(f"void: {reason}", ask.terms.number + 1, seen, [event])


def _statement(mix: str, release: client.Release) -> Sum:
    try:
        return Sum.decode(release.statement)
    except ProtocolError as error:
        raise ProtocolError(error.code, f"{mix}: {error}") from None


def charged(mix: str, one: Sum, attempt: str, settled: Sequence[str], output: Residues, key: Key) -> str:
    """What is wrong with a mix's statement by itself, if anything."""
    try:
        if (one.mix, one.attempt) != (mix, attempt) or not evidence.holds(one, key(mix)):
            return "did not sign its sum"
        for site in one.sites:
            key(site)
    except ProtocolError as error:
        return f"left a key out ({error})"
    if set(one.sites) != set(settled):
        return "signed a sum of other sites than the round was settled with"
    return "" if evidence.digest_of(output) == one.digest else "sent another sum than it signed"
