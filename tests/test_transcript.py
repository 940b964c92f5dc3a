"""A transcript returns what was recorded, survives crashes, and reveals every change made without the key."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from fl_privacy.errors import TranscriptError
from fl_privacy.transcript import RunWriter, ViewWriter, arrays, chain, open_run, verify
from fl_privacy.transcript.events import Invited, Mixing, Other, Receipt, Row, parse, rows_of
from fl_privacy.transcript.files import canonical
from fl_privacy.transcript.signing import HEAD_DOMAIN, message_of
from profiles import examples
from transcripts import (
    CA,
    RUN,
    SERVER,
    SHUFFLER,
    Authority,
    Crash,
    Credentials,
    Saboteur,
    flip,
    make_run,
    matrix,
    problems,
    rewrite,
    sign_head,
    truncate,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run_path(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / RUN))


DTYPES = st.sampled_from([np.dtype(name) for name in arrays.DTYPES] + [np.dtype(">f4"), np.dtype(">i8")])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))


WORDS = st.text(max_size=4)
EVENTS = st.one_of(
    st.builds(Invited, name=WORDS),
    st.builds(Receipt, name=WORDS, status=WORDS, time=st.floats(0, 2e9)),
    st.builds(Row, name=WORDS, row=st.integers(0, 2**40)),
    st.builds(Mixing, job=WORDS),
    st.builds(Other, fields=st.dictionaries(WORDS, st.integers() | WORDS, max_size=3)),
)


@examples(60)
@given(
    recorded=st.dictionaries(st.text(max_size=8), ARRAYS, max_size=4),
    tiers=st.lists(st.none() | st.floats(allow_nan=False) | st.text(max_size=4), max_size=3),
    events=st.lists(EVENTS, max_size=4),
)
def test_a_round_reads_back_as_recorded(recorded: Any, tiers: Any, events: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        RunWriter(folder, {"run": RUN}, *SERVER)
        ViewWriter(f"{folder}/views/server", "server", RUN, *SERVER).record(7, 1, recorded, tiers, events)
        view = open_run(folder).view("server")
        found, labels = view.round(7)
        assert list(found) == list(recorded)
        for name, array in recorded.items():
            assert found[name].dtype == array.dtype.newbyteorder("=")
            assert found[name].shape == array.shape
            assert found[name].tobytes() == np.ascontiguousarray(array).astype(found[name].dtype).tobytes()
        assert labels == tiers
        assert view.events(7) == events
        assert verify(folder, CA.pem).ok


def index_of(folder: Path, round: int, seq: int) -> list[dict[str, Any]]:
    return arrays.read_index(folder / chain.file_names(round, seq)[1])


def test_events_are_written_with_their_kind_and_read_back_by_it(tmp_path: Path) -> None:
    RunWriter(tmp_path, {"run": RUN}, *SERVER)
    writer = ViewWriter(tmp_path / "views/server", "server", RUN, *SERVER)
    noted = [Receipt(name="site-1", status="done", time=3.5), *rows_of(["site-1", "site-0"])]
    writer.record(1, 1, {}, events=noted)
    view = open_run(tmp_path).view("server")
    assert view.events(1) == noted
    assert [json.loads(row["event"]) for row in index_of(view.folder, 1, 1)] == [
        {"kind": "receipt", "name": "site-1", "status": "done", "time": 3.5},
        {"kind": "row", "name": "site-1", "row": 0},
        {"kind": "row", "name": "site-0", "row": 1},
    ]


def test_events_of_other_versions_are_read_and_invalid_ones_refused() -> None:
    assert parse({"name": "site-0", "row": 2}, "here") == Row(name="site-0", row=2)  # as aggregators used to write them
    assert parse({"kind": "row", "name": "site-0", "row": 2, "since": 9}, "here") == Row(name="site-0", row=2)
    for unknown in ({"kind": "closed", "rows": 2}, {"kind": ["row"]}, {}):
        assert parse(unknown, "here") == Other(fields=unknown)
        assert parse(unknown, "here").to_json() == unknown
    for wrong in ({"name": "site-0", "row": -1}, {"kind": "row", "name": "x", "row": "1"}, {"kind": "invited"}):
        with pytest.raises(TranscriptError, match=r"^here: (row|invited) event: (row|name): ") as caught:
            parse(wrong, "here")
        assert "\n" not in str(caught.value)


def test_arrays_in_any_memory_order_are_recorded(tmp_path: Path) -> None:
    base = np.arange(3 * (1 << 20), dtype=np.float32).reshape(3, -1)
    recorded = {"transposed": base.T, "strided": base[:, ::3], "fortran": np.asfortranarray(base), "scalar": 1.5}
    writer = ViewWriter(tmp_path / "v", "server", RUN, *SERVER)
    writer.record(1, 1, recorded)
    found = load_file(next((tmp_path / "v").glob("*.safetensors")))
    assert all(np.array_equal(found[name], recorded[name]) for name in recorded)


def test_other_tools_read_the_files(finished: Path) -> None:
    folder = finished / "views/server"
    data = load_file(folder / "round-00002-000002.safetensors")
    rows = pq.read_table(folder / "round-00002-000002.parquet").to_pylist()
    assert np.array_equal(data["updates"], matrix(2))
    assert [row["kind"] for row in rows] == ["array", "tier", "tier", "event"]
    assert rows[0] | {"file": ""} == dict.fromkeys(arrays.COLUMNS) | {
        "round": 2, "attempt": "a1", "seq": 2, "kind": "array", "name": "updates",
        "dtype": "float32", "shape": [2, 5], "file": "",
    }  # fmt: skip


def test_infinite_and_missing_tiers_keep_their_meaning(tmp_path: Path) -> None:
    ViewWriter(tmp_path, "server", RUN, *SERVER).record(1, 1, {}, tiers=[math.inf, None, np.float32(0.5), ""])
    assert chain.read_chain(tmp_path).head["seq"] == 1
    rows = index_of(tmp_path, 1, 1)
    assert arrays.tiers_of(rows) == [math.inf, None, 0.5, ""]


def test_the_reader_returns_manifest_metrics_views_and_truth(finished: Path) -> None:
    run = open_run(finished)
    assert run.manifest["status"] == "completed"
    assert run.manifest["rounds"] == 3
    assert [row["round"] for row in run.metrics] == [1, 2, 3]
    assert run.observers == ["server", "shuffler"]
    assert run.view("server").rounds == [1, 2, 3]
    assert np.array_equal(run.truth("site-0").round(3).arrays["updates"], matrix(3))


def test_the_last_attempt_of_a_round_counts(tmp_path: Path) -> None:
    RunWriter(tmp_path, {"run": RUN}, *SERVER)
    writer = ViewWriter(tmp_path / "views/server", "server", RUN, *SERVER)
    for attempt in ("first", "second"):
        writer.record(1, attempt, {}, events=[Invited(name=attempt)])
    view = open_run(tmp_path).view("server")
    assert view.attempts(1) == ["first", "second"]
    assert view.events(1) == [Invited(name="second")]
    assert view.events(1, "first") == [Invited(name="first")]
    assert index_of(view.folder, 1, 2)[0]["attempt"] == "second"
    with pytest.raises(TranscriptError, match="attempts there: first, second"):
        view.round(1, "third")


def test_a_missing_part_is_named_with_what_is_available(finished: Path, tmp_path: Path) -> None:
    run = open_run(finished)
    expected: list[tuple[Callable[[], Any], str]] = [
        (lambda: open_run(finished.parent / "other"), f"runs there: {RUN}"),
        (lambda: open_run(finished.parent), f"runs there: {RUN}"),
        (lambda: open_run(tmp_path / "a/b/c"), "runs there: none"),
        (lambda: run.view("mix-1"), "views there: server, shuffler"),
        (lambda: run.truth("site-9"), "truth there: site-0"),
        (lambda: run.view("server").round(4), "rounds there: 1, 2, 3"),
        (lambda: run.view("../truth/site-0"), "no views/../truth/site-0"),
    ]
    for call, message in expected:
        with pytest.raises(TranscriptError) as caught:
            call()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_reopened_view_continues_its_chain(tmp_path: Path) -> None:
    for t in range(3):
        ViewWriter(tmp_path, "server", RUN, *SERVER).record(t, 1, {"x": matrix(t)})
    assert [entry.seq for entry in chain.read_chain(tmp_path).entries] == [1, 2, 3]


def test_only_its_own_party_can_continue_a_view(tmp_path: Path) -> None:
    ViewWriter(tmp_path, "server", RUN, *SERVER).record(1, 1, {})
    for observer, run, who, message in [
        ("server", RUN, CA.issue("server", "server"), "signed by another key"),
        ("shuffler", RUN, SHUFFLER, "is the view of server"),
        ("server", "run-2", SERVER, "in run run-1"),
    ]:
        with pytest.raises(TranscriptError, match=message):
            ViewWriter(tmp_path, observer, run, *who)
    with pytest.raises(TranscriptError, match="belongs to another key"):
        ViewWriter(tmp_path, "server", RUN, SERVER.key, SHUFFLER.pem)


def test_a_view_has_one_writer(tmp_path: Path) -> None:
    one, two = (ViewWriter(tmp_path, "server", RUN, *SERVER) for _ in range(2))
    one.record(1, 1, {})
    with pytest.raises(TranscriptError, match="one writer"):
        two.record(1, 1, {})
    one.record(2, 1, {})
    assert [entry.round for entry in chain.read_chain(tmp_path).entries] == [1, 2]


def test_a_signed_view_is_never_overwritten(tmp_path: Path) -> None:
    writer = ViewWriter(tmp_path, "server", RUN, *SERVER)
    writer.record(1, 1, {})
    old = (tmp_path / "head.json").read_bytes()
    writer.record(2, 1, {})
    writer.record(3, 1, {})
    (tmp_path / "head.json").write_bytes(old)
    with pytest.raises(TranscriptError, match="beyond the signed head"):
        ViewWriter(tmp_path, "server", RUN, *SERVER)
    (tmp_path / "head.json").unlink()
    with pytest.raises(TranscriptError, match=r"no head\.json"):
        ViewWriter(tmp_path, "server", RUN, *SERVER)


STEPS_OF_A_RECORD = 10  # data, index and head: fsync, replace, fsync of the folder; the chain line: one fsync


@pytest.mark.parametrize("step", range(1, STEPS_OF_A_RECORD + 1))
def test_a_crash_at_any_step_loses_at_most_the_current_record(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path, close=None)
    writer = ViewWriter(path / "views/server", "server", RUN, *SERVER)
    with monkeypatch.context() as patch:
        Saboteur(patch, step, Crash(), die=True)
        with pytest.raises(Crash):
            writer.record(4, 1, {"x": matrix(4)})
    assert problems(path) == ""
    signed = open_run(path).view("server").rounds
    assert signed == ([1, 2, 3, 4] if step == STEPS_OF_A_RECORD else [1, 2, 3])
    again = ViewWriter(path / "views/server", "server", RUN, *SERVER)
    again.record(5, 1, {"x": matrix(5)})
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    assert problems(path) == ""
    assert open_run(path).view("server").rounds == [*signed, 5]


@pytest.mark.parametrize("step", range(1, STEPS_OF_A_RECORD + 1))
def test_a_full_disk_is_one_line_and_the_writer_continues(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path, close=None)
    writer = ViewWriter(path / "views/server", "server", RUN, *SERVER)
    with monkeypatch.context() as patch:
        Saboteur(patch, step, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), die=False)
        with pytest.raises(TranscriptError, match="No space left on device; free some space") as caught:
            writer.record(4, 1, {"x": matrix(4)})
    assert "\n" not in str(caught.value)
    writer.record(5, 1, {"x": matrix(5)})
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    assert problems(path) == ""
    assert open_run(path).view("server").rounds[-1] == 5


def test_a_really_full_disk(tmp_path: Path) -> None:
    """The kernel does not let the file grow: the limit stands in for a full disk."""
    code = """
