"""Which tests are end-to-end, and in which order files are dealt out.

`make test` deals whole files out to several processes, so that what the tests of a file share is started once. Files
with end-to-end tests go first, for the last one to end decides how long all of them take.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# As the launcher sets it for its processes: threads that wait for each other only slow a machine that is busy anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says more of the other tests that run than of the code.
settings.register_profile("side-by-side", deadline=None)
settings.load_profile("side-by-side")

# Fixtures that start a federation, a network of machines or containers. Who asks for one is end-to-end; a test that
# starts a federation itself says so with `@pytest.mark.e2e`.
WHOLE = {
    *("audited", "colluded", "demo", "followed", "loot", "machines", "metered", "published", "seen", "unbroken"),
    *("image", "stack", "world"),
}
SLOWEST = ("test_hosts", "test_federation", "test_benchmarks", "test_extending", "test_attack", "test_audited_kits")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if WHOLE.intersection(getattr(item, "fixturenames", ())) or item.get_closest_marker("containers"):
            item.add_marker("e2e")
    slow = dict.fromkeys([*SLOWEST, *(item.path.stem for item in items if item.get_closest_marker("e2e"))])
    places = {stem: place for place, stem in enumerate(slow)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
