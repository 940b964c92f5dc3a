"""`route: {kind: mixes}`: mixes add up what sites encoded, and the server gets sums; no mix alone sees an update.

- `trust: trusted`: one mix gets residues as numbers (Algorithm 7).
- `trust: semi-honest`: every residue is split into one share per mix. A mix releases the sum of its shares.
- `trust: malicious`: the same, and every sum is checked before it counts (`fl_privacy.mix.check`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ConfigDict, Field

from fl_privacy.coding import Coding, Payload
from fl_privacy.mix import check
from fl_privacy.rns.coding import CARRY_SAFE, Modular
from fl_privacy.rns.residues import Residues, words
from fl_privacy.routes.base import Route, Trust, tickets
from fl_privacy.routes.ends import ServerEnd, ServerSeat, SiteEnd, SiteSeat
from fl_privacy.routes.recorded import summed
from fl_privacy.steps.base import Foretold
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.wire.stream import MAX_MESSAGE

if TYPE_CHECKING:
    from fl_privacy.config import Federation

SEED = Coding("seed", "|u1", 0)
SEED_BYTES = 32
MOST_MIXES = 8  # the sets of them that a retry may use are listed
MEMBER = 640  # bytes of a site in a mix's signed sum, at most: its commitment and its key
PAPERS = 4096  # bytes per site and mix of what a check adds, about: commitment, nonce and answers


class ByMixes(Route):
    """What routes over mixes have in common for the ends at sites, mixes and server."""

    kind: str = "mixes"
    mixes: int = 3
    n_min: int = 3

    shows: ClassVar[str] = "sum"
    carries_counts: ClassVar[bool] = True

    @property
    def service(self) -> str:
        """What a mix does: it adds up, signs its sums, or opens onions."""
        return "adding"

    @property
    def floor(self) -> int:
        return self.n_min

    @property
    def needed(self) -> int:
        """The fewest mixes of an attempt."""
        return self.mixes

    @property
    def checked(self) -> bool:
        """Whether what the mixes give is checked before it counts."""
        return False

    @property
    def masks(self) -> int:
        """Numbers that a part carries besides the update."""
        return 0

    def parties(self) -> list[tuple[str, str]]:
        return [("mix", name) for name in self.middleware()]

    def middleware(self) -> list[str]:
        return [f"mix-{k}" for k in range(self.mixes)]

    def taking_part(self, number: int, farewell: int = 0) -> tuple[int, ...]:
        """The mixes of attempt `number` at a round."""
        return tuple(range(self.mixes))

    def next_number(self, number: int, here: set[int]) -> int:
        """The next attempt whose mixes are all here; 0 if there is none."""
        return 0

    def data_mix(self, number: int, round: int) -> int:
        """The mix that gets data, where the others get 32 bytes."""
        return 0

    def coding(self, federation: Federation) -> Modular:
        coding = federation.coding
        assert isinstance(coding, Modular)
        return coding

    def columns(self, federation: Federation, parameters: int) -> int:
        """Numbers per modulus in a part."""
        return self.coding(federation).columns(parameters) + self.masks

    @abstractmethod
    def share_length(self, federation: Federation, parameters: int) -> int:
        """Numbers in the part that is data."""

    def most_given(self, federation: Federation, parameters: int) -> int:
        """32-bit words that a mix gives the server, at most: a share, or in the published form 64 bits per residue."""
        published = 2 * len(self.coding(federation).moduli) * self.columns(federation, parameters)
        return max(self.share_length(federation, parameters), published)

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if federation.combine.weights != "equal":
            weights = federation.combine.weights
            yield f"combine.weights: {weights!r} needs single updates, and mixes give a sum; use equal"
        taken = set(self.middleware()) & set(federation.site_names)
        if taken:
            yield f"sites: {sorted(taken)[0]!r} is the name of a mix; give the site another one"

    def once(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, k, coding = len(federation.sites), parameters, self.mixes, federation.coding
        return [
            cost(coding, "server", 1, 3 * k, models=(0, d), updates=(0, 0)),
            cost(coding, "mix", k, 2 * n + 3, models=(d // k, n * d // k), updates=(0, 0)),
            cost(coding, "site", n, 2 * k, models=(d, 0), updates=(0, 0)),
        ]


class MixesRoute(ByMixes):
    """Sites send shares of their encoded updates to mixes, and the server adds up the mixes' sums."""

    model_config = ConfigDict(populate_by_name=True)

    kind: Literal["mixes"] = "mixes"
    mixes: int = Field(3, ge=1, le=MOST_MIXES, description="one with `trust: trusted`, otherwise from 2 on")
    trust_in: Literal["trusted", "semi-honest", "malicious"] = Field(
        "semi-honest",
        alias="trust",
        description="a mix may see updates, or keeps to the rules, or may try to change sums",
    )
    form: Literal["shares"] = Field("shares", description="how mixes get updates: as additive shares")
    mixes_needed: int = Field(0, ge=0, description="a retry may use as few mixes; default (0): all of them")
    n_min: int = Field(3, ge=2, description="fewest organisations whose updates may be added up and released together")

    @property
    def service(self) -> str:
        return "signing" if self.checked else "adding"

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Settled, collected and confirmed: the sums come after the settlement, and are checked before they count."""
        return ("open", "collect", "settle", "collect", *(["check"] if self.checked else []), "settle")

    @property
    def needed(self) -> int:
        return self.mixes_needed or self.mixes

    @property
    def checked(self) -> bool:
        """Whether the sums are checked before they count."""
        return self.trust_in == "malicious"

    @property
    def most_checked(self) -> int:
        """Sites for which the signed sums of all mixes fit into one message."""
        return (MAX_MESSAGE // self.mixes - 1024) // MEMBER

    @property
    def masks(self) -> int:
        """Mask numbers that a share carries besides the update."""
        return check.CHALLENGES if self.checked else 0

    @cached_property
    def _sets(self) -> list[tuple[int, ...]]:
        sizes = range(self.mixes, self.needed - 1, -1)
        return [chosen for size in sizes for chosen in combinations(range(self.mixes), size)]

    def taking_part(self, number: int, farewell: int = 0) -> tuple[int, ...]:
        """The mixes of attempt `number` at a round: all of them in the first, and every set that is allowed in turn.

        In a farewell always all: two sets of mixes that do not know of each other would add up counts of other sites.
        """
        return self._sets[0 if farewell else (number - 1) % len(self._sets)]

    def next_number(self, number: int, here: set[int]) -> int:
        """The next attempt whose mixes are all here; 0 if there is none."""
        later = range(number + 1, number + 1 + len(self._sets))
        return next((one for one in later if here.issuperset(self.taking_part(one))), 0)

    def data_mix(self, number: int, round: int) -> int:
        """The mix that gets data, where the others get seeds: each in turn, so that the work is spread evenly.

        It is the same for all sites of an attempt. Every share is uniform by itself, so it learns no more than others.
        """
        chosen = self.taking_part(number)
        return chosen[round % len(chosen)]

    def share_length(self, federation: Federation, parameters: int) -> int:
        """Words in the share that is no seed."""
        return words(self.coding(federation).moduli, self.columns(federation, parameters))

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        coding = federation.coding
        if not isinstance(coding, Modular):
            fix = "use encode: {kind: rns} or {kind: fixed}"
            yield f"encode.kind: {federation.encode.kind} gives no integers, and mixes add up integers; {fix}"
        elif coding.form != CARRY_SAFE and self.trust_in != "trusted":
            fix = "use form: carry-safe, or trust: trusted"
            yield f"encode.form: {coding.form} shows sums of residues, and sums of shares say nothing; {fix}"
        if (self.trust_in == "trusted") != (self.mixes == 1):
            many = "one mix sees every update" if self.mixes == 1 else f"{self.mixes} mixes get shares"
            fix = "trusted" if self.mixes == 1 else "semi-honest or malicious, or mixes: 1"
            yield f"route.trust: {self.trust_in}, and {many}; use {fix}"
        if self.needed < self.mixes and federation.quorum < federation.cohort:
            why = "two sets of mixes could release sums over different sites for one model"
            yield f"quorum: with route.mixes_needed {self.needed} of {self.mixes}, {why}; set quorum to the cohort"
        if self.checked and len(federation.sites) > self.most_checked:
            many = f"up to {self.most_checked} sites with {self.mixes} mixes, and there are {len(federation.sites)}"
            yield f"route.trust: malicious supports {many}"
        if self.mixes_needed and not 2 <= self.mixes_needed <= self.mixes:
            yield f"route.mixes_needed: {self.mixes_needed} of {self.mixes} mixes; use 2 to {self.mixes}"

    def trust(self, federation: Federation) -> list[Trust]:
        if self.mixes == 1:
            return [Trust(parties=("mix-0",))]
        learn = "every update of a round in which they are the mixes, and who sent it"
        told = {} if self.needed == self.mixes else {"learn": learn}
        return [
            Trust(parties=tuple(f"mix-{k}" for k in chosen), **told)
            for chosen in combinations(range(self.mixes), self.needed)
        ]

    def summed(self, federation: Federation, parameters: int, recorded: Mapping[str, Payload]) -> Residues | None:
        found = summed(self.coding(federation), self.columns(federation, parameters), recorded)
        return None if found is None else found[:, :parameters]

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        """The mixes take turns at getting data: theirs is the mean over rounds."""
        n, d, k, coding = federation.cohort, parameters, self.mixes, federation.coding
        ticket, c = tickets(federation), federation.bytes_of_counts
        share, papers = 4 * self.share_length(federation, d), PAPERS * self.checked
        seeds = SEED_BYTES * (k - 1)
        calls, asks = 3 * self.checked, len(self.exchanges) * k
        asks += 2 * self.checked  # for nonces and answers, at the first mix
        server = cost(coding, "server", 1, asks + ticket * n, models=(0, d), updates=(0, 0), counts=(k * c, 0))
        handled = 2 * n + (asks + calls * n) / k
        mix = cost(coding, "mix", k, handled, models=(d // k, n * d // k), updates=(0, 0), counts=(n * c, c))
        site = cost(coding, "site", n, 2 * k + calls + ticket, models=(d, 0), updates=(0, 0), counts=(0, k * c))
        up, total = share + seeds + k * papers, k * share + n * papers * k
        return [
            moving(server, total, 0, d, 0),
            replace(moving(mix, n * up // k, share, n * d // k, d), observed=n * d if k == 1 else 0),
            moving(site, 0, up, 0, d),
        ]

    def foretell(self, federation: Federation, parameters: int) -> Foretold:
        """The CPU time of shares, beside that of encoding, at what this machine was just measured to do."""
        from fl_privacy.mix.rates import seconds

        moduli, columns = self.coding(federation).moduli, self.columns(federation, parameters)
        found = seconds(moduli, columns, self.mixes, federation.cohort, self.masks)
        times = f"{found.site * 1e3:.2g} ms at a site, {found.mix * 1e3:.2g} ms at a mix"
        facts = {"seconds_per_site": found.site, "seconds_per_mix": found.mix}
        return Foretold(facts, [f"route: sums take at most about {times} of CPU time per round on this machine"])

    def site(self, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.routes.answering import Answering
        from fl_privacy.routes.sharing import Sharing

        return (Answering if self.checked else Sharing)(self, seat)

    def server(self, seat: ServerSeat) -> ServerEnd:
        from fl_privacy.routes.totals import AtServer
        from fl_privacy.routes.verifying import Verifying

        return (Verifying if self.checked else AtServer)(self, seat)


def moving(party: Cost, received: int, sent: int, parameters_in: int, parameters_out: int) -> Cost:
    """With the bytes of shares and sums; parameters are those of whole updates."""
    return replace(
        party,
        parameters_in=party.parameters_in + parameters_in,
        parameters_out=party.parameters_out + parameters_out,
        bytes_in=party.bytes_in + received,
        bytes_out=party.bytes_out + sent,
        updates=(received, sent),
    )