import resource, sys
import numpy as np
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from fl_privacy.transcript import ViewWriter
folder, key, pem = sys.argv[1:]
writer = ViewWriter(folder, "server", "run-1", load_pem_private_key(key.encode(), None), pem)
writer.record(1, 1, {"x": np.zeros(10)})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
try:
    writer.record(2, 1, {"x": np.zeros(1 << 20)})
except Exception as error:
    print(type(error).__name__, error)
writer.record(3, 1, {"x": np.zeros(10)})
"""
    out = run_python(code, str(tmp_path), key_pem(SERVER), SERVER.pem.decode())
    assert out.startswith("TranscriptError")
    assert [entry.round for entry in chain.read_chain(tmp_path).entries] == [1, 3]
    assert len(list(tmp_path.iterdir())) == 2 + 2 * 2


@pytest.mark.parametrize("tail", [b'{"attempt":"', b'{"attempt":"1"}\n'])
def test_an_unsigned_last_line_is_not_part_of_the_view(tail: bytes, tmp_path: Path) -> None:
    path = make_run(tmp_path, close=None)
    log = path / "views/server/chain.jsonl"
    signed = log.read_bytes()
    log.write_bytes(signed + tail)
    assert problems(path) == ""
    assert open_run(path).view("server").rounds == [1, 2, 3]
    ViewWriter(log.parent, "server", RUN, *SERVER)
    assert log.read_bytes() == signed
    log.write_bytes(signed + tail + b"\n" + tail)
    assert "chain.jsonl" in problems(path)
    with pytest.raises(TranscriptError, match=r"chain\.jsonl: goes beyond"):
        ViewWriter(log.parent, "server", RUN, *SERVER)


def test_leftovers_of_a_crash_are_named_and_are_a_problem_in_a_completed_run(run_path: Path) -> None:
    leftover = run_path / "views/server/round-00004-000004.safetensors.part"
    leftover.write_bytes(b"half")
    assert leftover.name in problems(run_path)
    RunWriter(run_path, {"run": RUN}, *SERVER)
    report = verify(run_path, CA.pem)
    assert report.ok
    assert any(leftover.name in finding.message for finding in report.findings)


def test_a_genuine_run_verifies(finished: Path) -> None:
    report = verify(finished, CA.pem)
    assert report.ok
    assert {f.where for f in report.findings} >= {"manifest.json", "views/server", "views/shuffler", "truth/site-0"}


@pytest.mark.parametrize(
    "name",
    [
        "views/server/round-00002-000002.safetensors",
        "views/server/round-00002-000002.parquet",
        "views/shuffler/chain.jsonl",
        "views/shuffler/head.json",
        "truth/site-0/round-00001-000001.safetensors",
        "manifest.json",
        "metrics.jsonl",
    ],
)
def test_a_changed_or_missing_file_is_named(name: str, run_path: Path) -> None:
    good = (run_path / name).read_bytes()
    flip(run_path / name, len(good) // 2)
    assert Path(name).name in problems(run_path)
    (run_path / name).unlink()
    assert Path(name).name in problems(run_path)
    (run_path / name).write_bytes(good)
    assert verify(run_path, CA.pem).ok


@examples(300)
@given(data=st.data())
def test_no_byte_of_a_run_can_change_unnoticed(data: st.DataObject, finished: Path) -> None:
    files = sorted(p for p in finished.rglob("*") if p.is_file())
    path = data.draw(st.sampled_from(files))
    good = path.read_bytes()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bad)
    try:
        assert not verify(finished, CA.pem).ok
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize(
    ("name", "message"), [("manifest.json", "does not end with"), ("views/server/head.json", "not in canonical form")]
)
def test_a_signed_document_has_exactly_one_encoding(name: str, message: str, run_path: Path) -> None:
    path = run_path / name
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    assert f"{path.name}: {message}" in problems(run_path)


def test_extra_files_and_links_are_detected(run_path: Path, tmp_path: Path) -> None:
    folder = run_path / "views/server"
    (folder / "notes.txt").write_text("hello")
    assert "notes.txt" in problems(run_path)
    (folder / "notes.txt").unlink()
    data = folder / "round-00001-000001.safetensors"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    assert "is a link" in problems(run_path)
    with pytest.raises(TranscriptError, match="is a link"):
        open_run(run_path).view("server").round(1)


def test_a_truncated_chain_is_detected(run_path: Path) -> None:
    truncate(run_path / "views/server", 2)
    assert "chain.jsonl: holds 2 entries, but head.json signs 3" in problems(run_path)


def test_only_the_manifest_reveals_a_rollback_to_an_older_signed_head(run_path: Path) -> None:
    truncate(run_path / "views/shuffler", 2, SHUFFLER)
    assert "chain.jsonl: cut off after entry 2; the manifest pins 3" in problems(run_path)


def test_a_rewritten_history_is_detected_even_with_the_observer_s_own_key(run_path: Path) -> None:
    rewrite(run_path / "views/shuffler", SHUFFLER)
    assert "entry 3 is not the one that the manifest pins" in problems(run_path)


def test_recomputed_digests_do_not_help_without_the_key(run_path: Path) -> None:
    rewrite(run_path / "views/shuffler", None)
    assert "head.json: the signature does not fit the content" in problems(run_path)
    rewrite(run_path / "views/server", None, new_head=False)
    assert "chain.jsonl: does not lead to the head that head.json signs" in problems(run_path)


FORGERS = {
    "another CA": (Authority().issue("server", "server"), "does not lead to the CA"),
    "another CA of the same name": (Authority("test CA").issue("server", "server"), "does not lead to the CA"),
    "another observer": (SHUFFLER, "signed by shuffler"),
    "a site called server": (CA.issue("site", "server"), "sites sign truth"),
    "a server of another federation": (CA.issue("server", "server", federation="other"), "federation other"),
    "a CA": (CA.issue("server", "server", 1, -1, "demo", x509.BasicConstraints(True, None)), "not transcripts"),
    "a certificate that had expired": (CA.issue("server", "server", days=-0.5), "does not lead to the CA"),
    "a certificate that is not valid yet": (CA.issue("server", "server", days=2, start=1), "does not lead to the CA"),
}


@pytest.mark.parametrize("forger", FORGERS)
def test_a_view_signed_again_by_someone_else_is_detected(forger: str, run_path: Path) -> None:
    who, message = FORGERS[forger]
    view = chain.read_chain(run_path / "views/server")
    sign_head(run_path / "views/server", view.entries, view.head, who)
    assert message in problems(run_path)
    assert "head.json" in problems(run_path)


@examples(300)
@given(data=st.data())
def test_a_damaged_certificate_is_a_problem_and_not_a_crash(data: st.DataObject, finished: Path) -> None:
    """Its holder signs with it, so only the part that the CA signed (the certificate's first) is wrong."""
    path = finished / "views/server/head.json"
    good = path.read_bytes()
    certificate = x509.load_pem_x509_certificate(SERVER.pem)
    der = bytearray(certificate.public_bytes(serialization.Encoding.DER))
    der[data.draw(st.integers(0, 3 + len(certificate.tbs_certificate_bytes)))] ^= data.draw(st.integers(1, 255))
    pem = f"-----BEGIN CERTIFICATE-----\n{base64.encodebytes(der).decode()}-----END CERTIFICATE-----\n"
    body = {key: value for key, value in json.loads(good).items() if key != "signature"} | {"certificate": pem}
    signature = SERVER.key.sign(message_of(HEAD_DOMAIN, body), ec.ECDSA(hashes.SHA256()))
    path.write_bytes(canonical({**body, "signature": signature.hex()}) + b"\n")
    try:
        assert "head.json" in problems(finished)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("extensions", [(), (x509.BasicConstraints(False, None),)])
def test_a_certificate_issued_by_a_site_is_not_trusted(extensions: Any, run_path: Path) -> None:
    forger, site = Authority(), CA.issue("site", "site-0", 1, -1, "demo", *extensions)
    forger.key, forger.name = site.key, x509.load_pem_x509_certificate(site.pem).subject
    forged = forger.issue("server", "server")
    view = chain.read_chain(run_path / "views/server")
    sign_head(run_path / "views/server", view.entries, view.head, Credentials(forged.key, forged.pem + site.pem))
    assert "does not lead to the CA" in problems(run_path)


@pytest.mark.parametrize("may_issue", [True, False])
def test_an_intermediate_ca_is_accepted_if_it_may_issue(may_issue: bool, run_path: Path) -> None:
    usage = x509.KeyUsage(not may_issue, False, False, False, False, may_issue, False, False, False)
    issued = CA.issue("ca", "hospital", 1, -1, "demo", x509.BasicConstraints(True, 0), usage)
    middle = Authority()
    middle.key, middle.name = issued.key, x509.load_pem_x509_certificate(issued.pem).subject
    server = middle.issue("server", "server")
    view = chain.read_chain(run_path / "views/server")
    sign_head(run_path / "views/server", view.entries, view.head, Credentials(server.key, server.pem + issued.pem))
    assert verify(run_path, CA.pem).ok is may_issue


def test_a_certificate_may_expire_after_it_signed(tmp_path: Path) -> None:
    """Judged at the signing time in head.json: here a certificate that ends a second from now."""
    short = CA.issue("server", "server", days=1.5 / 86400)
    RunWriter(tmp_path, {"run": RUN}, *short).close("completed")
    until = x509.load_pem_x509_certificate(short.pem).not_valid_after_utc
    time.sleep(max(0.0, (until - datetime.now(UTC)).total_seconds()) + 0.01)
    assert verify(tmp_path, CA.pem).ok


def test_verify_needs_the_right_ca(run_path: Path) -> None:
    assert "does not lead to the CA" in problems(run_path, Authority().pem)
    with pytest.raises(TranscriptError, match="no PEM certificate"):
        verify(run_path, b"nonsense")
    with pytest.raises(TranscriptError, match="no such folder"):
        verify(run_path / "nowhere", CA.pem)


def test_only_a_server_signs_a_manifest(tmp_path: Path) -> None:
    RunWriter(tmp_path, {"run": RUN}, *SHUFFLER).close("completed")
    assert "manifest is the server's to sign" in problems(tmp_path)


def test_a_view_of_another_run_or_a_missing_view_is_detected(run_path: Path) -> None:
    shutil.rmtree(run_path / "views/server")
    assert "views/server" in problems(run_path)
    ViewWriter(run_path / "views/server", "server", "run-2", *SERVER)
    assert "is of run run-2" in problems(run_path)


def test_a_broken_manifest_does_not_hide_what_the_views_say(run_path: Path) -> None:
    (run_path / "manifest.json").write_text("{")
    report = verify(run_path, CA.pem)
    assert [finding.where for finding in report.problems] == ["manifest.json"]
    assert [f.where for f in report.findings if f.ok] == ["views/server", "views/shuffler", "truth/site-0"]


def test_a_view_may_grow_after_the_run_is_closed(run_path: Path) -> None:
    ViewWriter(run_path / "views/shuffler", "shuffler", RUN, *SHUFFLER).record(4, 1, {})
    assert verify(run_path, CA.pem).ok


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "round-00001-000001.safetensors/../x", "x"])
def test_a_chain_cannot_point_out_of_its_folder(name: str, run_path: Path) -> None:
    folder = run_path / "views/server"
    view = chain.read_chain(folder)
    entry = chain.Entry(1, 1, "a1", {name: "0" * 64, chain.file_names(1, 1)[1]: "0" * 64}, view.entries[0].prev)
    (folder / "chain.jsonl").write_bytes(entry.line)
    sign_head(folder, [entry], view.head, SERVER)
    with pytest.raises(TranscriptError, match="are not those of round 1"):
        open_run(run_path).view("server")
    assert "chain.jsonl: line 1" in problems(run_path)


