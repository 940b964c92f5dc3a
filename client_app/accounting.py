"""What a site may spend and has spent: its policy and its ledger. Both belong to the site and fail closed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def policy_of(federation: Federation, site: str) -> dict[str, Any]:
    """The policy that applies to a site, for its log: the file's digest and every limit in it."""
    path = federation.site(site).policy
    if path is None:
        return {"sha256": None, "reason": "a trial without a policy: only the federation's config applies"}
    limits = Policy.load(path).model_dump(mode="json")
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "file": str(path), **limits}


def floor_of(federation: Federation, site: str) -> int:
    """Fewest organisations that the site's update may be released with: the route's floor, or the policy's."""
    path = federation.site(site).policy
    return max(federation.floor, Policy.load(path).min_cohort if path else 1)


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
    ) -> None:
        config = federation.site(site)
        self._federation, self._site, self._keys = federation.name, site, keys
        if config.policy:
            policy = Policy.load(config.policy)
            policy.check(federation, site)
            if charge is not None:
                policy.check_charge(*filter(None, (charge, evaluation)))
        self._charge, self._evaluation, self._rounds = charge, evaluation, federation.rounds
        self._ledger: Ledger | None = None
        if charge is None:
            return
        if state is None:
            raise LaunchError("state: a site that privatises needs a folder for its ledger; set --state")
        self._ledger = open_ledger(federation, site, state)
        self._ledger.check_unit(charge.unit, charge.adjacency)
        self._per_round = config.epsilon or compose([charge], self._ledger.delta)

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
        ahead = 0 if at.farewell else self._rounds - at.round + 1
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
        return witness.statement(self._ledger, self._federation, self._site, key).encode()

    def budget(self, metrics: Metrics) -> dict[str, float | None]:
        """Epsilon per round, spent over all runs, and left; None where nothing sets a limit."""
        if self._ledger is None:
            return {}
        spent, limited = self._ledger.spent(), self._ledger.epsilon < LARGEST_EPSILON
        left = self._ledger.remaining() if limited else None
        metrics.budget(spent, math.inf if left is None else left)
        return {"epsilon": self._per_round, "spent": spent, "left": left, "delta": self._ledger.delta}
