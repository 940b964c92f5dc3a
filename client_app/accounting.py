"""What a site may spend and has spent: its policy and its ledger. Both belong to the site and fail closed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fl_privacy.config import Federation
from fl_privacy.config.policy import Policy, open_ledger
from fl_privacy.dp import witness
from fl_privacy.dp.gaussian import LARGEST_EPSILON
from fl_privacy.dp.ledger import Charge, Ledger, LedgerError, compose
from fl_privacy.errors import LaunchError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.ops.metrics import Metrics
from fl_privacy.steps.base import At

from .outbox import evaluation_of, name_of


class Account:
    """One site's budget. Without a charge nothing is ever refused."""

    def __init__(
        self,
        federation: Federation,
        site: str,
        state: Path | None,
        charge: Charge | None,
        evaluation: Charge | None = None,
        keys: Keyring | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._federation, self._site, self._state, self._keys = federation, site, state, keys
        self._charge, self._evaluation = charge, evaluation
        self._ledger: Ledger | None = None
        self.adopt(policy)

    def adopt(self, policy: Policy | None) -> None:
        """Keep to this policy from now on; raises, and changes nothing, if a round costs more than it allows."""
        charge, site = self._charge, self._site
        if charge is None:
            return
        if policy is not None:
            policy.check_charge(*filter(None, (charge, self._evaluation)))
        if self._state is None:
            raise LaunchError("state: a site that privatises needs a folder for its ledger; set --state")
        ledger = open_ledger(self._federation, site, self._state)
        ledger.check_unit(charge.unit, charge.adjacency)
        self._per_round = self._federation.site(site).epsilon or compose([charge], ledger.delta)
        self._ledger = ledger

    def check(self, at: At) -> None:
        """Refuse an attempt that would overspend, before any work is done."""
        if self._ledger is None or self._charge is None:
            return
        if self._ledger.holds(name_of(at)) or self._ledger.holds(evaluation_of(at)):
            raise LedgerError("ledger: this attempt was charged but its update is lost; it cannot be sent again")
        if not at.farewell:
            self._ledger.check(self._charge)

    def check_evaluation(self, at: At) -> None:
        """Refuse an evaluation that would take budget from this round's update or from those of the rounds after it."""
        if self._ledger is None or self._charge is None or self._evaluation is None:
            return
        ahead = 0 if at.farewell else self._federation.rounds - at.round + 1
        self._ledger.check(self._evaluation, *[self._charge] * ahead)

    def charge(self, at: At, evaluated: bool = False) -> bool | None:
        """Charge an attempt, durably; False if it was charged before, None if it costs nothing."""
        if self._ledger is None or self._charge is None:
            return None
        found = [] if at.farewell else [self._ledger.charge(name_of(at), self._charge)]
        if evaluated and self._evaluation is not None:
            found.append(self._ledger.charge(evaluation_of(at), self._evaluation))
        return any(found) if found else None

    def check_witness(self, found: Iterable[bytes]) -> None:
        """Refuse to continue with a ledger that is behind one of these statements of its head."""
        if self._ledger is None or self._keys is None:
            return
        key = load_key(self._keys.key_file).public_key()
        for statement in map(witness.Statement.decode, found):
            if statement.ledger == self._ledger.owner:
                witness.check(self._ledger, statement, key)

    def statement(self) -> bytes:
        """The signed head of the ledger, for the middleware to remember; empty without one."""
        if self._ledger is None or self._keys is None:
            return b""
        key = load_key(self._keys.key_file)
        return witness.statement(self._ledger, self._federation.name, self._site, key).encode()

    def budget(self, metrics: Metrics) -> dict[str, float | None]:
        """Epsilon per round, spent over all runs, and left; None where nothing sets a limit."""
        if self._ledger is None:
            return {}
        spent, limited = self._ledger.spent(), self._ledger.epsilon < LARGEST_EPSILON
        left = self._ledger.remaining() if limited else None
        metrics.budget(spent, math.inf if left is None else left)
        return {"epsilon": self._per_round, "spent": spent, "left": left, "delta": self._ledger.delta}
