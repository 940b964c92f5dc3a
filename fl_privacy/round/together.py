"""The agreement of simulated sites: one process has the keys of all, and plays every part at once.

The protocol is the real one, without a network. Each site's part is on its own disk, encrypted under its own key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from fl_privacy.agreement.machine import Agreement, Send
from fl_privacy.agreement.saved import restore, save
from fl_privacy.agreement.secret import Agreed
from fl_privacy.agreement.terms import public
from fl_privacy.crypto import keys as secret_keys
from fl_privacy.errors import FederationError
from fl_privacy.files import locked, make_folder, replace
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.round.agreeing import disk_key, place_of, terms_of


class Together:
    """One simulated site's way to the secret; the first to ask plays the agreement of all."""

    def __init__(
        self,
        site: str,
        sites: Mapping[str, Keyring],
        state: Callable[[str], Path],
        lock: Path,
        log: Callable[..., None],
    ) -> None:
        """`state` gives the folder of each site; `lock` is a file that all processes of the simulation know."""
        self._site, self._sites, self._state, self._lock, self._log = site, sites, state, lock, log

    def agreed(self) -> Agreed:
        return self._agreed

    def show(self, run: str, nonce: bytes, round: int) -> None:
        """Nobody else is there to compare; the server compares the uploads."""

    @cached_property
    def _agreed(self) -> Agreed:
        keyring = self._sites[self._site]
        terms = terms_of(keyring.roster())
        path = place_of(self._state(self._site), terms.roster)
        with locked(self._lock):
            if not path.exists():
                self._play()
        key = disk_key(keyring, terms.roster, self._site)
        outcome = restore(path.read_bytes(), key, terms, load_key(keyring.key_file)).outcome
        if outcome is None:
            raise FederationError(f"agreement: {path} has no secret; remove it and start again")
        return Agreed(outcome.secret, terms)

    def _play(self) -> None:
        signers = {site: load_key(keyring.key_file) for site, keyring in self._sites.items()}
        terms = terms_of(self._sites[self._site].roster())
        for site, signer in signers.items():
            terms.learn(site, public(signer))
        parts = {site: Agreement(terms, site, signer, secret_keys.fresh()) for site, signer in signers.items()}
        waiting = deque((site, output) for site, part in parts.items() for output in part.start())
        while waiting:
            sender, output = waiting.popleft()
            if isinstance(output, Send):
                for site in [output.to] if output.to else [other for other in parts if other != sender]:
                    waiting.extend((site, answer) for answer in parts[site].receive(output.data))
        for site, part in parts.items():
            path = place_of(self._state(site), terms.roster)
            make_folder(path.parent)
            replace(path, save(part, disk_key(self._sites[site], terms.roster, site)), mode=0o600)
        self._log("agreed", roster=terms.roster, sites=len(parts))