@pytest.mark.parametrize("where", ["../views/server", "/tmp", "views/../truth/site-0", "truth/site-0", 7])
def test_a_manifest_cannot_point_out_of_the_run(where: Any, run_path: Path) -> None:
    path = run_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"observers": {"server": where}}))
    with pytest.raises(TranscriptError, match=r"observers\.server"):
        open_run(run_path)


def test_a_linked_view_is_refused(run_path: Path, tmp_path: Path) -> None:
    (run_path / "views/server").rename(tmp_path / "moved")
    (run_path / "views/server").symlink_to(tmp_path / "moved")
    with pytest.raises(TranscriptError, match="is a link"):
        open_run(run_path).view("server")
    assert "is a link" in problems(run_path)


BAD_JSON = {
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "deep": b"[" * 200_000,
    "a list": b"[1]",
    "nan": b'{"format":NaN}',
    "infinite": b'{"format":1,"run":1e999}',
    "a huge number": b'{"format":' + b"9" * 10_000 + b"}",
    "another format": b'{"format":9}',
    "no fields": b'{"format":2}',
    "wrong types": b'{"format":1,"run":[],"observer":{},"seq":"1","head":null}',
}


@pytest.mark.parametrize("content", BAD_JSON)
@pytest.mark.parametrize("name", ["manifest.json", "views/server/head.json"])
def test_malformed_json_is_a_transcript_error(name: str, content: str, run_path: Path) -> None:
    (run_path / name).write_bytes(BAD_JSON[content])
    assert Path(name).name in problems(run_path)
    with pytest.raises(TranscriptError, match=Path(name).name):
        open_run(run_path).view("server")


