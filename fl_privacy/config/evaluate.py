"""`evaluate`: where a model is evaluated, how often, and at what privacy cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fl_privacy.choices import Model
from fl_privacy.dp import gaussian
from fl_privacy.dp.counts import Noise, bounded
from fl_privacy.dp.ledger import Charge
from fl_privacy.errors import FederationError
from fl_privacy.scores.form import Form

if TYPE_CHECKING:
    from fl_privacy.config import Federation


NOT_COVERED = "counts of held-out records have no noise: no guarantee covers them"
TELLING = "sums of counts over different cohorts tell how many held-out records of each class a site has"


class Evaluate(Model):
    """Who evaluates the global model. At the sites, only the sum of their counts reaches the server."""

    by: Literal["auto", "sites", "server"] = Field(
        "auto", description="auto: the sites if the data are their own, the server if they are a pooled data set"
    )
    every: int = Field(
        1, ge=1, le=100_000, description="the model is evaluated every so many rounds, and after the last one"
    )
    epsilon: float | None = Field(
        None, gt=0, description="privacy budget of one evaluation, with `privatise`; default: counts have no noise"
    )
    clip: float = Field(8.0, gt=0, le=1e6, description="largest loss or error that counts, with `epsilon`")
    alone: bool = Field(True, description="each site compares the final model with one trained on its own data alone")


def due(federation: Federation, round: int) -> bool:
    """Whether the model after a round is evaluated; the initial one always is."""
    return round % federation.evaluate.every == 0 or round == federation.rounds


def short(value: Any) -> Any:
    """`evaluate: sites` means `{by: sites}`."""
    return {"by": value} if isinstance(value, str) else value


def problems(federation: Federation) -> Iterator[str]:
    """What `evaluate` demands of the rest of the federation and does not find."""
    asked, route, guard = federation.evaluate, federation.route, federation.privatise
    if asked.by == "sites" and not route.carries_counts:
        yield f"evaluate.by: route.kind {route.kind!r} carries no counts of sites; use server"
    if asked.epsilon is not None and not federation.sites_evaluate:
        yield "evaluate.epsilon: only sites have a budget, and the server evaluates; remove it or use by: sites"
    elif asked.epsilon is not None and not bounded(guard.unit, guard.adjacency):
        yield f"evaluate.epsilon: privatise.kind is {guard.kind!r}; use ldp or dpsgd, or remove the budget"
    elif asked.epsilon is not None and federation.budget_rounds > 1:
        yield "evaluate.epsilon: sites.epsilon_total plans the whole budget for updates; use sites.epsilon per round"
    elif federation.sites_evaluate and not federation.task.is_own:
        try:
            form_of(federation)
        except FederationError as error:
            yield f"evaluate.by: {error}"


def exact_form(federation: Federation) -> Form:
    """The counts of an evaluation without noise; of a task of one's own, this runs its code."""
    from fl_privacy.tasks.making import classes_of

    return Form(classes_of(federation))


def noise_of(federation: Federation) -> Noise | None:
    """The noise of one evaluation at a site; None without a budget for it."""
    asked, guard = federation.evaluate, federation.privatise
    if asked.epsilon is None or guard.unit is None or guard.at_delta is None:
        return None
    return Noise.of(exact_form(federation).classes, asked.clip, guard.unit, asked.epsilon, guard.at_delta)


def charge_of(federation: Federation) -> Charge | None:
    """What one evaluation costs a site; None without noise. Whatever is counted, it is noised as a whole."""
    epsilon, guard = federation.evaluate.epsilon, federation.privatise
    if epsilon is None or guard.unit is None or guard.adjacency is None or guard.at_delta is None:
        return None
    return Charge(gaussian.sigma(epsilon, guard.at_delta), guard.unit, guard.adjacency)


def form_of(federation: Federation) -> Form:
    """The counts of an evaluation, as they travel."""
    noise = noise_of(federation)
    return exact_form(federation) if noise is None else noise.form


def statement(federation: Federation) -> dict[str, Any]:
    """Who evaluates, and what protects the held-out records: for the manifest."""
    asked = federation.evaluate
    if not federation.sites_evaluate:
        return {"by": "server"}
    terms: dict[str, Any] = {"by": "sites", "every": asked.every, "floor": federation.floor}
    if asked.epsilon is not None:
        return {**terms, "epsilon": asked.epsilon, "clip": asked.clip, "covered": True}
    return {**terms, "covered": False, "note": NOT_COVERED}
