"""Which tests are end-to-end, and what runs side by side.

`make test` deals the tests out to several processes, a group at a time, so that what tests share is started once. Long
groups go first, for the last one to end decides how long all of them take.
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

# Fixtures that start a federation, a network of machines or containers, the slowest first. Who asks for one is
# end-to-end; a test that starts a federation itself says so with `@pytest.mark.e2e`.
WHOLE = (
    *("machines", "unbroken", "audited", "metered", "seen", "loot", "demo", "world", "published", "colluded"),
    *("followed", "stack", "image"),
)


def _group(item: pytest.Item) -> tuple[int, str]:
    """Where a test comes in the order of groups, and its group: the tests of a file that share what they start."""
    asked = getattr(item, "fixturenames", ())
    for place, name in enumerate(WHOLE):
        if name in asked:
            return place, f"{item.path.stem}-{name}"
    if item.get_closest_marker("e2e"):
        return len(WHOLE), item.nodeid
    return len(WHOLE) + 1, item.path.stem


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups = {item: _group(item) for item in items}
    for item, (place, name) in groups.items():
        item.add_marker(pytest.mark.xdist_group(name))
        if place < len(WHOLE) or item.get_closest_marker("containers"):
            item.add_marker("e2e")
    items.sort(key=lambda item: groups[item][0])
