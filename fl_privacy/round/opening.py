"""What a middleware checks before it opens an attempt, and what it tells a site about an attempt that is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fl_privacy.errors import require
from fl_privacy.identity.roster import Roster
from fl_privacy.round import statements
from fl_privacy.round.attempt import Attempt
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.journal import Journal
from fl_privacy.round.terms import Terms
from fl_privacy.wire import federation_pb2 as pb

if TYPE_CHECKING:
    from fl_privacy.config import Federation

SALT = 32


def cohort_of(header: pb.RoundHeader, federation: Federation) -> Cohort:
    """The sites that the server wants; all must be in the federation."""
    names, known = list(header.sites), set(federation.site_names)
    good = len(set(names)) == len(names) == header.cohort and known.issuperset(names)
    require(good, "sites: not a cohort of this federation")
    require(len(header.salt) == SALT, f"salt: {len(header.salt)} bytes, {SALT} are needed")
    return Cohort(names, header.salt)


def terms_of(
    header: pb.RoundHeader, cohort: Cohort, model: bytes, caller: str, federation: Federation, roster: Roster
) -> Terms:
    """The terms of an attempt, from what this middleware holds itself; refused unless they give the attempt's name."""
    known: dict[str, Any] = {"federation": federation.digest, "roster": roster.digest, "model": model}
    known |= {"root": cohort.root, "organisations": roster.organisations(cohort.sites), "recipient": caller}
    terms = Terms.checked(header, **known)
    terms.check(federation)
    return terms


def offered(attempt: Attempt, site: str, left: float, key: Any, journal: Journal) -> pb.RoundHeader:
    """An open attempt as its sites see it. In it the length is the model's: it is set when the model is added."""
    spec, terms, place = attempt.round.spec, attempt.terms, attempt.cohort.place(site)
    header = pb.RoundHeader(**{**vars(spec), **vars(terms), "deadline": left, "length": 0}, layers=attempt.layers)
    header.attempt, header.digest = terms.name, attempt.model_digest
    header.signature, header.key, header.journal = attempt.signature, statements.public(key), journal.id
    header.salt, header.index = place.salt, place.position
    header.path.extend(place.path)
    for void in journal.voided(terms.run, terms.model.hex()):
        signature = statements.sign(key, statements.VOID, void, journal.id)
        header.void.append(pb.Statement(attempt=void, signature=signature))
    return header
