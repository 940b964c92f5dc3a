"""Which tests are end-to-end, and what runs side by side.

`make test` deals the tests out to several processes, a group at a time: what the tests of a file share is started once.
Long groups go first, for the last one to end decides how long all of them take.
"""

from __future__ import annotations

import pytest

# Fixtures that start a federation, a network of machines or containers. Whoever asks for one is end-to-end; a test that
# starts a federation itself says so with `@pytest.mark.e2e`.
WHOLE = ("machines", "audited", "unbroken", "metered", "seen", "loot", "demo", "published", "world", "stack", "image")


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
        if asked.intersection(WHOLE) or item.get_closest_marker("containers"):
            item.add_marker("e2e")
    groups = {item: _group(item) for item in items}
    for item, (_, name) in groups.items():
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: groups[item][0])
