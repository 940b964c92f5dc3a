"""What an attack is: its signature is its threat model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.registry import Registry

if TYPE_CHECKING:
    from attacks.common.knowledge import Knowledge, Need
    from attacks.common.measure import Scores
    from attacks.common.truth import Truth
    from fl_privacy.transcript.read import View

F = TypeVar("F")


class Unsuitable(FederationError):
    """A run that the attack does not apply to, whoever observed it; without names, `replay` leaves the attack out."""


@runtime_checkable
class Attack(Protocol[F]):
    """One attack. `run` gets nothing but the views and the knowledge it declares; only `score` gets the truth."""

    @property
    def name(self) -> str: ...

    @property
    def observers(self) -> tuple[str, ...]:
        """Whose views it can read, as patterns: `server`, `aggregator-*`."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """What its attacker knows beyond the views and the public protocol."""
        ...

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> F:
        """What the parties behind these views, all colluding, find out; `seed` is the attacker's own randomness."""
        ...

    def score(self, findings: F, truth: Truth) -> Scores:
        """How much of it is true, every measure beside what knowing nothing would give."""
        ...


ATTACKS: Registry[Attack[Any]] = Registry(
    "fl_privacy.attacks",
    {
        "inversion": "attacks.inversion.attack:ATTACK",
        "membership": "attacks.membership.attack:ATTACK",
        "metadata": "attacks.metadata.attack:ATTACK",
        "permutation": "attacks.permutation.attack:ATTACK",
        "poisoning": "attacks.poisoning.attack:ATTACK",
        "privacy-inference": "attacks.privacy_inference.attack:ATTACK",
        "source": "attacks.source.attack:ATTACK",
        "topology": "attacks.topology.attack:ATTACK",
    },
)


def known(name: str) -> Attack[Any]:
    """The attack of this name, or an error that lists what there is."""
    found = ATTACKS.get(name)
    if not isinstance(found, Attack):
        raise ConfigError(f"attacks: {name!r} lacks name, observers, needs, run or score; see docs/attacks.md")
    if found.name != name:
        raise ConfigError(f"attacks: {name!r} calls itself {found.name!r}; register it under its own name")
    return found
