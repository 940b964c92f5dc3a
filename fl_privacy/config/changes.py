"""What may change when a run is resumed: more rounds, a longer deadline, and where things are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fl_privacy.config.federation import Federation
from fl_privacy.errors import ConfigError
from fl_privacy.reading import validated

GROWING = ("rounds", "deadline")
PLACES = ("data", "device", "policy")  # of a site: its own business, and no part of the federation's digest
MAY = "only more rounds, a longer deadline, hosts and a site's data, device and policy may change"
OWN = "without a config, --resume uses the task's code that the run began with"
SHOWN = 6
LONGEST = 60
ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A field of the config, as it was and as it is."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.old)} -> {_shown(self.new)}"

    @property
    def allowed(self) -> bool:
        """Whether a run may be resumed with it."""
        first, *rest = self.field.split(".")
        if self.field in GROWING:
            return bool(self.new > self.old)
        return (
            first == "hosts" or self.field == "init.file" or (first == "sites" and len(rest) == 2 and rest[1] in PLACES)
        )

    def to_json(self) -> dict[str, Any]:
        return {"field": self.field, "old": self.old, "new": self.new}


def config_of(manifest: Mapping[str, Any], where: str) -> Federation:
    """The federation that a run's manifest describes."""
    config = manifest.get("config")
    return validated(Federation, config if isinstance(config, dict) else {}, f"{where}: config")


def accepted(manifest: Mapping[str, Any], now: Federation, where: str) -> list[Change]:
    """How a resumed run's config differs from its manifest; an error if more differs than may."""
    began = config_of(manifest, where)
    changes = list(_changes("", _plain(began), _plain(now)))
    refused = [change for change in changes if not change.allowed]
    if began.budget_rounds != now.budget_rounds and not refused:
        why = f"the noise of epsilon_total is planned for {began.rounds} rounds, and {now.rounds} were given"
        raise ConfigError(f"resume {where}: rounds: {why}; start a new run")
    if refused:
        more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        listed = "; ".join(map(str, refused[:SHOWN]))
        own = f"; {OWN}" if any(change.field == "task.sha256" for change in refused) else ""
        raise ConfigError(f"resume {where}: this run has another config: {listed}{more}; {MAY}{own}")
    same = now.model_copy(update={field: getattr(began, field) for field in GROWING})
    if same.digest != manifest.get("digest", began.digest):
        why = "no key differs, so the code of its task or the version of fl-privacy does"
        raise ConfigError(f"resume {where}: this run has another config: {why}; use those it began with")
    return changes


def _plain(federation: Federation) -> dict[str, Any]:
    """Keys and values, with the sites by name; the text of a task's code is there by its digest."""
    values = federation.model_dump(mode="json", exclude={"task": {"source"}})
    return {**values, "sites": {site["name"]: site for site in values["sites"]}}


def _changes(field: str, old: Any, new: Any) -> Iterator[Change]:
    """Field by field; where another kind was chosen, only that."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield Change(field, None if old is ABSENT else old, None if new is ABSENT else new)
    elif old.get("kind") != new.get("kind"):
        yield Change(f"{field}.kind", old.get("kind"), new.get("kind"))
    else:
        for key in dict.fromkeys((*old, *new)):
            yield from _changes(f"{field}.{key}".lstrip("."), old.get(key, ABSENT), new.get(key, ABSENT))


def _shown(value: Any) -> str:
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
