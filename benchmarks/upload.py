"""One update over mutual TLS: our chunked stream against one ordinary protobuf message, in bytes per CPU second.

We add up the CPU time (user and system) of both ends: on a busy machine it drifts less than wall time, and CPU is what
a shuffler with many sites runs out of. Each method has its own processes, because memory that one frees would help the
other. The two take turns; the result is the median ratio of neighbouring uploads.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.parties import HOST, MEGABYTE, PARAMETERS, QUICK_PARAMETERS, Parties, parties
from benchmarks.result import Result

LIMIT = 2.5
TIMEOUT = 60.0


class Sender:
    """A pair of processes that uploads with one method, on demand."""

    def __init__(self, made: Parties, way: str, size: int) -> None:
        script = Path(__file__).with_name("upload_server.py")
        there, here = ("shuffler", f"{way}-server"), ("site", f"{way}-site")
        server, site = made.keys(there, here)
        made.fleet.start(way, [sys.executable, str(script), "--keys", str(server.folder), "--way", way])
        address = f"{HOST}:{made.fleet.wait_for(way, 'listening', TIMEOUT)['port']}"
        command = [sys.executable, "-m", "benchmarks.upload_sender", "--way", way, "--address", address]
        command += ["--size", str(size), "--keys", str(site.folder), "--peer", made.identity(*there).uri]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self) -> float:
        """CPU seconds of both ends for one upload."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def run(quick: bool = False) -> list[Result]:
    size, repeats = (QUICK_PARAMETERS, 3) if quick else (PARAMETERS, 15)
    with parties("bench") as made:
        senders = [Sender(made, way, size) for way in ("stream", "message")]
        try:
            pairs = [[sender.seconds() for sender in senders] for _ in range(repeats + 1)][1:]
        finally:
            for sender in senders:
                sender.close()
    ratio = statistics.median(message / ours for ours, message in pairs)
    detail = _detail(4 * size, [p[0] for p in pairs], [p[1] for p in pairs])
    return [Result("upload, stream to one message", ratio, LIMIT, "x bytes/CPU s", "higher", detail)]


def _detail(size: int, streams: list[float], messages: list[float]) -> dict[str, Any]:
    def rate(seconds: list[float]) -> float:
        return round(size / MEGABYTE / statistics.median(seconds), 1)

    return {
        "megabytes": round(size / MEGABYTE, 1),
        "repeats": len(streams),
        "stream_mb_per_cpu_second": rate(streams),
        "message_mb_per_cpu_second": rate(messages),
    }
