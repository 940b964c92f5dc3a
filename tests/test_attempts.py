"""What an attempt is bound to: its terms, its cohort, the middleware's journal, and what a site has sent."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fl_privacy.config import Federation
from fl_privacy.crypto import merkle
from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.round.cohort import Cohort, salt_of
from fl_privacy.round.journal import FILE, Entry, Journal
from fl_privacy.round.sent import Sent
from fl_privacy.round.terms import FIELDS, Terms
from helpers import refused

SALT = bytes(32)
NAMES = st.lists(st.text("abcdefghij-", min_size=1, max_size=8), min_size=1, max_size=40, unique=True)


def terms(**changes: Any) -> Terms:
    fields: dict[str, Any] = {
        "run": "run",
        "nonce": b"n" * 32,
        "round": 1,
        "number": 1,
        "federation": "f" * 64,
        "roster": "r" * 64,
        "model": b"m" * 32,
        "root": b"c" * 32,
        "cohort": 5,
        "organisations": 5,
        "quorum": 4,
        "layout": "l" * 64,
        "counts": 0,
        "farewell": 0,
        "best": 0,
        "recipient": "sha256:" + "0" * 64,
    }
    return Terms(**{**fields, **changes})


@given(st.integers(1, 70), st.data())
def test_a_path_leads_from_its_leaf_to_the_root_and_from_no_other(count: int, data: st.DataObject) -> None:
    leaves = [merkle.leaf(b"%d" % i) for i in range(count)]
    index = data.draw(st.integers(0, count - 1))
    path, root = merkle.path(leaves, index), merkle.root(leaves)
    assert merkle.climb(leaves[index], index, count, path) == root
    assert merkle.climb(merkle.leaf(b"another"), index, count, path) != root
    for other in set(range(-1, count + 1)) - {index}:
        assert merkle.climb(leaves[index], other, count, path) != root
    assert merkle.climb(leaves[index], index, count, [*path, SALT]) is None


@given(NAMES, st.binary(min_size=32, max_size=32))
def test_every_site_finds_itself_in_its_cohort_and_nobody_else_does(names: list[str], salt: bytes) -> None:
    cohort = Cohort(names, salt)
    for name in names:
        place = cohort.place(name)
        assert place.root(name, len(names)) == cohort.root
        assert place.root(name + "x", len(names)) != cohort.root
    assert cohort.of_bits(cohort.bits(names[::2])) == tuple(sorted(names[::2]))


def test_the_root_depends_on_the_sites_and_the_salt_alone() -> None:
    assert Cohort("ab", SALT).root == Cohort("ba", SALT).root
    assert len({Cohort("ab", SALT).root, Cohort("abc", SALT).root, Cohort("ab", b"1" * 32).root}) == 3
    salts = [salt_of(b"s" * 32, "run", model) for model in (b"one", b"two", b"one")]
    assert salts[0] == salts[2] != salts[1]


@pytest.mark.parametrize("bits", [b"", b"\x00\x00", b"\x08"])
def test_bits_of_another_cohort_are_refused(bits: bytes) -> None:
    with refused("INVALID_ARGUMENT"):
        Cohort("abc", SALT).of_bits(bits)


@pytest.mark.parametrize("field", FIELDS)
def test_the_name_changes_with_every_field(field: str) -> None:
    value = getattr(terms(), field)
    other: Any = value + 1 if isinstance(value, int) else value[:-1] + (b"x" if isinstance(value, bytes) else "x")
    assert terms(**{field: other}).name != terms().name


def test_terms_read_back_as_written_and_nothing_else_is_read() -> None:
    text = terms().to_json()
    assert Terms.parse(text) == terms()
    for bad in (
        "",
        "[]",
        "{}",
        text[:-1],
        text.replace("1", "true", 1),
        text.replace(" ", ""),
        text.upper(),
        "[" * 9999,
    ):
        with refused("INVALID_ARGUMENT"):
            Terms.parse(bad)


def test_terms_that_differ_from_what_a_party_holds_are_refused() -> None:
    good = terms()
    assert Terms.checked(good, federation=good.federation, model=good.model) == good
    with refused("PERMISSION_DENIED"):
        Terms.checked(good, federation="another")

    class Lying:
        attempt = terms(quorum=1).name

        def __getattr__(self, name: str) -> Any:
            return getattr(good, name)

    with refused("INVALID_ARGUMENT"):
        Terms.checked(Lying())


@pytest.mark.parametrize(
    "changes",
    [
        {"cohort": 3, "quorum": 3},
        {"cohort": 6},
        {"quorum": 3},
        {"quorum": 6},
        {"organisations": 2},
        {"organisations": 6},
        {"round": 0},
        {"round": 8},
        {"number": 0},
    ],
)
def test_the_config_binds_the_server(changes: dict[str, Any]) -> None:
    sites = [{"name": f"site-{i}"} for i in range(6)]
    federation = Federation.model_validate({"name": "test", "sites": sites, "cohort": 5, "quorum": 4, "rounds": 5})
    terms().check(federation)
    terms(farewell=5, round=6, cohort=6, quorum=3).check(federation)
    with pytest.raises(ProtocolError):
        terms(**changes).check(federation)


def entry(attempt: str = "one", model: str = "m", round: int = 1, farewell: bool = False, run: str = "run") -> Entry:
    return Entry(run, round, attempt, model, farewell)


def release(journal: Journal, attempt: str, members: str = "abc", content: bytes = b"x", counted: str = "") -> bool:
    return journal.release(attempt, members, b"\x07", [content], counted)


class TestJournal:
    """Each rule holds in the process that made the entries, and in one that reads them."""

    @pytest.fixture(params=["same process", "restarted"])
    def again(self, request: pytest.FixtureRequest) -> Any:
        return (lambda journal: journal) if request.param == "same process" else self.restarted

    @staticmethod
    def restarted(journal: Journal) -> Journal:
        return Journal(journal._path.parent)

    def test_a_model_is_released_for_one_set_of_sites(self, tmp_path: Path, again: Any) -> None:
        journal = Journal(tmp_path)
        journal.open(entry("one"))
        release(journal, "one", "abc")
        journal = again(journal)
        journal.open(entry("two"))
        with refused("FAILED_PRECONDITION"):
            release(journal, "two", "abd")
        release(journal, "two", "abc", content=b"y")
        journal.open(entry("other run", run="another"))
        release(journal, "other run", "abd")

    def test_a_repeated_release_has_the_same_updates(self, tmp_path: Path, again: Any) -> None:
        journal = Journal(tmp_path)
        journal.open(entry())
        release(journal, "one")
        journal = again(journal)
        journal.open(entry())
        assert journal.released("one") == b"\x07"
        release(journal, "one")
        with refused("FAILED_PRECONDITION"):
            release(journal, "one", content=b"y")

    def test_an_attempt_whose_release_arrived_is_not_opened_again(self, tmp_path: Path, again: Any) -> None:
        journal = Journal(tmp_path)
        journal.open(entry())
        journal.confirm("one")  # nothing was released yet
        journal.open(entry())
        release(journal, "one")
        journal.confirm("one")
        journal = again(journal)
        with refused("FAILED_PRECONDITION"):
            journal.open(entry())
        journal.open(entry("two"))
        release(journal, "two", content=b"y")

    def test_a_journal_that_was_lost_has_another_id(self, tmp_path: Path) -> None:
        journal = Journal(tmp_path)
        assert len(journal.id) == 32
        assert self.restarted(journal).id == journal.id
        (tmp_path / FILE).unlink()
        assert self.restarted(journal).id != journal.id
        (tmp_path / FILE).write_bytes(b"")  # made by an older version
        assert self.restarted(journal).id == ""

    def test_a_newer_attempt_for_the_same_model_voids_the_older_one_for_ever(self, tmp_path: Path, again: Any) -> None:
        journal = Journal(tmp_path)
        for name in ("one", "two"):
            journal.open(entry(name))
        journal = again(journal)
        assert journal.voided("run", "m") == ["one"]
        for step in (lambda: journal.open(entry("one")), lambda: release(journal, "one")):
            with refused("FAILED_PRECONDITION"):
                step()
        release(journal, "two")
        journal.void("two")
        assert journal.voided("run", "m") == ["one"]

    def test_a_released_round_keeps_its_model(self, tmp_path: Path, again: Any) -> None:
        journal = Journal(tmp_path)
        journal.open(entry())
        release(journal, "one")
        journal = again(journal)
        with refused("FAILED_PRECONDITION"):
            journal.open(entry("two", model="changed"))
        journal.open(entry("three", model="next", round=2))
        journal.open(entry("bye", model="final", farewell=True))  # a run that ended here may get more rounds

    def test_counts_of_a_model_leave_for_one_set_of_sites(self, tmp_path: Path, again: Any) -> None:
        journal = Journal(tmp_path)
        journal.open(entry(round=2))
        assert release(journal, "one", counted="abc")
        journal = again(journal)
        journal.open(entry("bye", round=3, farewell=True))
        assert not release(journal, "bye", "ab", counted="ab")
        journal.open(entry("last", model="new", round=4, farewell=True))
        assert release(journal, "last", "ab", counted="ab")
        assert release(again(journal), "last", "ab", counted="ab")

    def test_a_line_cut_off_by_a_crash_announced_nothing(self, tmp_path: Path) -> None:
        journal = Journal(tmp_path)
        journal.open(entry())
        whole = (tmp_path / FILE).read_bytes()
        release(journal, "one")
        after = (tmp_path / FILE).read_bytes()
        for end in range(len(whole), len(after)):
            (tmp_path / FILE).write_bytes(after[:end])
            found = Journal(tmp_path)
            assert found.released("one") is None
            release(found, "one", "other")

    def test_a_damaged_line_stops_the_start(self, tmp_path: Path) -> None:
        Journal(tmp_path).open(entry())
        (tmp_path / FILE).write_bytes(b"{}\n")
        with pytest.raises(LaunchError, match="line 1 is damaged"):
            Journal(tmp_path)


@pytest.mark.parametrize("on_disk", [True, False])
class TestSent:
    def test_a_second_cohort_for_a_model_needs_the_first_one_void(self, tmp_path: Path, on_disk: bool) -> None:
        sent = Sent(tmp_path if on_disk else None)
        sent.keep(terms())
        again = Sent(tmp_path) if on_disk else sent
        again.check(terms(), frozenset())
        again.check(terms(number=2), frozenset())  # the same cohort
        again.check(terms(model=b"next"), frozenset())
        other = terms(root=b"other")
        with refused("PERMISSION_DENIED"):
            again.check(other, frozenset({"another attempt"}))
        again.check(other, frozenset({terms().name}))

    def test_only_the_journal_that_opened_an_attempt_can_call_it_void(self, tmp_path: Path, on_disk: bool) -> None:
        sent = Sent(tmp_path if on_disk else None)
        sent.keep(terms(), ["a", "b"])
        again, void = Sent(tmp_path) if on_disk else sent, frozenset({terms().name})
        again.check(terms(root=b"other"), void, ["a", "b"])
        for journals in (["a", "c"], ["a"], []):
            with refused("PERMISSION_DENIED"):
                again.check(terms(root=b"other"), void, journals)

    def test_a_lost_journal_gets_a_model_s_updates_again_only_from_the_whole_cohort(
        self, tmp_path: Path, on_disk: bool
    ) -> None:
        """It does not know whose updates it released, and the sum without one site would show that site's.

        That sum may be the earlier one: a quorum that is the cohort now says nothing of it.
        """
        folder = tmp_path / "whole" if on_disk else None
        whole, all_of = Sent(folder), dataclasses.replace(terms(), cohort=4, quorum=4)
        whole.keep(all_of, ["a", "b"])
        for changes in ({}, {"number": 2}):
            (Sent(folder) if on_disk else whole).check(dataclasses.replace(all_of, **changes), frozenset(), ["a", "c"])
            with refused("PERMISSION_DENIED"):
                whole.check(dataclasses.replace(all_of, quorum=3, **changes), frozenset(), ["a", "c"])
        goodbye = dataclasses.replace(all_of, farewell=1, counts=9)
        whole.check(goodbye, frozenset(), ["a", "c"])
        with refused("PERMISSION_DENIED"):  # counts of another whole cohort: the difference is one site's
            whole.check(dataclasses.replace(goodbye, root=b"other", cohort=3, quorum=3), frozenset(), ["a", "c"])
        sent = Sent(tmp_path if on_disk else None)
        first = dataclasses.replace(terms(), cohort=4, quorum=3)
        sent.keep(first, ["a", "b"])
        again = Sent(tmp_path) if on_disk else sent
        for changes in ({}, {"number": 2}):
            for journals in (["a", "c"], ["c", ""]):
                with refused("PERMISSION_DENIED"):
                    again.check(dataclasses.replace(first, **changes), frozenset(), journals)
                with refused("PERMISSION_DENIED"):
                    again.check(dataclasses.replace(first, quorum=4, **changes), frozenset(), journals)
            again.check(dataclasses.replace(first, **changes), frozenset(), ["a", ""])  # one is gone for now
        again.check(dataclasses.replace(first, model=b"next"), frozenset(), ["c", "d"])
        goodbye = dataclasses.replace(first, farewell=1, counts=0)
        again.check(goodbye, frozenset(), ["c", "d"])  # nothing is sent
        with refused("PERMISSION_DENIED"):
            again.check(dataclasses.replace(goodbye, counts=9), frozenset(), ["c", "d"])

    def test_another_run_of_the_same_name_is_refused(self, tmp_path: Path, on_disk: bool) -> None:
        sent = Sent(tmp_path if on_disk else None)
        sent.keep(terms())
        with refused("PERMISSION_DENIED"):
            sent.check(terms(nonce=b"new", round=2, model=b"next"), frozenset())
        sent.check(dataclasses.replace(terms(nonce=b"new"), run="another"), frozenset())
