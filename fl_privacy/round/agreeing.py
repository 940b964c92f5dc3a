"""A site's part in its roster's agreement: drives the state machine over a mailbox, in a thread of its own.

The mailbox has one bulletin of every site (`fl_privacy.agreement.bulletin`), sealed for the others: nobody
can read or change it on the way. The site's state is on its disk, encrypted, before anybody sees what follows from it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from fl_privacy.agreement.machine import DEADLINE, RESEND, Agreed as Decided, Agreement, Named, Output, Send, Timer
from fl_privacy.agreement.saved import restore, save
from fl_privacy.agreement.secret import Agreed
from fl_privacy.agreement.terms import Terms, public
from fl_privacy.crypto import keys as secret_keys
from fl_privacy.errors import ProtocolError, reason_of
from fl_privacy.files import make_folder, replace
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.identity.roster import Roster
from fl_privacy.round.letters import Letters
from fl_privacy.round.noticeboard import Noticeboard, run_of
from fl_privacy.wire.client import explain
from fl_privacy.wire.rpc import Stub

FOLDER = "agreement"  # in the site's own folder
KEPT = 16  # rosters
Log = Callable[..., None]


@dataclass(frozen=True)
class Pace:
    """Seconds between two looks at the mailbox, and until a message is said again or a head is replaced."""

    busy: float = 0.1
    idle: float = 5.0
    settled: float = 2.0  # without news before a site that is still agreeing looks less often
    resend: float = 3.0
    view: float = 6.0
    most_doublings: int = 5
    looking: float = 10.0  # for news at the start of a round


PACE = Pace()


class Agreeing:
    """Alive as long as the site. A new roster starts a new agreement, with new contributions."""

    def __init__(
        self,
        federation: str,
        site: str,
        keyring: Keyring,
        state: Path,
        dial: Callable[[], Stub],
        wait: float,
        log: Log,
        pace: Pace = PACE,
    ) -> None:
        """`wait`: how long a round waits for the secret."""
        self._own, self._keys, self._state = Identity(federation, "site", site), keyring, state
        self._dial, self._wait, self._log, self._pace = dial, wait, log, pace
        self._part: Part | None = None
        self._problem = "the mailbox was not reached yet"
        self._news, self._begun, self._done = threading.Condition(), 0, 0  # turns
        self._wanted, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)

    def start(self) -> Agreeing:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._ended = True
        self._wanted.set()
        self._thread.join()

    def agreed(self) -> Agreed:
        """The secret, after a look at what the others say of theirs."""
        until, roster = time.monotonic() + self._wait, self._keys.roster().digest
        self._look(min(until, time.monotonic() + self._pace.looking))
        with self._news:
            self._news.wait_for(lambda: self._ready(roster), max(0.0, until - time.monotonic()))
            part = self._part
            if part is None or part.terms.roster != roster:
                raise ProtocolError("UNAVAILABLE", f"agreement: not begun; {self._problem}")
            if part.split:
                raise ProtocolError("ABORTED", part.split)
            if part.agreed is None:
                why = f"agreement: no secret after {self._wait:g} s; {part.agreement.missing()}"
                raise ProtocolError("UNAVAILABLE", f"{why}; {self._problem}" if self._problem else why)
            return part.agreed

    def show(self, run: str, nonce: bytes, round: int) -> None:
        with self._news:
            if self._part is not None:
                self._part.show(run, nonce, round)
        self._wanted.set()

    def _ready(self, roster: str) -> bool:
        part = self._part
        return part is not None and part.terms.roster == roster and bool(part.agreed or part.split)

    def _look(self, until: float) -> None:
        """Wait for a turn that begins after this call, or until the time is over."""
        with self._news:
            wanted = self._begun + 1
            self._wanted.set()
            self._news.wait_for(lambda: self._done >= wanted, max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        moved = time.monotonic()
        while not self._ended:
            self._wanted.clear()
            with self._news:
                self._begun += 1
            try:
                moved, self._problem = (time.monotonic() if self._turn() else moved), ""
            except grpc.RpcError as error:
                self._problem = explain(error)
            except Exception as error:  # the site's other work goes on, and its next look may succeed
                self._problem = reason_of(error)
            with self._news:
                self._done = self._begun
                self._news.notify_all()
            self._wanted.wait(self._pause(time.monotonic() - moved))

    def _pause(self, quiet: float) -> float:
        """Until the next look, after so many seconds without news."""
        part, pace = self._part, self._pace
        if quiet < pace.settled:
            return pace.busy
        return pace.idle if part is not None and part.agreed is not None else min(pace.idle, 5 * pace.busy)

    def _turn(self) -> bool:
        roster = self._keys.roster()
        if self._part is None or self._part.terms.roster != roster.digest:
            terms = terms_of(roster)
            letters = Letters(self._dial(), self._own, run_of(roster.digest), self._keys)
            part = Part(terms, self._own.name, self._keys, self._state, letters, self._log, self._pace)
            with self._news:
                self._part = part
        return self._part.turn()


def terms_of(roster: Roster) -> Terms:
    """The agreement of a roster's sites: it is for all runs, each of which derives its own secret."""
    return Terms.of_roster(roster, f"{roster.federation}-{roster.serial}", 0)


def place_of(state: Path, roster: str) -> Path:
    """Where a site keeps its part in the agreement of a roster."""
    return state / FOLDER / f"{roster[:32]}.sealed"


