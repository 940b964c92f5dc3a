"""What a party notes beside the arrays of a round: one class per kind of event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_privacy.errors import TranscriptError
from fl_privacy.reading import problems

if TYPE_CHECKING:
    from fl_privacy.steps.base import At

FAREWELL = "farewell-"  # begins the name of an attempt
VOID = "void-"  # begins the name of an attempt in which somebody cheated: nothing of it was combined


class Event(BaseModel):
    """An event of a view; `kind` names its class. Fields that a later version adds are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump()


class Invited(Event):
    """The server asked this site to take part in the round."""

    kind: Literal["invited"] = "invited"
    name: str


class Receipt(Event):
    """What a site answered the server (`done`, or why not), and when by the server's clock."""

    kind: Literal["receipt"] = "receipt"
    name: str
    status: str
    time: float


class Row(Event):
    """Row `row` of the recorded updates came from this site."""

    kind: Literal["row"] = "row"
    name: str
    row: int = Field(ge=0)


class Mixing(Event):
    """How the shuffler mixed the rows: `fl_privacy.shuffle.job.Job` as JSON, with its keys."""

    kind: Literal["mixing"] = "mixing"
    job: str


class Farewell(Event):
    """No updates were asked for: every site got the model after this round, and may have sent its counts."""

    kind: Literal["farewell"] = "farewell"
    round: int = Field(ge=0)


class Tampering(Event):
    """A sum of a mix failed its check. `case` is all that was said (`fl_privacy.mix.evidence.Case`), with the keys."""

    kind: Literal["tampering"] = "tampering"
    case: str
    roster: str
    verdicts: tuple[str, ...] = Field(strict=False)


class Clustered(Event):
    """What the server decided about a site: its group of this round (-1: an outlier), and its cluster over all rounds.

    `nearest` is the cosine distance to the most similar other model of the round.
    """

    kind: Literal["clustered"] = "clustered"
    site: str
    group: int = Field(ge=-1)
    before: int | None
    after: int | None
    nearest: float = Field(ge=0, le=2)


class Decision(Event):
    """Why something of a round was not combined, or is no longer used."""

    kind: Literal["decision"] = "decision"
    reason: str

    @classmethod
    def of(cls, reason: str) -> Decision:
        return cls(reason=reason)


class Other(Event):
    """An event of a kind that this version does not know, as it was written."""

    fields: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.fields


KINDS: dict[str, type[Event]] = {
    "invited": Invited,
    "receipt": Receipt,
    "row": Row,
    "mixing": Mixing,
    "farewell": Farewell,
    "tampering": Tampering,
    "clustered": Clustered,
    "decision": Decision,
}


def filed(at: At) -> dict[str, Any]:
    """The run, round, attempt and nonce under which a party records it. A farewell is marked: it has no updates."""
    return at.where | {"nonce": at.nonce.hex()} | ({"attempt": FAREWELL + at.attempt} if at.farewell else {})


def rows_of(names: Sequence[str]) -> list[Event]:
    """One event per row, in the order of the rows."""
    return [Row(name=name, row=row) for row, name in enumerate(names)]


def parse(fields: dict[str, Any], where: str) -> Event:
    """An event from JSON that nobody vouches for."""
    # Aggregators once wrote rows without their kind.
    kind = "row" if fields.keys() == {"name", "row"} else fields.get("kind")
    found = KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        return Other(fields=fields)
    try:
        return found.model_validate({**fields, "kind": kind})
    except ValidationError as error:
        raise TranscriptError(f"{where}: {kind} event: {problems(error, found)}") from None
