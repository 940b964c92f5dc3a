"""A site's end of route `mixes` where sums are checked: it commits before it sends, and answers for what it sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from fl_privacy.crypto import keys, merkle
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.pki import load_key
from fl_privacy.mix import check, evidence
from fl_privacy.mix.evidence import Answered, Commitment, Opened, Sum
from fl_privacy.round.board import ANSWERS, LOST, NONCE, SUMS, keys_in
from fl_privacy.round.spoken import Spoken
from fl_privacy.routes.mixes import SEED
from fl_privacy.routes.sharing import Part, Sharing, share_of
from fl_privacy.steps.base import At
from fl_privacy.wire import client

if TYPE_CHECKING:
    from fl_privacy.routes.ends import SiteSeat
    from fl_privacy.routes.mixes import MixesRoute

DENIED = "PERMISSION_DENIED"
NOT_OPEN = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)


class Answering(Sharing):
    """One site of a run."""

    def __init__(self, route: MixesRoute, seat: SiteSeat) -> None:
        super().__init__(route, seat)
        self._spoken, self._signer = Spoken(seat.state), load_key(seat.keys.key_file)
        self._leaves: list[bytes] = []
        self._root = ""

    @property
    def _mixes(self) -> tuple[str, ...]:
        return tuple(f"mix-{index}" for index in self._chosen)

    def _nonce(self, at: At) -> bytes:
        return keys.derive(self._keys.key_file.read_bytes(), at.run, at.round, at.attempt, "nonce of a check")

    def _papers(self, at: At, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """The signed root, and the path of every part to it."""
        if at.farewell:
            return [{} for _ in parts]
        digests = {mix: part.digest for mix, part in zip(self._mixes, parts, strict=True)}
        self._leaves = evidence.leaves(at.attempt, self._seat.site, self._nonce(at), digests)
        made = Commitment(attempt=at.attempt, site=self._seat.site, root=merkle.root(self._leaves).hex())
        kept = self._spoken.commits(at.run, evidence.signed(made, self._signer))
        self._root = kept.root
        signed = {"root": bytes.fromhex(kept.root), "signature": bytes.fromhex(kept.signature)}
        return [{**signed, "path": merkle.path(self._leaves, 1 + place)} for place in range(len(parts))]

    def _answer(self, at: At, parts: Sequence[Part], terms: Sequence[Mapping[str, Any]]) -> None:
        """The update is delivered: what fails from here on is for the server to try again, and no reason to abstain.

        A mix that was restarted needs its part again. The others have theirs, and none of them asks for it, so the site
        sends it without being asked; a mix whose attempt is not open again yet is asked until it is.
        """
        for _ in range(0 if at.farewell else self._federation.attempts):
            try:
                return self._take_part(at, parts)
            except (ProtocolError, grpc.RpcError) as error:
                reason = client.explain(error) if isinstance(error, grpc.RpcError) else str(error)
            self._seat.log("not-answered", **at.where, reason=reason)
            if not reason.endswith(LOST):
                return None
            try:
                self._send(parts, terms, *NOT_OPEN)
            except (ProtocolError, grpc.RpcError):
                return None
        return None

    def _take_part(self, at: At, parts: Sequence[Part]) -> None:
        """Read the sums, open the nonce, and answer the challenge; nothing is opened for sums that break a rule."""
        with self._metrics.phase("answering"):
            sums = tuple(map(Sum.decode, self._read(at, SUMS)))
            key = keys_in(sums, self._keys.roster(), self._mixes)
            early = evidence.compared(sums, self._mixes, at.attempt, key)
            require(not early, "; ".join(map(str, early)), DENIED)
            own = [member for member in sums[0].members if member.site == self._seat.site]
            if not own:
                return
            self._check(sums, own[0])
            opened = list(map(Opened.decode, self._read(at, NONCE, self._opens(at, sums).encode())))
            seed = evidence.challenge(sums, opened, at.attempt, key)
            self._read(at, ANSWERS, self._answers(at, parts, seed).encode())

    def _opens(self, at: At, sums: Sequence[Sum]) -> Opened:
        """The nonce, signed for these sums, and on the disk that it is for no others."""
        which, path = evidence.together(sums), tuple(step.hex() for step in merkle.path(self._leaves, 0))
        self._spoken.opens(at.run, at.attempt, which)
        nonce = self._nonce(at).hex()
        made = Opened(attempt=at.attempt, site=self._seat.site, sums=which, nonce=nonce, path=path)
        return evidence.signed(made, self._signer)

    def _check(self, sums: Sequence[Sum], own: Commitment) -> None:
        """The sums name what this site signed, among enough others."""
        require(own.root == self._root, "root: not the one that this site signed", DENIED)
        count, floor = self._keys.roster().organisations(sums[0].sites), self._seat.floor()
        require(count >= floor, f"members: of {count} organisations, and this site wants {floor}", DENIED)

    def _answers(self, at: At, parts: Sequence[Part], seed: bytes) -> Answered:
        coding = self._route.coding(self._federation)
        columns, found = self._route.columns(self._federation, self._layout.size), dict[str, str]()
        for mix, part in zip(self._mixes, parts, strict=True):
            share = share_of(part.payload.tobytes(), coding, columns, part.coding is SEED)
            found[mix] = evidence.packed(check.answers(share, coding.moduli, seed, self._route.masks))
        made = Answered(attempt=at.attempt, seed=seed.hex(), by=self._seat.site, answers=found)
        return evidence.signed(made, self._signer)
