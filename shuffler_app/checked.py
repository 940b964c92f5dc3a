"""A mix whose sums are checked: it signs them, and if one fails, it shows what it counted."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives import serialization

from fl_privacy.coding import Payload
from fl_privacy.crypto import merkle
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import certificate_of, peer
from fl_privacy.mix import check, evidence
from fl_privacy.mix.evidence import Answered, Commitment, Opened, Opening, Sum
from fl_privacy.rns.residues import unpack
from fl_privacy.round import statements
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.board import ANSWERS, LOST, NONCE, OPEN, PAGE, RECOUNT, SILENT, SUMS, Board, keys_in, pages
from fl_privacy.routes.mixes import SEED
from fl_privacy.routes.sharing import share_of
from fl_privacy.wire import federation_pb2 as pb

from .adding import Mix

MAX_WAIT = 60.0


class CheckedMix(Mix):
    """What it signs about an attempt is in its journal first: it never signs two sums."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._boards: dict[str, Board] = {}  # by attempt
        self._silent: set[str] = set()  # attempts that were released before this process was started

    def signed_by(self, attempt: Attempt, client: str, header: pb.VectorHeader, context: Any) -> object:
        """The root that the site signed, which this part must be under."""
        if attempt.round.spec.farewell:
            return None
        chosen = self._route.taking_part(attempt.terms.number, attempt.terms.farewell)
        made = Commitment(
            attempt=attempt.terms.name, site=client, root=header.root.hex(), signature=header.signature.hex()
        )
        key: Any = certificate_of(context).public_key()
        short = len(header.root) == merkle.SIZE and len(header.signature) <= 256 and len(header.path) <= 16
        require(short and evidence.holds(made, key), "root: this site did not sign it for this attempt")
        leaf = evidence.part_leaf(attempt.terms.name, client, self._name, header.digest)
        place = 1 + chosen.index(self._index)
        below = evidence.under(made.root, leaf, place, len(chosen), list(header.path))
        require(below, "path: this part is not under the root that its sender signed")
        der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return made, tuple(bytes(step) for step in header.path), der.hex()

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        await super().reopened(state, attempt)
        # A recount after a restart might be for another challenge than one before it: masks hide one answer only.
        name, before = attempt.terms.name, state.attempt
        if before is not None:
            self._boards.pop(before.terms.name, None)
        self._boards[name] = Board(self._mixes(attempt))
        if self.journal.released(name) is not None:
            self._silent.add(name)

    async def finish(self, request: pb.FinishRequest, context: Any) -> pb.FinishReply:
        found = await super().finish(request, context)
        open_now = {state.attempt.terms.name for state in self.runs.values() if state.attempt is not None}
        self._boards = {name: board for name, board in self._boards.items() if name in open_now}
        return found

    def _mixes(self, attempt: Attempt) -> tuple[str, ...]:
        return tuple(f"mix-{index}" for index in self._route.taking_part(attempt.terms.number, attempt.terms.farewell))

    async def vouch(self, attempt: Attempt, clients: Sequence[str], header: pb.ReleaseHeader, total: Payload) -> None:
        papers = [attempt.papers[client] for client in clients]
        residues = self._residues(attempt, total)
        digest = await asyncio.to_thread(evidence.digest_of, residues)
        keys = {client: der for client, (_, _, der) in zip(clients, papers, strict=True)}
        keys[self._name] = statements.public(self.signing_key).hex()
        members = tuple(made for made, _, _ in papers)
        made = Sum(attempt=attempt.terms.name, mix=self._name, members=members, digest=digest, keys=keys)
        await self.journalled(self.journal.sign, attempt.terms.name, hashlib.sha256(made.text()).hexdigest())
        header.statement = evidence.signed(made, self.signing_key).encode()

    def _residues(self, attempt: Attempt, total: Payload) -> Any:
        coding = self._route.coding(self.federation)
        return unpack(total, coding.moduli, self._columns(attempt))

    async def check(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        """Sites and the server say and read what belongs to the check of an open attempt."""
        parts = {"server": self._of_server, "site": self._of_site}
        return await parts[peer(context, self.federation.name, *parts).role](request, context)

    async def _of_site(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        site = self._site(context)
        attempt = self._attempt(request.run, request.round, request.attempt)
        self._check_invited(attempt, site)
        board = self._board(attempt)
        if request.stage == NONCE:
            board.put_nonce(site, _one(Opened, request))
        elif request.stage == ANSWERS:
            board.put_answers(site, _one(Answered, request))
            return pb.CheckReply(complete=True)
        require(request.stage in (SUMS, NONCE), "stage: unknown here")
        return await self._read(attempt, board, request, site)

    async def _of_server(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        attempt = self.asked(request, context)
        board = self._board(attempt)
        if request.stage == SUMS:
            sums = tuple(map(Sum.decode, request.said))
            require(len(sums) == len(board.mixes), f"sums: {len(sums)} of {len(board.mixes)} mixes")
            self._check_ours(attempt, sums)
            board.put_sums(sums, attempt.terms.name, keys_in(sums, self.keys.roster(), board.mixes))
            return pb.CheckReply(complete=True)
        if request.stage in (NONCE, ANSWERS):
            return await self._read(attempt, board, request, "")
        if request.stage == SILENT:
            return reply([site.encode() for site in board.silent()], request)
        require(request.stage in (RECOUNT, OPEN), "stage: unknown here")
        require(
            attempt.terms.name not in self._silent,
            "check: this mix was restarted and cannot recount",
            "FAILED_PRECONDITION",
        )
        if request.stage == RECOUNT:
            for data in request.said:
                one = Opened.decode(data)
                board.put_nonce(one.site, one)
            if not board.recount:
                board.recount = (await asyncio.to_thread(self._recount, attempt, board)).encode()
            return reply(cut(board.recount), request)
        answered = _one(Answered, request)
        if board.opening[0] != request.said[0]:
            found = await asyncio.to_thread(self._opening, attempt, board, answered)
            board.opening = request.said[0], found.encode()
        return reply(cut(board.opening[1]), request)

    def _check_ours(self, attempt: Attempt, sums: Sequence[Sum]) -> None:
        """The sum that stands for this mix is the one that it signed."""
        require(attempt.result is not None, "sums: this mix has not released its own yet", "FAILED_PRECONDITION")
        assert attempt.result is not None
        own = Sum.decode(attempt.result[0].statement)
        same = any(one.mix == self._name and one.text() == own.text() for one in sums)
        require(same, "sums: not the one that this mix signed", "PERMISSION_DENIED")

    def _board(self, attempt: Attempt) -> Board:
        board = self._boards.get(attempt.terms.name)
        if board is None or attempt.gone.is_set():
            raise ProtocolError("FAILED_PRECONDITION", "check: the attempt is over")
        return board

    async def _read(self, attempt: Attempt, board: Board, request: pb.CheckRequest, site: str) -> pb.CheckReply:
        """What all have said in a stage, as soon as they have."""
        until = time.monotonic() + min(max(0.0, request.wait), MAX_WAIT)
        while (said := board.said(request.stage)) is None:
            self._board(attempt)
            again = bool(site) and attempt.awaits(site)
            require(not again, LOST, "FAILED_PRECONDITION")
            left = until - time.monotonic()
            if left <= 0:
                return pb.CheckReply()
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await board.changed.wait()
            except TimeoutError:
                continue
        return reply(said, request)

    def _recount(self, attempt: Attempt, board: Board) -> Answered:
        """Our answer for every part, to the one challenge of this attempt."""
        seed, coding = board.seed(), self._route.coding(self.federation)
        found = {
            member.site: evidence.packed(
                check.answers(self._share(attempt, member.site), coding.moduli, seed, self._route.masks)
            )
            for member in board.sums[0].members
        }
        made = Answered(attempt=attempt.terms.name, seed=seed.hex(), by=self._name, answers=found)
        return evidence.signed(made, self.signing_key)

    def _share(self, attempt: Attempt, site: str) -> Any:
        (row,) = self._rows(attempt, [site])
        coding = self._route.coding(self.federation)
        return share_of(row.tobytes(), coding, self._columns(attempt), attempt.coding is SEED)

    def _opening(self, attempt: Attempt, board: Board, answered: Answered) -> Opening:
        """One part; only if its site signed another answer for it than ours to this challenge."""
        seed, key = board.seed(), keys_in(board.sums, self.keys.roster(), board.mixes)
        site = answered.by
        member = any(one.site == site for one in board.sums[0].members)
        own = (answered.attempt, answered.seed) == (attempt.terms.name, seed.hex())
        own = own and set(answered.answers) == set(board.mixes)  # one that is missing is no dispute
        require(
            member and own and evidence.holds(answered, key(site)),
            "answers: not signed by a member",
            "PERMISSION_DENIED",
        )
        coding = self._route.coding(self.federation)
        ours = evidence.packed(check.answers(self._share(attempt, site), coding.moduli, seed, self._route.masks))
        require(answered.answers.get(self._name) != ours, "answers: there is no dispute", "PERMISSION_DENIED")
        (row,) = self._rows(attempt, [site])
        path = tuple(step.hex() for step in attempt.papers[site][1])
        return Opening(site=site, mix=self._name, part=row.tobytes().hex(), path=path)


def _one(kind: Any, request: pb.CheckRequest) -> Any:
    require(len(request.said) == 1, f"said: {len(request.said)} statements, one is needed")
    return kind.decode(request.said[0])


def cut(data: bytes) -> list[bytes]:
    return [data[at : at + PAGE] for at in range(0, len(data), PAGE)]


def reply(said: Sequence[bytes], request: pb.CheckRequest) -> pb.CheckReply:
    found, complete = pages(said, request.after)
    return pb.CheckReply(said=found, complete=complete)
