"""Which tests are end-to-end, and in which order test files are distributed.

`make test` distributes whole files over several processes, so that shared fixtures of a file start once. Files with
end-to-end tests go first, because the last file to finish decides how long the whole suite takes.
"""

from __future__ import annotations

import os

import pytest

import commands
import profiles  # noqa: F401 (Hypothesis)

# As the launcher does for its processes: threads that wait for each other only slow down a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Fixtures that start a federation, a network of machines or containers. A test that uses one is end-to-end; a test
# that starts a federation itself has `@pytest.mark.e2e`.
WHOLE = {
    *("audited", "colluded", "demo", "evaluated", "followed", "loot", "machines", "metered", "published", "recorded"),
    *("seen", "sharded", "shuffled", "unbroken"),
    *("image", "stack", "world"),
}
# By the seconds that each takes beside the others; the last one waits for 15 s.
SLOWEST = (
    *("test_hosts", "test_hostile_peers", "test_benchmarks", "test_faults", "test_settlement", "test_own_kits"),
    *("test_federation", "test_peers", "test_membership_runs", "test_python", "test_own_data", "test_metadata"),
    *("test_extending", "test_attack", "test_eris_audit", "test_hostile_server", "test_placement_runs"),
    *("test_inversion", "test_audited_kits", "test_limits"),
)


def pytest_collection_finish(session: pytest.Session) -> None:
    commands.END_TO_END = any(item.get_closest_marker("e2e") for item in session.items)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", action="store_true", help="run the tests that `make test-faults` adds, and only those")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("faults")
    items[:] = [item for item in items if bool(item.get_closest_marker("faults")) is wanted]
    for item in items:
        if WHOLE.intersection(getattr(item, "fixturenames", ())) or item.get_closest_marker("containers"):
            item.add_marker("e2e")
    slow = dict.fromkeys([*SLOWEST, *(item.path.stem for item in items if item.get_closest_marker("e2e"))])
    places = {stem: place for place, stem in enumerate(slow)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