@pytest.mark.parametrize("content", BAD_JSON)
@pytest.mark.parametrize("name", ["metrics.jsonl", "views/server/chain.jsonl"])
def test_malformed_lines_are_a_transcript_error(name: str, content: str, run_path: Path) -> None:
    if name == "metrics.jsonl" and content in ("another format", "no fields", "wrong types", "infinite"):
        return
    (run_path / name).write_bytes((BAD_JSON[content] + b"\n") * 3)
    assert Path(name).name in problems(run_path)
    with pytest.raises(TranscriptError, match=f"{Path(name).name}: line 1"):
        _ = open_run(run_path).view("server"), open_run(run_path).metrics


def test_a_huge_document_is_refused_before_it_is_read(run_path: Path) -> None:
    with open(run_path / "views/server/head.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(TranscriptError, match="larger than"):
        open_run(run_path).view("server")


def header(text: bytes, size: int | None = None) -> bytes:
    return (len(text) if size is None else size).to_bytes(8, "little") + text


BAD_DATA = {
    "empty": b"",
    "short": b"\x01\x02",
    "a header beyond the file": header(b"{}", 1 << 62),
    "no JSON": header(b"{" * 64),
    "data beyond the file": header(b'{"x":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}'),
    "a shape that overflows": header(b'{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'),
    "an unknown type": header(b'{"x":{"dtype":"PICKLE","shape":[0],"data_offsets":[0,0]}}'),
    "a type numpy lacks": header(b'{"x":{"dtype":"F8_E4M3","shape":[0],"data_offsets":[0,0]}}'),
    "other arrays": header(b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtins\x94.",
}


@pytest.mark.parametrize("content", BAD_DATA)
@pytest.mark.parametrize("suffix", ["safetensors", "parquet"])
def test_malformed_data_is_a_transcript_error(suffix: str, content: str, run_path: Path) -> None:
    path = run_path / f"views/server/round-00001-000001.{suffix}"
    path.write_bytes(BAD_DATA[content])
    with pytest.raises(TranscriptError, match=path.name) as caught:
        open_run(run_path).view("server").round(1)
    assert "\n" not in str(caught.value)
    assert path.name in problems(run_path)


def test_a_parquet_file_with_other_columns_is_refused(run_path: Path) -> None:
    import pyarrow as pa

    pq.write_table(pa.table({"round": [1]}), run_path / "views/server/round-00001-000001.parquet")
    with pytest.raises(TranscriptError, match="its columns"):
        open_run(run_path).view("server").events(1)


def test_invalid_records_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    writer = ViewWriter(tmp_path, "server", RUN, *SERVER)
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((1, 1, {"x": np.array([object()])}), r"arrays\.x: dtype object"),
        ((1, 1, {"x": np.zeros(1, np.complex128)}), r"arrays\.x: dtype complex128"),
        ((1, 1, {"__metadata__": matrix(1)}), "cannot name an array"),
        ((1, 1, {"\ud800": matrix(1)}), "cannot name an array"),
        ((-1, 1, {}), "round -1"),
        ((1, "two words", {}), "two words"),
        ((1, 1, {}, [object()]), r"tiers\[0\]"),
        ((1, 1, {}, (), [Other(fields={"x": object()})]), r"events\[0\]\.x"),
    ]
    for arguments, message in refused:
        with pytest.raises(TranscriptError, match=message):
            writer.record(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain.jsonl", "head.json"]


def test_metrics_may_contain_numpy_values_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    run = RunWriter(tmp_path, {"run": RUN}, *SERVER)
    run.metric({"loss": np.float32(0.5), "worst": math.nan, "rows": np.arange(2), "ok": True})
    assert open_run(tmp_path).metrics == [{"loss": 0.5, "worst": None, "rows": [0, 1], "ok": True}]


def test_a_resumed_run_keeps_its_past(tmp_path: Path) -> None:
    path = make_run(tmp_path, close="failed")
    created = open_run(path).manifest["created"]
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'{"round":')
    run = RunWriter(path, {"run": RUN}, *SERVER)
    assert open_run(path).manifest["status"] == "running"
    assert verify(path, CA.pem).ok
    run.metric({"round": 4})
    run.close("completed")
    assert [row["round"] for row in open_run(path).metrics] == [1, 2, 3, 4]
    assert open_run(path).manifest["created"] == created
    assert verify(path, CA.pem).ok
    with pytest.raises(TranscriptError, match="holds run run-1"):
        RunWriter(path, {"run": "run-2"}, *SERVER)


def test_a_completed_run_has_the_rounds_and_the_changes_that_it_states(tmp_path: Path) -> None:
    path = make_run(tmp_path, close=None)
    change = {"from_round": 2, "fields": [{"field": "rounds", "old": 1, "new": 3}]}
    RunWriter(path, {"run": RUN, "guarantee": {}, "changes": [change]}, *SERVER).close("completed", rounds=3)
    report = verify(path, CA.pem)
    assert report.ok
    assert any("from round 2: rounds 1 -> 3" in finding.message for finding in report.findings)
    RunWriter(path, {"run": RUN}, *SERVER).close("completed", rounds=2)  # and a farewell, which is no round
    assert problems(path) == ""
    RunWriter(path, {"run": RUN}, *SERVER).close("completed", rounds=5)
    assert "states 5 rounds, and the server's view ends with round 3" in problems(path)
    RunWriter(path, {"run": RUN, "changes": [{"from_round": "x"}]}, *SERVER).close("completed", rounds=3)
    assert "changes is malformed" in problems(path)


def test_a_changed_manifest_is_not_resumed(run_path: Path) -> None:
    path = run_path / "manifest.json"
    path.write_text(path.read_text().replace("demo", "evil"))
    with pytest.raises(TranscriptError, match="does not fit the content"):
        RunWriter(run_path, {"run": RUN}, *SERVER)


STEPS_OF_A_MANIFEST = 3  # fsync, replace, fsync of the folder


@pytest.mark.parametrize("step", range(1, STEPS_OF_A_MANIFEST + 1))
def test_a_run_killed_while_its_manifest_is_signed_is_running_or_completed_and_can_be_resumed(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path, close=None)
    run = RunWriter(path, {"run": RUN}, *SERVER)
    with monkeypatch.context() as patch:
        Saboteur(patch, step, Crash(), die=True)
        with pytest.raises(Crash):
            run.close("completed")
    assert problems(path) == ""
    assert open_run(path).manifest["status"] == ("completed" if step == STEPS_OF_A_MANIFEST else "running")
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    assert problems(path) == ""


def test_the_manifest_covers_the_files_of_the_run(run_path: Path) -> None:
    run = RunWriter(run_path, {"run": RUN}, *SERVER)
    (run_path / "checkpoints").mkdir()
    (run_path / "checkpoints/round-3.safetensors").write_bytes(b"model")
    run.close("completed")
    (run_path / "report.html").write_text("made later")
    report = verify(run_path, CA.pem)
    assert report.ok
    assert any("not covered by the manifest: report.html" in finding.message for finding in report.findings)
    (run_path / "checkpoints/round-3.safetensors").write_bytes(b"madel")
    assert "checkpoints/round-3.safetensors" in problems(run_path)


def test_only_the_mutable_fields_of_a_manifest_can_change(tmp_path: Path) -> None:
    run = RunWriter(tmp_path, {"run": RUN}, *SERVER)
    refused = ({"run": "x"}, "run"), ({"nonce": "0"}, "nonce"), ({"heads": {}}, "heads")
    for fields, message in [*refused, ({"observers": {"a": "b"}}, r"observers\.a")]:
        with pytest.raises(TranscriptError, match=message):
            run.update(**fields)
    with pytest.raises(TranscriptError, match="does not close a run"):
        run.close("running")
    with pytest.raises(TranscriptError, match=r"manifest\.run"):
        RunWriter(tmp_path, {"run": "../up"}, *SERVER)
    run.update(rounds=2)
    assert open_run(tmp_path).manifest["observers"] == {}


def key_pem(who: Credentials) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return who.key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_transcript_loads_neither_torch_nor_pyarrow() -> None:
    code = "import sys, fl_privacy.transcript; print([m for m in ('torch', 'pyarrow', 'flwr') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_recording_needs_no_second_copy_in_memory(tmp_path: Path) -> None:
    """Peak resident memory while recording 200 MB: the matrix itself plus less than 0.3 of its size."""
    code = """
import resource, sys
import numpy as np
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from fl_privacy.transcript import ViewWriter
folder, key, pem = sys.argv[1:]
writer = ViewWriter(folder, "server", "run-1", load_pem_private_key(key.encode(), None), pem)
writer.record(1, 1, {"x": np.ones((2, 3), np.float32)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
big = np.ones((10, 5_000_000), np.float32)
writer.record(2, 1, {"rows": big})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / big.nbytes)
"""
    assert float(run_python(code, str(tmp_path), key_pem(SERVER), SERVER.pem.decode())) < 1.3
