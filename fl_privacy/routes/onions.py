"""`route: {kind: onions}`: every bit of every residue is an onion, and a chain of mixes opens and shuffles all of them.

The published form for mixes that nobody trusts with an update (Athanasiou et al. 2026, Algorithm 8, without its
proofs): the first mix gets the onions of all sites, each mix opens a layer and passes them on in a random order, and
the server opens the innermost one and counts bits. It costs a public-key operation per bit and layer: it is for small
models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import ConfigDict, Field

from fl_privacy.coding import Coding, Payload
from fl_privacy.errors import ConfigError
from fl_privacy.mix import bits, onion
from fl_privacy.mix.batch import MEMBER, MOST
from fl_privacy.mix.dummies import MESSAGE
from fl_privacy.rns.coding import PUBLISHED, Modular
from fl_privacy.rns.residues import Residues
from fl_privacy.routes.base import Trust, tickets
from fl_privacy.routes.ends import ServerEnd, ServerSeat, SiteEnd, SiteSeat
from fl_privacy.routes.mixes import MOST_MIXES, SEED_BYTES, ByMixes, moving
from fl_privacy.steps.base import Foretold
from fl_privacy.theory.cost import Cost, cost

if TYPE_CHECKING:
    from fl_privacy.config import Federation

ONIONS = Coding("onions", "|u1", 0)
BITS = "bits"  # what the server records of a round: the messages in the innermost layers
MOST_ONIONS = 250_000  # of a round, unless the config forces more
STATEMENT = 700  # bytes of what a mix signs about its batch, about
MOST_SITES = MOST // MEMBER - 1  # whose statements are in that of the first mix


class OnionsRoute(ByMixes):
    """Sites send bits as onions through a chain of mixes, and the server counts them. For small models."""

    model_config = ConfigDict(populate_by_name=True)

    kind: Literal["onions"] = "onions"
    mixes: int = Field(3, ge=2, le=MOST_MIXES, description="in the chain; one that shuffles hides who sent what")
    trust_in: Literal["semi-honest", "malicious"] = Field(
        "semi-honest", alias="trust", description="mixes keep to the rules, or may try to lose or exchange onions"
    )
    dummies: int = Field(
        0,
        ge=0,
        description="per round, with `trust: malicious`; default (0): a mix that changes 0.1 % is named with p = 0.99",
    )
    n_min: int = Field(3, ge=2, description="fewest organisations whose updates may be mixed and released together")
    force: bool = Field(False, description=f"send more than {MOST_ONIONS:,} onions per round")

    @property
    def service(self) -> str:
        return "onions"

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The batch comes from the first mix, and goes through every other one; then the dummies are checked."""
        check = ["check"] if self.checked else []
        return ("open", "collect", "settle", "relay", "collect", *check, "settle")

    @property
    def checked(self) -> bool:
        """Whether sites send dummies, by which a mix that loses onions is named."""
        return self.trust_in == "malicious"

    def dummies_of(self, federation: Federation) -> int:
        """Of each site: together enough, also if only the quorum sends."""
        whole = self.dummies or onion.decoys(1)
        return -(-whole // federation.quorum) if self.checked else 0

    def onions(self, federation: Federation, parameters: int) -> int:
        """Of one site in a round."""
        each = self.columns(federation, parameters) * bits.per_column(self.coding(federation).moduli)
        return each + self.dummies_of(federation)

    def size(self, mix: int) -> int:
        """Bytes of an onion as this mix gets it; `mixes` stands for the server."""
        return onion.size(bits.SIZE, self.mixes + 1 - mix)

    def share_length(self, federation: Federation, parameters: int) -> int:
        """Bytes that a site sends to the first mix."""
        return self.onions(federation, parameters) * self.size(0)

    def most_given(self, federation: Federation, parameters: int) -> int:
        """The batch of the first mix."""
        return self.onions(federation, parameters) * federation.cohort * self.size(1) // 4

    def check_size(self, federation: Federation, parameters: int) -> None:
        """Refuse a model that makes too many onions."""
        count = self.onions(federation, parameters) * federation.cohort
        if count > MOST_ONIONS and not self.force:
            fix = "use route: {kind: mixes}, a smaller model or lower encode.r; or set route.force: true"
            many = f"{count:,} per round, and {MOST_ONIONS:,} is the limit"
            raise ConfigError(f"route.kind: onions would send {many}; {fix}")

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        coding = federation.coding
        if not isinstance(coding, Modular) or coding.form != PUBLISHED:
            why = "whoever gets shuffled bits counts them, so sums of residues are released as integers"
            yield f"encode: route onions sends single bits, and {why}; use encode: {{kind: rns, form: published}}"
        if self.dummies and not self.checked:
            yield "route.dummies: nobody checks them with trust: semi-honest; set trust: malicious, or remove them"
        if self.checked and len(federation.sites) > MOST_SITES:
            yield f"route.trust: malicious supports up to {MOST_SITES} sites, and there are {len(federation.sites)}"

    def trust(self, federation: Federation) -> list[Trust]:
        learn = "which bits are whose, and together with the server every update"
        learn += "; if mix-0 replaces onions by its own, it and the server alone one update per round"
        return [Trust(parties=tuple(self.middleware()), learn=learn)]

    def summed(self, federation: Federation, parameters: int, recorded: Mapping[str, Payload]) -> Residues | None:
        coding, columns = self.coding(federation), self.columns(federation, parameters)
        if BITS not in recorded:
            return None
        messages = np.asarray(recorded[BITS])
        sites = len(messages) // self.onions(federation, parameters)
        messages = bits.without(messages, MESSAGE, sites * self.dummies_of(federation))
        return bits.counted(messages, coding.moduli, columns, sites)[:, :parameters]

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        """A mix's bytes are the mean over the chain."""
        n, d, k, coding = federation.cohort, parameters, self.mixes, federation.coding
        ticket, c, each = tickets(federation), federation.bytes_of_counts, self.onions(federation, d)
        batches = [n * each * self.size(index) for index in range(k + 1)]
        asks, proof = len(self.exchanges) * k - 1, STATEMENT * k
        proof += self.checked * n * (MEMBER + STATEMENT)
        server = cost(coding, "server", 1, asks + ticket * n, models=(0, d), updates=(0, 0), counts=(k * c, 0))
        mix = cost(coding, "mix", k, 2 * n + asks / k, models=(d // k, n * d // k), updates=(0, 0), counts=(n * c, c))
        site = cost(coding, "site", n, 2 * k + ticket, models=(d, 0), updates=(0, 0), counts=(0, k * c))
        seeds = SEED_BYTES * (k - 1)
        taken, given = sum(batches[:k]) // k, sum(batches[1:]) // k
        return [
            replace(moving(server, sum(batches[1:]) + proof, sum(batches[1:k]) + proof, d, 0), observed=0),
            replace(moving(mix, taken + n * seeds // k, given, n * d // k, d), observed=0),
            moving(site, 0, batches[0] // n + seeds, 0, d),
        ]

    def foretell(self, federation: Federation, parameters: int) -> Foretold:
        """Onions, bytes and CPU time of a round, at what this machine was just measured to do."""
        found = onion.cost(self.onions(federation, parameters), federation.cohort, self.mixes, onion.rates())
        over = found.onions > MOST_ONIONS and not self.force
        facts = {
            **found._asdict(),
            "dummies_per_site": self.dummies_of(federation),
            "most_onions": MOST_ONIONS,
            "refused": over,
        }
        each = f"{found.onions:,} onions per round, {found.bytes_per_site / 1e6:,.3f} MB per site"
        times = f"{_about(found.seconds_per_site)} at a site, {_about(found.seconds_per_mix)} at each mix"
        lines = [f"route: {each}; CPU time on this machine {times} and at the server"]
        if over:
            lines.append(f"route: more than {MOST_ONIONS:,} onions are refused; set route.force: true for such a run")
        return Foretold(facts, lines)

    def check_launch(self, federation: Federation) -> None:
        from fl_privacy.tasks.workload import layout_of

        self.check_size(federation, layout_of(federation).size)

    def site(self, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.routes.wrapping import Wrapping

        self.check_size(seat.federation, seat.layout.size)
        return Wrapping(self, seat)

    def server(self, seat: ServerSeat) -> ServerEnd:
        from fl_privacy.routes.unwrapping import Unwrapping

        self.check_size(seat.federation, seat.layout.size)
        if self.checked:
            from fl_privacy.routes.revealing import Revealing

            return Revealing(self, seat)
        return Unwrapping(self, seat)


def _about(seconds: float) -> str:
    return f"{float(f'{seconds:.2g}'):g} s"
