"""The site's policy in force: its file is read again before every round, so that a change binds at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_privacy.config import Federation, approvals
from fl_privacy.config.policy import Policy, PolicyError
from fl_privacy.deploy import confine
from fl_privacy.errors import ConfigError
from fl_privacy.ops.log import Log
from fl_privacy.steps.base import At
from fl_privacy.tasks import accepted

Adopt = Callable[[Policy], None]


class OwnPolicy:
    """Without a file, in a trial, only the federation's config applies."""

    def __init__(self, federation: Federation, site: str, state: Path | None, log: Log) -> None:
        self._federation, self._site, self._state, self._log = federation, site, state, log
        self._file = federation.site(site).policy
        self.sha256: str | None = None
        self.limits: Policy | None = None
        self.renew()
        if self._file is None:
            log("policy", sha256=None, reason="a trial without a policy: only the federation's config applies")

    @property
    def code(self) -> tuple[str, ...]:
        return self.limits.code if self.limits else ()

    def floor(self) -> int:
        """Fewest organisations that the site's update may be released with: the route's floor, or the policy's."""
        return max(self._federation.floor, self.limits.min_cohort if self.limits else 1)

    def check(self, at: At, adopt: Adopt) -> None:
        """Refuse a round under a policy that cannot be read, or that does not allow it any longer."""
        self.renew(adopt)
        if self.limits and self.limits.approve_runs and self._state is not None:
            approvals.check(at.run, self._federation, self._state)

    def renew(self, adopt: Adopt = lambda policy: None) -> None:
        """Adopt the file if it has changed; one that is refused stays refused until it is changed again."""
        if self._file is None:
            return
        sha256 = self._digest(self._file)
        if sha256 == self.sha256:
            return
        policy = Policy.load(self._file)
        policy.check(self._federation, self._site)
        if policy.approve_runs and self._state is None:
            raise PolicyError("policy: approve_runs needs a folder in which approvals are kept; set --state")
        accepted.check(self._federation, self._state, policy.code)
        confine.demand(policy.confinement == "required")
        adopt(policy)
        self.limits, self.sha256 = policy, sha256
        terms: dict[str, Any] = policy.model_dump(mode="json")
        self._log("policy", sha256=sha256, file=str(self._file), **terms)

    def _digest(self, file: Path) -> str:
        try:
            return hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"policy {file}: cannot be read ({error.strerror}); nothing is sent without it") from None