def _prune(folder: Path) -> None:
    """Forget the secrets of older rosters: runs of the newest ones may still be resumed."""
    for path in sorted(folder.glob("*.sealed"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        path.unlink(missing_ok=True)


def disk_key(keyring: Keyring, roster: str, site: str) -> bytes:
    """What that file is encrypted under: only who has the site's key can read it."""
    return secret_keys.derive(keyring.key_file.read_bytes(), roster, 0, site, "agreement on the disk")


class Part:
    """A site's part in the agreement of one roster."""

    def __init__(
        self, terms: Terms, site: str, keyring: Keyring, state: Path, letters: Letters, log: Log, pace: Pace
    ) -> None:
        self.terms, self._site, self._log, self._pace = terms, site, log, pace
        self._disk, self._path = disk_key(keyring, terms.roster, site), place_of(state, terms.roster)
        self._folder = self._path.parent
        signer = load_key(keyring.key_file)
        terms.learn(site, public(signer))
        if self._path.exists():
            self.agreement = restore(self._path.read_bytes(), self._disk, terms, signer)
        else:
            self.agreement = Agreement(terms, site, signer, secret_keys.fresh())
        self.agreed: Agreed | None = None
        self.split = ""
        self._board = Noticeboard(letters, terms)
        self._timers: dict[str, float] = {}
        self._others: dict[str, set[str]] = {}  # by run: who showed another check value
        self._examined: dict[str, tuple[bytes, int]] = {}  # by site: its evidence, and how many keys were known then
        self._found: list[Output] = []  # not acted on yet: a turn may break off, and the next one continues
        self._started = False
        self._place = (0, 0)

    def turn(self) -> bool:
        """Read what is new, act on it, and say what follows; whether anything happened."""
        found, now = self._found, time.monotonic()
        if not self._started:
            make_folder(self._folder)
            _prune(self._folder)
            found += self.agreement.start()
            self._started = True
            self._note()
        for message in self._board.news():
            with suppress(ProtocolError):  # one that no correct site sends
                found += self.agreement.receive(message.data)
                message.taken()
        for name in [name for name, due in self._timers.items() if due <= now]:
            del self._timers[name]
            if name == RESEND:
                self._board.again()
            found += self.agreement.expired(name)
        place = len(self.agreement.decisions), self.agreement.ballot.view
        if place != self._place:
            self._board.moved()
        self._place = place
        self._act(found, now)
        self._found = []
        self._compare()
        return self._board.publish() or bool(found)

    def show(self, run: str, nonce: bytes, round: int) -> None:
        if self.agreed is not None:
            self._board.show(run, nonce, round, self.agreed.check_value(run, nonce, round))

    def _act(self, found: list[Output], now: float) -> None:
        if any(not isinstance(output, Timer) for output in found):
            replace(self._path, save(self.agreement, self._disk), mode=0o600)
        for output in found:
            if isinstance(output, Send):
                self._board.say(output.data)
            elif isinstance(output, Timer) and output.name != DEADLINE:  # a round has one; the agreement waits on
                base = self._pace.resend if output.name == RESEND else self._pace.view
                self._timers[output.name] = now + base * 2 ** min(output.doublings, self._pace.most_doublings)
            elif isinstance(output, Named):
                self._name(output)
            elif isinstance(output, Decided):
                self._note()

    def _note(self) -> None:
        """The secret, once there is one; from now on our evidence shows the others what we received."""
        outcome = self.agreement.outcome
        if outcome is not None:
            self.agreed = Agreed(outcome.secret, self.terms)
            self._log("agreed", roster=self.terms.roster, sites=len(self.terms.sites), of=len(outcome.contributors))

    def _name(self, named: Named) -> None:
        """Keep the proof for the other operators: it holds signatures and digests, no secret."""
        proof = named.proof
        replace(self._folder / f"{self.terms.roster[:32]}.{proof.site}.proof", proof.encode())
        self._log("equivocated", site=proof.site, reason=proof.reason(self.terms))

    def _compare(self) -> None:
        """Whether others hold another secret. A check value alone names nobody: its site may just have lied."""
        if self.agreed is None:
            return
        self._board.evidence = self.agreement.evidence()
        for site, bulletin in self._board.bulletins.items():
            for place, (round, value) in bulletin.checks.items():
                if place not in self._board.shown:
                    continue
                run, _, nonce = place.rpartition(" ")
                with suppress(ValueError):
                    if self.agreed.check_value(run, bytes.fromhex(nonce), round).hex() != value:
                        self._differs(site, run, bulletin.evidence)

    def _differs(self, site: str, run: str, evidence: bytes) -> None:
        others = self._others.setdefault(run, set())
        if site not in others:
            others.add(site)
            self._log("other-check-value", site=site, run=run)
        looked = hashlib.sha256(evidence).digest(), len(self.terms.key_of)
        if self._examined.get(site) != looked:  # it may be thousands of signatures, and comes every turn
            self._examined[site] = looked
            with suppress(ProtocolError):
                for proof in self.agreement.examine(evidence):
                    self._name(Named(proof))
        caught = sorted(self.agreement.proofs)
        # Two secrets take more than f sites that sign for both; f or fewer could only pretend, to stop the others.
        if len(others | set(caught)) > self.terms.faults:
            named = f"; proven to have contradicted themselves: {', '.join(caught)}" if caught else ""
            says = f"{', '.join(sorted(others))} showed another check value in run {run}"
            split = f"agreement: sites hold different secrets: {says}{named}; remove them, and start a new run"
            if split != self.split:
                self.split = split
                self._log("split", reason=split, equivocators=caught)
