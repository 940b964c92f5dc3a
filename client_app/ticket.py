"""What the server may ask of a site: a ticket, and nothing else."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Ticket(BaseModel):
    """An invitation to the rounds `first` to `last` of a run; what they are is read from the middleware."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    federation: str = Field(pattern=r"^[0-9a-f]{64}$", description="digest of the federation's config")
    first: int = Field(ge=1, le=2**31)
    last: int = Field(ge=1, le=2**31)
