"""What a federation's `privatise` does to an update: its cost, known before training, and how to compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fl_privacy.config import Dpsgd, Federation, Ldp
from fl_privacy.dp import ldp
from fl_privacy.dp.ledger import Charge
from fl_privacy.dp.sampled import Plan, Private, plan

Train = Callable[..., ldp.Vector]  # () trains plainly, (Private) privately


class Mechanism(Protocol):
    @property
    def charge(self) -> Charge: ...

    def release(self, train: Train, key: bytes) -> ldp.Vector:
        """The private update; `key` is single-use."""
        ...


@dataclass(frozen=True)
class AfterTraining:
    """Ldp: noise on the trained update."""

    terms: Ldp
    epsilon: float

    @property
    def charge(self) -> Charge:
        return ldp.charge(self.epsilon, self.terms.delta)

    def release(self, train: Train, key: bytes) -> ldp.Vector:
        return ldp.privatise(train(), self.terms.clip, self.epsilon, self.terms.delta, key)


@dataclass(frozen=True)
class InTraining:
    """Dpsgd: noise in every step."""

    plan: Plan

    @property
    def charge(self) -> Charge:
        return self.plan.charge

    def release(self, train: Train, key: bytes) -> ldp.Vector:
        return train(Private(self.plan, key))


def mechanism(federation: Federation, epsilon: float | None, records: int) -> Mechanism | None:
    """The mechanism of a site with this budget and number of records; None if updates leave the site as trained."""
    terms, training = federation.privatise, federation.task.train
    if epsilon is None or not isinstance(terms, Ldp | Dpsgd):
        return None
    if isinstance(terms, Ldp):
        return AfterTraining(terms, epsilon)
    return InTraining(plan(records, training.epochs, training.batch_size, terms.clip, epsilon, terms.delta))
