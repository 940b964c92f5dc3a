"""Who tampered in a run, found again by anybody who has its record and the authority's certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cryptography import x509

from fl_privacy.errors import FederationError, TranscriptError
from fl_privacy.identity.roster import Roster, load
from fl_privacy.mix import dummies, evidence
from fl_privacy.mix.evidence import Case, Verdict
from fl_privacy.mix.shares import Residues
from fl_privacy.rns.residues import unpack
from fl_privacy.round.board import keys_in
from fl_privacy.routes import revealing
from fl_privacy.routes.base import only
from fl_privacy.routes.mixes import MixesRoute
from fl_privacy.routes.onions import OnionsRoute
from fl_privacy.routes.sharing import share_of
from fl_privacy.transcript.events import Tampering
from fl_privacy.vector import Layout

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.transcript.read import Run

SERVER = "server"


class Found(NamedTuple):
    """A void attempt: who is convicted by what is recorded, and who was named at the time."""

    round: int
    attempt: str
    verdicts: tuple[Verdict, ...]
    named: tuple[str, ...]


def convicted(run: Run, federation: Federation, authority: bytes) -> list[Found]:
    """The void attempts of a run, each judged again from what was signed. `transcript verify` checks the record."""
    view = run.view(SERVER)
    found, parameters = list[Found](), Layout.from_json(run.manifest["layout"]).size
    for round, attempt in view.voided:
        arrays = view.round(round, attempt).arrays
        for event in view.events(round, attempt):
            if isinstance(event, Tampering):
                verdicts = judged(event, arrays, federation, parameters, authority)
                found.append(Found(round, attempt, tuple(verdicts), event.verdicts))
    return found


def judged(
    event: Tampering, arrays: Mapping[str, Any], federation: Federation, parameters: int, authority: bytes
) -> list[Verdict]:
    """The verdicts that follow from an event and the sums recorded with it."""
    try:
        roster = load(event.roster.encode(), x509.load_pem_x509_certificate(authority))
    except ValueError as error:
        raise TranscriptError(f"roster of a void attempt: cannot be verified ({error})") from None
    if isinstance(federation.route, OnionsRoute):
        return _of_onions(event, arrays, federation.route, federation, roster)
    case = Case.decode(event.case.encode())
    route = only(federation.route, MixesRoute, "mixes")
    coding, columns = route.coding(federation), route.columns(federation, parameters)
    key = keys_in(case.sums, roster, case.mixes)
    outputs = {mix: unpack(np.asarray(arrays[f"sum-{mix}"]), coding.moduli, columns) for mix in case.mixes}
    if case.moduli != coding.moduli or case.challenges != route.masks:
        raise FederationError("case: of another config than the run's")

    whole = 4 * route.share_length(federation, parameters)

    def read(mix: str, part: bytes) -> Residues:
        return share_of(part, coding, columns, seeded=len(part) != whole)

    return evidence.judge(case, outputs, key, read)


def _of_onions(
    event: Tampering, arrays: Mapping[str, Any], route: OnionsRoute, federation: Federation, roster: Roster
) -> list[Verdict]:
    case = dummies.Case.decode(event.case.encode())
    if (case.federation, case.count) != (federation.name, route.dummies_of(federation)):
        raise FederationError("case: of another config than the run's")
    sizes = [route.size(place) for place in range(route.mixes + 1)]
    return revealing.judged(case, arrays, route.middleware(), sizes, roster)
