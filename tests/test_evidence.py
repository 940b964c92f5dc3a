"""What `transcript verify` finds in a changed run: every row of the tables in docs/transcript.md is made here."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from fl_privacy.transcript import RunWriter, ViewWriter, chain, open_run, signing, verify
from fl_privacy.transcript.files import file_sha256
from fl_privacy.transcript.pin import pin
from fl_privacy.transcript.run import SIGNED_FIELDS, head_of, load_manifest
from fl_privacy.transcript.signing import TIME, Signer
from fl_privacy.transcript.write import write_manifest
from transcripts import (
    CA,
    RUN,
    SERVER,
    SHUFFLER,
    SITE,
    Authority,
    Credentials,
    flip,
    make_run,
    matrix,
    notes,
    problems,
    rewrite,
    sign_head,
    truncate,
)

ROOT = Path(__file__).parent.parent
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
OLD = Path(__file__).parent / "old_transcripts"  # written by the versions that had these formats


class Case(NamedTuple):
    """A changed run, and what somebody who verifies it has: the authority, and perhaps the head."""

    path: Path
    ca: bytes = CA.pem
    head: str | None = None


Change = Callable[[Path], Case]
DETECTED: dict[str, Change] = {}
NAMED: dict[str, Change] = {}
NOT_DETECTED: dict[str, Change] = {}


def case(name: str, *tables: dict[str, Change]) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        for table in tables or (DETECTED,):
            table[name] = change
        return change

    return add


def rows(heading: str) -> dict[str, str]:
    """The ids of a table in the docs, and its last column."""
    text = (ROOT / "docs" / "transcript.md").read_text().split(f"\n### {heading}\n")[1]
    return dict(re.findall(r"^\| `([a-z0-9-]+)` \|.*\| ?(.*?) ?\|$", text.split("\n#")[0], re.M))


def said(cell: str) -> str:
    """The message in a table's last column."""
    return cell.removeprefix("`").removesuffix("`")


@pytest.mark.parametrize(
    ("heading", "cases"),
    [("Detected", DETECTED), ("Accepted, and named", NAMED), ("Not detected", NOT_DETECTED)],
)
def test_the_tables_in_the_docs_have_exactly_the_tested_rows(heading: str, cases: dict[str, Change]) -> None:
    assert list(rows(heading)) == list(cases)


@pytest.mark.parametrize("name", rows("Detected"))
def test_a_change_is_detected_and_named(name: str, tmp_path: Path) -> None:
    assert said(rows("Detected")[name]) in problems(*DETECTED[name](tmp_path))


@pytest.mark.parametrize("name", rows("Accepted, and named"))
def test_what_is_accepted_is_named(name: str, tmp_path: Path) -> None:
    path, ca, _ = NAMED[name](tmp_path)
    assert problems(path, ca) == ""
    assert said(rows("Accepted, and named")[name]) in notes(path, ca)


@pytest.mark.parametrize("name", rows("Not detected"))
def test_what_is_not_detected_needs_the_head_where_the_docs_say_so(name: str, tmp_path: Path) -> None:
    path, ca, head = NOT_DETECTED[name](tmp_path)
    assert problems(path, ca) == ""
    assert ("--head" in rows("Not detected")[name]) == (head is not None) == (problems(path, ca, head) != "")


def manifest_of(path: Path) -> dict[str, object]:
    """The fields of a manifest without its signature."""
    return {name: value for name, value in load_manifest(path)[0].items() if name not in SIGNED_FIELDS}


def rebuild(path: Path) -> None:
    """The manifest before the last one: nothing in it is secret."""
    manifest = json.loads((path / "manifest.json").read_text())
    earlier = {**manifest, "status": "running", "files": {}, "heads": {}}
    (path / "manifest.json").write_text(json.dumps(earlier, indent=2) + "\n")


def copied_in_later(tmp_path: Path, status: str = "completed") -> Path:
    """A closed run into which the shuffler's view is copied afterwards."""
    path = tmp_path / RUN
    run = RunWriter(path, {"run": RUN, "observers": {"shuffler": "views/shuffler"}}, *SERVER)
    elsewhere = ViewWriter(tmp_path / "shuffler", "shuffler", RUN, *SHUFFLER, run.nonce)
    for t in (1, 2):
        elsewhere.record(t, 1, {"x": matrix(t)})
    run.close(status)
    shutil.copytree(tmp_path / "shuffler", path / "views/shuffler")
    return path


