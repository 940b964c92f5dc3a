"""What an operator reads: a scrape, and an event file with its rotated files."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any


def get(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def values(text: str) -> dict[str, float]:
    """Every sample of a scrape, by its name and labels."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def kept(path: Path) -> list[dict[str, Any]]:
    """All events of a file and its rotated files, oldest first."""
    files = [*sorted(path.parent.glob(f"{path.name}.[0-9]*"), key=lambda p: -int(p.suffix[1:])), path]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
