"""What a mailbox has of a run whose sites aggregate: sealed shards that it cannot read, and who has done what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.errors import LaunchError, require
from fl_privacy.files import append, make_folder, sync_folder, whole_lines
from fl_privacy.round.attempt import Attempt
from fl_privacy.round.resident import version_of
from fl_privacy.round.shard_store import RUN_NAME
from fl_privacy.wire import federation_pb2 as pb


@dataclass(frozen=True)
class Held:
    """An aggregating site's newest shard, sealed."""

    said: pb.ShardStatement
    envelopes: dict[str, bytes]
    data: Payload


@dataclass
class Carried:
    """One attempt, from the sites' sealed shards to the aggregating sites' results."""

    header: pb.RoundHeader  # as the server opened it
    attempt: Attempt
    sizes: Sequence[int]  # bytes of each part of a submission
    reports: dict[int, tuple[frozenset[str], frozenset[str], int]] = field(default_factory=dict)  # and the floor
    decision: tuple[bytes, bytes] | None = None  # whose updates and whose counts, as bits
    deciding: asyncio.Task[None] | None = None
    shared: dict[int, pb.ShareHeader] = field(default_factory=dict)
    asked: dict[int, frozenset[str]] = field(default_factory=dict)  # for whose copies a shard was asked for again
    modelled: set[int] = field(default_factory=set)  # aggregating sites that were given the model of the round
    result: pb.ReleaseHeader | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def version(self) -> int:
        """After which round the model of this attempt is; 0 is the initial one, which every site makes itself."""
        return version_of(self.header)

    def column(self, index: int) -> Payload:
        """The parts for one aggregating site, of all accepted sites by name."""
        rows, start = self.attempt.rows, sum(self.sizes[:index])
        assert rows is not None
        parts = [rows.take(site)[start : start + self.sizes[index]] for site in self.attempt.round.accepted]
        return np.concatenate(parts)


@dataclass
class Carrying:
    """A run."""

    held: dict[int, Held] = field(default_factory=dict)
    now: Carried | None = None


class Signed:
    """On the disk: the digests that aggregating sites signed for every round of a run, and why a run was stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, run: str, **fields: Any) -> None:
        """On the disk when this returns."""
        path = self._path(run)
        make_folder(self._folder)
        end = sum(len(line) + 1 for line in whole_lines(path.read_bytes())) if path.exists() else 0
        append(path, end, json.dumps(fields, sort_keys=True).encode() + b"\n")
        sync_folder(self._folder)

    def shards(self, run: str, round: int) -> list[bytes]:
        """Of the model after a round; the newest if a round was done again."""
        found = self._newest(run, lambda line: line.get("round") == round)
        require(bool(found), f"round: no model after round {round} is known here", "NOT_FOUND")
        return [bytes.fromhex(one) for one in found["shards"]]

    def of_attempt(self, run: str, attempt: str) -> list[str]:
        """The fingerprints of what was signed in an attempt that was completed; none otherwise."""
        return list(self._newest(run, lambda line: line.get("attempt") == attempt).get("said", ()))

    def stopped(self, run: str) -> str:
        """Why a run must not go on."""
        return str(self._newest(run, lambda line: "stopped" in line).get("stopped", ""))

    def _newest(self, run: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        path = self._path(run)
        if not path.exists():
            return {}
        try:
            lines: list[dict[str, Any]] = [json.loads(line) for line in whole_lines(path.read_bytes())]
            return next((line for line in reversed(lines) if wanted(line)), {})
        except ValueError:
            raise LaunchError(f"state {path}: damaged; restore it from a backup") from None

    def _path(self, run: str) -> Path:
        require(RUN_NAME.fullmatch(run) is not None, "run: letters, digits, dots and dashes only")
        return self._folder / f"{run}.jsonl"