def signed_again(path: Path, who: Credentials) -> None:
    view = chain.read_chain(path / "views/server")
    sign_head(path / "views/server", view.entries, view.head, who)


def old(tmp_path: Path, format: int = 2) -> Case:
    with tarfile.open(OLD / f"format-{format}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    return Case(tmp_path / RUN, (tmp_path / "ca.pem").read_bytes())


@case("manifest-changed")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"demo"', '"demi"'))
    return Case(path)


@case("closed-to-running")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    rebuild(path)
    (path / "metrics.jsonl").write_text('{"loss":0.001,"round":3}\n')
    shutil.rmtree(path / "truth")
    return Case(path)


@case("signature-removed")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    (path / "manifest.json").write_text(json.dumps(manifest_of(path) | {"status": "running"}, indent=2) + "\n")
    return Case(path)


@case("manifest-of-a-site")
def _(tmp_path: Path) -> Case:
    RunWriter(tmp_path / RUN, {"run": RUN}, *SITE).close("completed")
    return Case(tmp_path / RUN)


@case("metrics-changed")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace("0.5", "0.1"))
    return Case(path)


@case("checkpoint-deleted")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    (path / "checkpoints").mkdir()
    (path / "checkpoints/round-00003.safetensors").write_bytes(b"model")
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    (path / "checkpoints/round-00003.safetensors").unlink()
    return Case(path)


@case("truth-deleted")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    shutil.rmtree(path / "truth")
    return Case(path)


@case("view-deleted")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    shutil.rmtree(path / "views/shuffler")
    return Case(path)


@case("view-changed")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    flip(path / "views/server/round-00002-000002.safetensors")
    return Case(path)


@case("view-rebuilt")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    rewrite(path / "views/shuffler", None)
    return Case(path)


@case("view-cut")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    truncate(path / "views/server", 2)
    return Case(path)


@case("view-put-back")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    truncate(path / "views/shuffler", 2, SHUFFLER)
    return Case(path)


@case("view-rewritten")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    rewrite(path / "views/shuffler", SHUFFLER)
    return Case(path)


@case("view-added")
def _(tmp_path: Path) -> Case:
    return Case(copied_in_later(tmp_path))


@case("view-moved")
def _(tmp_path: Path) -> Case:
    path, other = make_run(tmp_path / "a", close=None), make_run(tmp_path / "b", close=None)
    shutil.rmtree(path / "views/shuffler")
    shutil.move(other / "views/shuffler", path / "views/shuffler")
    return Case(path)


@case("view-of-another-run")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    shutil.rmtree(path / "views/shuffler")
    ViewWriter(path / "views/shuffler", "shuffler", "run-2", *SHUFFLER)
    return Case(path)


@case("view-of-another-party")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    shutil.rmtree(path / "views/server")
    shutil.copytree(path / "views/shuffler", path / "views/server")
    return Case(path)


@case("view-signed-by-another")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    signed_again(path, SHUFFLER)
    return Case(path)


@case("truth-by-server")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    shutil.copytree(path / "views/server", path / "truth/server")
    return Case(path)


@case("another-authority")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    signed_again(path, Authority().issue("server", "server"))
    return Case(path)


@case("another-federation")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    signed_again(path, CA.issue("server", "server", federation="other"))
    return Case(path)


@case("pin-forged")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    manifest = load_manifest(path)[0]
    manifest["heads"]["views/shuffler"]["seq"] = 2
    write_manifest(path, {name: value for name, value in manifest.items() if name != "signature"}, Signer(*SERVER))
    return Case(path)


@case("file-in-view")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    (path / "views/server/notes.txt").write_text("hello")
    return Case(path)


@case("rounds-misstated")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    RunWriter(path, {"run": RUN, "guarantee": {}}, *SERVER).close("completed", rounds=5)
    return Case(path)


