"""Which tests are end-to-end, and what runs side by side.

`make test` deals the tests out to several processes, a group at a time: what the tests of a file share is started once.
Long groups go first, for the last one to end decides how long all of them take.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import settings

# As the launcher sets it for its processes: threads that wait for each other only slow a machine that is busy anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says more of the other tests that run than of the code.
settings.register_profile("side-by-side", deadline=None)
settings.load_profile("side-by-side")

# Fixtures that start a federation, a network of machines or containers. Whoever asks for one is end-to-end; a test that
# starts a federation itself says so with `@pytest.mark.e2e`.
WHOLE = (
    "machines",
    "audited",
    "unbroken",
    "metered",
    "seen",
    "loot",
    "demo",
    "published",
    "colluded",
    "world",
    "stack",
    "image",
)
# Those that start Ray. Two Rays that start at once on a small machine time each other out, so they take turns; a test
# that starts one itself says so with `@pytest.mark.ray`.
RAYS = ("audited", "published")
RAY_LOCK = Path(tempfile.gettempdir(), "fl-privacy-tests-ray.lock")


def _group(item: pytest.Item) -> tuple[int, str]:
    """Where a test comes in the order of groups, and its group."""
    asked = getattr(item, "fixturenames", ())
    for place, name in enumerate(WHOLE):
        if name in asked:
            return place, f"{item.path.stem}-{name}"
    if item.get_closest_marker("e2e"):
        return len(WHOLE), item.nodeid  # it shares nothing
    return len(WHOLE) + 1, item.path.stem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        if asked.intersection(RAYS):
            item.add_marker("ray")
        if asked.intersection(WHOLE) or any(map(item.get_closest_marker, ("containers", "ray"))):
            item.add_marker("e2e")
    groups = {item: _group(item) for item in items}
    for item, (_, name) in groups.items():
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: groups[item][0])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Outside the timeout of the test: it begins when Ray is free."""
    with RAY_LOCK.open("w") if item.get_closest_marker("ray") else nullcontext() as lock:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)
