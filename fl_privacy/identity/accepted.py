"""Which roster a site obeys: only one that its operator accepted. Its state folder remembers the acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_privacy.files import replace
from fl_privacy.identity.roster import Roster, parse

LAST = "roster.json"  # the roster that was accepted last, to compare the next one with


def file_of(state: Path) -> Path:
    """The digests of the accepted rosters, one per line."""
    return state / "roster.accepted"


def accept(roster: Roster, state: Path) -> None:
    """Obey this roster from now on, and no earlier one."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace(state / LAST, roster.canonical)
    replace(file_of(state), _line(roster))


def accept_here(roster: Roster, state: Path) -> None:
    """Also obey this roster: on one machine several runs of a site can be under way, each with keys of its own."""
    if not is_accepted(roster, state):
        with file_of(state).open("ab") as file:
            file.write(_line(roster))


def is_accepted(roster: Roster, state: Path) -> bool:
    try:
        return roster.digest in file_of(state).read_text(errors="replace").split()
    except OSError:
        return False


def last(state: Path) -> Roster | None:
    """The roster that was accepted last, if it is still there."""
    try:
        return parse((state / LAST).read_bytes())
    except (OSError, ValueError):
        return None


def changes(old: Roster | None, new: Roster) -> Iterator[str]:
    """What differs from the old roster to the new one, a line per party."""
    before = {} if old is None else {member.party: member for member in old.members}
    after = {member.party: member for member in new.members}
    for party in sorted(before.keys() | after.keys()):
        a, b, who = before.get(party), after.get(party), " ".join(party)
        if a is None and b is not None:
            yield f"+ {who} of {b.organisation}, key {b.key}"
        elif b is None and a is not None:
            yield f"- {who} of {a.organisation}"
        elif a is not None and b is not None:
            if a.key != b.key:
                yield f"~ {who}: new key {b.key}, was {a.key}"
            if a.organisation != b.organisation:
                yield f"~ {who}: of {b.organisation}, was of {a.organisation}"


def summary(roster: Roster, old: Roster | None, differs: Sequence[str]) -> Iterator[str]:
    """Who is in a roster, by organisation, and what differs from the one accepted last."""
    yield f"roster of {roster.federation}, serial {roster.serial}: digest {roster.digest}"
    sites = set(roster.sites)
    yield from (f"  {' '.join(m.party)}, key {m.key}" for m in roster.members if m not in sites)
    by: dict[str, list[str]] = {}
    for member in roster.sites:
        by.setdefault(member.organisation, []).append(member.name)
    yield f"{len(roster.sites)} sites of {len(by)} organisations:"
    yield from (f"  {organisation}: {', '.join(names)}" for organisation, names in sorted(by.items()))
    if old is not None:
        yield f"changes since serial {old.serial}, accepted last:" if differs else "the same as accepted last"
        yield from (f"  {line}" for line in differs)


def _line(roster: Roster) -> bytes:
    return f"{roster.digest}\n".encode()