@case("run-put-back", DETECTED, NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    before = shutil.copytree(path, tmp_path / "before")
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    head = head_of(path)
    shutil.rmtree(path)
    shutil.move(before, path)
    return Case(path, head=head)


@case("server-signed-again", DETECTED, NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    head = head_of(path)
    (path / "metrics.jsonl").write_text('{"loss":0.001,"round":3}\n')
    files = {"metrics.jsonl": file_sha256(path / "metrics.jsonl")}
    write_manifest(path, manifest_of(path) | {"files": files}, Signer(*SERVER))
    return Case(path, head=head)


@case("resumed")
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    head = head_of(path)
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    return Case(path, head=head)


@case("older-put-back")
def _(tmp_path: Path) -> Case:
    found = old(tmp_path)
    rebuild(found.path)
    return found


@case("not-closed", NAMED)
def _(tmp_path: Path) -> Case:
    return Case(make_run(tmp_path, close=None))


@case("half-record", NAMED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    (path / "views/server/round-00004-000004.safetensors.part").write_bytes(b"half")
    return Case(path)


@case("view-grown", NAMED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    ViewWriter(path / "truth/site-0", "site-0", RUN, *SITE).record(4, 1, {})
    return Case(path)


@case("pinned-late", NAMED)
def _(tmp_path: Path) -> Case:
    path = copied_in_later(tmp_path)
    pin(path, *SERVER, CA.pem)
    return Case(path)


@case("failed-not-pinned", NAMED)
def _(tmp_path: Path) -> Case:
    return Case(copied_in_later(tmp_path, "failed"))


@case("no-nonce", NAMED)
def _(tmp_path: Path) -> Case:
    return Case(make_run(tmp_path, nonces=False))


@case("was-closed", NAMED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    RunWriter(path, {"run": RUN}, *SERVER)
    return Case(path)


@case("file-added", NAMED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    (path / "report.html").write_text("made later")
    return Case(path)


@case("link-added", NAMED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path)
    (path / "report.html").symlink_to("/etc/hostname")
    (path / "more").symlink_to("/etc")
    (path / "scores.json.part").write_text("{}")
    return Case(path)


@case("older-format", NAMED)
def _(tmp_path: Path) -> Case:
    return old(tmp_path)


@case("metrics-not-closed", NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    (path / "metrics.jsonl").write_text('{"loss":0.001,"round":3}\n')
    return Case(path)


@case("view-put-back-not-pinned", NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    truncate(path / "views/shuffler", 2, SHUFFLER)
    return Case(path)


@case("truth-deleted-not-pinned", NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    shutil.rmtree(path / "truth")
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    return Case(path)


@case("recorded-falsely", NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    nonce = open_run(path).manifest["nonce"]
    ViewWriter(path / "views/shuffler", "shuffler", RUN, *SHUFFLER, nonce).record(4, 1, {"updates": -matrix(1)})
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    return Case(path)


@case("backdated", NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    """The stolen key belongs to a certificate that was valid until half a day ago."""
    path, stolen = make_run(tmp_path), CA.issue("server", "server", days=-0.5)
    head = head_of(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signing, "utc_now", lambda: (datetime.now(UTC) - timedelta(days=0.75)).strftime(TIME))
        write_manifest(path, manifest_of(path) | {"config": {"name": "demo", "private": True}}, Signer(*stolen))
    return Case(path, head=head)


@case("signature-twin", NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    """Of r and s, the order of P-256 minus s fits as well."""
    path = make_run(tmp_path)
    head, text = head_of(path), (path / "manifest.json").read_text()
    found = json.loads(text)["signature"]
    r, s = decode_dss_signature(bytes.fromhex(found))
    (path / "manifest.json").write_text(text.replace(found, encode_dss_signature(r, ORDER - s).hex()))
    return Case(path, head=head)


@case("logs-changed", NOT_DETECTED)
def _(tmp_path: Path) -> Case:
    path = make_run(tmp_path, close=None)
    (path / "logs").mkdir()
    (path / "logs/server.log").write_text("one\n")
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    (path / "logs/server.log").write_text("two\n")
    return Case(path)


def test_any_other_running_manifest_made_of_a_completed_one_is_refused(tmp_path: Path) -> None:
    """Whatever of the close somebody undoes, the signature covers the completed manifest alone."""
    path = make_run(tmp_path)
    final = (path / "manifest.json").read_text()
    for undone in ({"files": {}}, {"heads": {}}, {"status": "running"}, {"serial": 2}, {"late": []}):
        manifest = json.loads(final) | undone
        (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        assert verify(path, CA.pem).ok == (json.loads(final) == manifest), undone
