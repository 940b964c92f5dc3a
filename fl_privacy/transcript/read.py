"""Reading a transcript: plain arrays and dicts, nothing executed, no path that leaves the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.arrays import Array, Tier, events_of, read_arrays, read_index, tiers_of
from fl_privacy.transcript.chain import Chain, Entry, file_names, read_chain
from fl_privacy.transcript.events import FAREWELL, VOID, Event
from fl_privacy.transcript.files import read_log
from fl_privacy.transcript.run import MANIFEST, METRICS, TRUTH, VIEWS, folders, load_manifest, view_folder


class RoundView(NamedTuple):
    """What an observer received in one attempt of a round; tier i is the label of row i."""

    arrays: dict[str, Array]
    tiers: list[Tier]


class View:
    """One observer's records. Whether they are genuine is for `verify` to say."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._chain: Chain = read_chain(self.folder)
        self.observer: str = self._chain.head["observer"]

    @property
    def rounds(self) -> list[int]:
        return sorted({entry.round for entry in self._chain.entries if not entry.attempt.startswith((FAREWELL, VOID))})

    @property
    def farewells(self) -> list[int]:
        """The exchanges after the last round, numbered after it: sites got a model and sent no updates."""
        return sorted({entry.round for entry in self._chain.entries if entry.attempt.startswith(FAREWELL)})

    @property
    def voided(self) -> list[tuple[int, str]]:
        """Round and name of the attempts in which somebody cheated."""
        return [(entry.round, entry.attempt) for entry in self._chain.entries if entry.attempt.startswith(VOID)]

    def attempts(self, round: int) -> list[str]:
        """The recorded attempts of a round, in order; an attempt recorded twice stands twice."""
        return [entry.attempt for entry in self._records(round)]

    def round(self, round: int, attempt: int | str | None = None) -> RoundView:
        """The last recorded attempt of a round, or the one asked for."""
        path, index = self._files(round, attempt)
        arrays, rows = read_arrays(path), read_index(index)
        names = [row["name"] for row in rows if row["kind"] == "array"]
        if len(names) != len(arrays) or set(names) != set(arrays):
            raise TranscriptError(f"{path}: its arrays are not those in the index beside it")
        return RoundView({name: arrays[name] for name in names}, tiers_of(rows))

    def events(self, round: int, attempt: int | str | None = None) -> list[Event]:
        """The events recorded with that attempt."""
        _, index = self._files(round, attempt)
        return events_of(read_index(index), str(index))

    def _records(self, round: int) -> list[Entry]:
        if found := [entry for entry in self._chain.entries if entry.round == round]:
            return found
        raise TranscriptError(f"{self.folder}: no round {round}; {_there('rounds', self.rounds)}")

    def _files(self, round: int, attempt: int | str | None) -> tuple[Path, Path]:
        """The arrays and the index of an attempt."""
        found = [entry for entry in self._records(round) if attempt is None or entry.attempt == str(attempt)]
        if not found:
            there = _there("attempts", self.attempts(round))
            raise TranscriptError(f"{self.folder}: no attempt {attempt} of round {round}; {there}")
        data, index = file_names(found[-1].round, found[-1].seq)
        return self.folder / data, self.folder / index


@dataclass(frozen=True)
class Run:
    """A run folder; views and truth are opened when asked for."""

    path: Path
    manifest: dict[str, Any]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that a crash cut short is left out."""
        return read_log(self.path / METRICS)[0]

    @property
    def observers(self) -> list[str]:
        """The observers whose view is here: one that the manifest lists may not have been copied in yet."""
        return folders(self.path, VIEWS)

    @property
    def sites(self) -> list[str]:
        """The sites whose truth is here."""
        return folders(self.path, TRUTH)

    def view(self, observer: str) -> View:
        return self._open(VIEWS, observer, self.observers)

    def truth(self, site: str) -> View:
        """What scoring needs, written by the site under `audit: true`; no attack reads it."""
        return self._open(TRUTH, site, self.sites)

    def _open(self, group: str, name: str, names: list[str]) -> View:
        if name not in names:
            raise TranscriptError(f"{self.path}: no {group}/{name}; {_there(group, names)}")
        view = View(view_folder(self.path, f"{group}/{name}"))
        if view.observer != name:
            raise TranscriptError(f"{view.folder}: is the view of {view.observer}, not of {name}")
        return view


def open_run(path: str | Path) -> Run:
    """The run in a folder, for reading."""
    root = Path(path)
    if not (root / MANIFEST).is_file():
        folder = root if root.is_dir() else root.parent
        runs = sorted(found.parent.name for found in folder.glob(f"*/{MANIFEST}"))
        raise TranscriptError(f"{root}: no run here ({MANIFEST} is missing); {_there('runs', runs)} in {folder}")
    return Run(root, load_manifest(root)[0])


def _there(what: str, names: list[Any]) -> str:
    shown = ", ".join(str(name) for name in names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{what} there: {shown or 'none'}"
