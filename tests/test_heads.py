"""The nonce of a run, the heads that parties report, and what the server pins of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from fl_privacy.cli import app
from fl_privacy.config import Stop
from fl_privacy.errors import TranscriptError
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority as Issuer, load_key
from fl_privacy.ops.log import Log
from fl_privacy.roles import RUN as ANY_RUN
from fl_privacy.round.best import Best
from fl_privacy.scores.metrics import Scores
from fl_privacy.transcript import RunWriter, ViewWriter, chain, open_run, verify
from fl_privacy.transcript.files import canonical, sha256
from fl_privacy.transcript.pin import pin
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.transcript.run import DETACHED, SIGNED_FIELDS, head_of
from fl_privacy.transcript.signing import DETACHED_DOMAIN, Signer
from server_app.scoreboard import Scoreboard
from test_evidence import copied_in_later, old
from transcripts import (
    CA,
    RUN,
    SERVER,
    SHUFFLER,
    SITE,
    Authority,
    Crash,
    Credentials,
    Saboteur,
    make_run,
    matrix,
    problems,
    truncate,
)

# The nonce


def test_a_run_keeps_its_nonce_and_no_other_run_has_it(tmp_path: Path) -> None:
    one, other = (RunWriter(tmp_path / name, {"run": RUN}, *SERVER).nonce for name in "ab")
    assert re.fullmatch("[0-9a-f]{64}", one)
    assert one != other
    assert RunWriter(tmp_path / "a", {"run": RUN, "nonce": other}, *SERVER).nonce == one


def test_the_nonce_is_in_every_link_of_a_view(tmp_path: Path) -> None:
    firsts = []
    for name, nonce in (("a", "0" * 64), ("b", "1" * 64)):
        ViewWriter(tmp_path / name, "server", RUN, *SERVER, nonce).record(1, 1, {"x": matrix(1)})
        firsts.append(chain.read_chain(tmp_path / name).entries[0])
    assert firsts[0].files == firsts[1].files
    assert firsts[0].prev != firsts[1].prev


def test_a_view_of_an_earlier_run_of_the_same_name_is_not_continued(tmp_path: Path) -> None:
    ViewWriter(tmp_path, "server", RUN, *SERVER, "0" * 64).record(1, 1, {})
    with pytest.raises(TranscriptError, match="is of an earlier run named run-1; move the folder away"):
        ViewWriter(tmp_path, "server", RUN, *SERVER, "1" * 64)
    with pytest.raises(TranscriptError, match="not 32 bytes"):
        ViewWriter(tmp_path, "server", RUN, *SERVER, "abc")
    assert ViewWriter(tmp_path, "server", RUN, *SERVER).nonce == "0" * 64


def keyring(tmp_path: Path) -> Keyring:
    return Issuer.open(tmp_path / "pki").issue(Identity("demo", "shuffler", "shuffler"), tmp_path / "keys")


def test_a_recorder_beside_a_manifest_finds_the_nonce_and_one_elsewhere_is_given_it(tmp_path: Path) -> None:
    run, keys = RunWriter(tmp_path / RUN, {"run": RUN}, *SERVER), keyring(tmp_path)
    inside, outside = tmp_path / ANY_RUN / "views/shuffler", tmp_path / "views" / ANY_RUN
    given: tuple[tuple[Path, dict[str, Any]], ...] = ((inside, {}), (outside, {"nonce": run.nonce}))
    for place, more in given:
        recorder = RunRecorder(place, "shuffler", keys)
        assert recorder.head(RUN) is None
        recorder.record(RUN, 1, "a", {}, **more)
        reported = recorder.head(RUN)
        assert reported is not None
        assert json.loads(reported)["nonce"] == run.nonce
        assert run.pin([reported], (tmp_path / "pki/ca.pem").read_bytes()) == []


def test_a_recorder_starts_no_second_run_in_a_view(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "views" / ANY_RUN, "shuffler", keyring(tmp_path))
    recorder.record(RUN, 1, "a", {}, nonce="0" * 64)
    with pytest.raises(TranscriptError, match="is of an earlier run named run-1"):
        recorder.record(RUN, 1, "a", {}, nonce="1" * 64)


# Heads


def test_a_reported_head_pins_a_view_that_is_kept_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / RUN
    run = RunWriter(path, {"run": RUN, "observers": {"shuffler": "views/shuffler"}}, *SERVER)
    elsewhere = ViewWriter(tmp_path / "shuffler", "shuffler", RUN, *SHUFFLER, run.nonce)
    elsewhere.record(1, 1, {"x": matrix(1)})
    assert run.pin([elsewhere.signed_head], CA.pem) == []
    run.close("completed")
    assert "missing: deleted, or not copied in yet" in problems(path)
    shutil.copytree(tmp_path / "shuffler", path / "views/shuffler")
    assert problems(path) == ""
    truncate(path / "views/shuffler", 0, SHUFFLER)
    assert "cut off after entry 0; the manifest pins 1" in problems(path)


def reported(tmp_path: Path, who: Credentials, observer: str, run: str, nonce: str, records: int = 1) -> bytes:
    folder = tmp_path / f"{observer}-{len(list(tmp_path.iterdir()))}"
    view = ViewWriter(folder, observer, run, *who, nonce)
    for t in range(records):
        view.record(t, 1, {"x": np.random.default_rng().random(2)})
    return view.signed_head


REFUSED = {
    "another authority": (Authority().issue("shuffler", "shuffler"), "shuffler", RUN, "does not lead to the CA"),
    "another run": (SHUFFLER, "shuffler", "run-2", "is of run run-2"),
    "another party": (SHUFFLER, "server", RUN, "view of server, signed by shuffler"),
    "another federation": (CA.issue("site", "site-1", federation="x"), "site-1", RUN, "signed for federation x"),
    "a party without a view": (CA.issue("superlink", "superlink"), "superlink", RUN, "which records nothing"),
    "an unknown role": (CA.issue("oracle", "oracle"), "oracle", RUN, "which records nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_is_not_the_party_s_own_is_not_pinned(name: str, tmp_path: Path) -> None:
    run = RunWriter(tmp_path / RUN, {"run": RUN}, *SERVER)
    who, observer, named, message = REFUSED[name]
    good = reported(tmp_path, SITE, "site-0", RUN, run.nonce)
    (refused,) = run.pin([reported(tmp_path, who, observer, named, run.nonce), good], CA.pem)
    assert message in refused
    assert list(open_run(tmp_path / RUN).manifest["heads"]) == ["truth/site-0"]


@pytest.mark.parametrize("data", [b"", b"{}\n", b"[" * 10_000, b'{"format":2}\n', b"\xff" * 10, b" " * 70_000])
def test_a_malformed_head_is_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    (refused,) = RunWriter(tmp_path, {"run": RUN}, *SERVER).pin([data], CA.pem)
    assert "\n" not in refused


def test_a_head_of_another_run_of_the_same_name_is_not_pinned(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / RUN, {"run": RUN}, *SERVER)
    (refused,) = run.pin([reported(tmp_path, SHUFFLER, "shuffler", RUN, "1" * 64)], CA.pem)
    assert "is of another run with this name" in refused


def test_a_pin_only_moves_forward_and_two_histories_are_named(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / RUN, {"run": RUN}, *SERVER)
    one, two, other = (reported(tmp_path, SHUFFLER, "shuffler", RUN, run.nonce, n) for n in (1, 2, 2))
    assert run.pin([two, one, two], CA.pem) == []
    (refused,) = run.pin([other], CA.pem)
    assert "views/shuffler: signed two different records 2" in refused
    assert open_run(tmp_path / RUN).manifest["heads"]["views/shuffler"] == json.loads(two)


def test_late_pins_hold_from_then_on_and_keep_the_earlier_head(tmp_path: Path) -> None:
    path = copied_in_later(tmp_path)
    first = head_of(path)
    done = pin(path, *SERVER, CA.pem)
    assert (done.places, done.head) == (["views/shuffler"], head_of(path))
    assert problems(path) == ""
    assert "was signed again after the head given" in problems(path, head=first)
    assert pin(path, *SERVER, CA.pem) == ([], done.head)
    truncate(path / "views/shuffler", 1, SHUFFLER)
    assert "cut off after entry 1; the manifest pins 2" in problems(path)


def test_a_changed_view_is_not_pinned_and_only_the_server_pins(tmp_path: Path) -> None:
    path = copied_in_later(tmp_path)
    with pytest.raises(TranscriptError, match="signed by another key"):
        pin(path, *SHUFFLER, CA.pem)
    truncate(path / "views/shuffler", 1)
    assert pin(path, *SERVER, CA.pem).places == []
    with pytest.raises(TranscriptError, match="not a closed run of format 3"):
        pin(make_run(tmp_path / "b", close=None), *SERVER, CA.pem)


# The command line


def test_the_commands_verify_with_a_head_and_pin_views(tmp_path: Path) -> None:
    authority = Issuer.open(tmp_path / "pki")
    keys = authority.issue(Identity("demo", "server", "server"), tmp_path / "keys")
    pair = load_key(keys.key_file), keys.certificate_file.read_bytes()
    run = RunWriter(tmp_path / RUN, {"run": RUN}, *pair)
    run.close("completed")
    ViewWriter(tmp_path / RUN / "views/server", "server", RUN, *pair, run.nonce).record(1, 1, {})
    before = head_of(tmp_path / RUN)

    def transcript(word: str, *words: object) -> Result:
        return CliRunner().invoke(app, ["transcript", word, str(tmp_path / RUN), *map(str, words)])

    assert "not pinned" in transcript("verify").stdout
    found = json.loads(transcript("pin", "--keys", keys.folder, "--json").stdout)
    assert found == {"pinned": ["views/server"], "head": head_of(tmp_path / RUN)}
    assert transcript("verify", "--head", found["head"]).exit_code == 0
    done = transcript("verify", "--head", before)
    assert (done.exit_code, "after the head given" in done.stdout) == (1, True)


# Metrics


def test_a_resumed_run_has_one_line_for_each_round_and_none_of_a_round_made_again(tmp_path: Path) -> None:
    """The server was killed after it wrote a line for round 3 and before that round's checkpoint."""
    run = RunWriter(tmp_path, {"run": RUN, "rounds": 0}, *SERVER)
    for round in (0, 1, 2, 3):
        run.metric({"round": round, "loss": 9.0})
    resumed = RunWriter(tmp_path, {"run": RUN, "rounds": 2}, *SERVER)
    board = Scoreboard(resumed, Log("server"), open_run(tmp_path).metrics, Best(Stop()))
    for round in (2, 3, 3):
        board.score(round, Scores(loss=1.0))
    losses = {row["round"]: row["loss"] for row in open_run(tmp_path).metrics}
    assert len(open_run(tmp_path).metrics) == 4
    assert losses == {0: 9.0, 1: 9.0, 2: 9.0, 3: 1.0}


@pytest.mark.parametrize("step", range(1, 7))
def test_a_server_killed_while_it_resumes_leaves_a_run_that_verifies_and_resumes(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps: manifest and metrics, each fsync, replace and fsync of the folder."""
    path = make_run(tmp_path, close="failed")
    with monkeypatch.context() as patch:
        Saboteur(patch, step, Crash(), die=True)
        with pytest.raises(Crash):
            RunWriter(path, {"run": RUN, "rounds": 2}, *SERVER)
    assert problems(path) == ""
    resumed = RunWriter(path, {"run": RUN, "rounds": 2}, *SERVER)
    assert [row["round"] for row in open_run(path).metrics] == [1, 2]
    assert problems(path) == ""
    resumed.metric({"round": 3})
    resumed.close("completed")
    assert [row["round"] for row in open_run(path).metrics] == [1, 2, 3]
    assert problems(path) == ""


# Older formats


@pytest.mark.parametrize("format", [1, 2])
def test_an_older_run_is_read_verified_and_told_what_it_lacks(format: int, tmp_path: Path) -> None:
    path, ca, _ = old(tmp_path, format)
    assert problems(path, ca) == ""
    run = open_run(path)
    assert (run.manifest["format"], run.manifest["status"]) == (format, "completed")
    np.testing.assert_array_equal(run.view("shuffler").round(2).arrays["updates"], matrix(2))
    assert [row["round"] for row in run.metrics] == [1, 2, 3]
    assert any(f.message.startswith(f"format {format}: ") for f in verify(path, ca).findings)


def in_format(path: Path, format: int) -> None:
    """Turn a run's manifest into one of an older format, signed beside it."""
    newer = {"nonce", "serial", "closed", "late", *SIGNED_FIELDS}
    manifest = {name: value for name, value in open_run(path).manifest.items() if name not in newer}
    heads = {where: {"seq": head["seq"], "head": head["head"]} for where, head in manifest["heads"].items()}
    data = json.dumps({**manifest, "format": format, "heads": heads, "private": True}, indent=2).encode() + b"\n"
    (path / "manifest.json").write_bytes(data)
    fields = {"format": 1, "run": RUN, "sha256": sha256(data), "previous": ""}
    (path / DETACHED).write_bytes(canonical(Signer(*SERVER).sign(DETACHED_DOMAIN, fields)) + b"\n")


@pytest.mark.parametrize("format", [1, 2])
def test_an_older_run_is_resumed_in_the_newest_format(format: int, tmp_path: Path) -> None:
    path = make_run(tmp_path, nonces=False)
    in_format(path, format)
    assert problems(path) == ""
    RunWriter(path, {"run": RUN}, *SERVER).close("completed")
    manifest = open_run(path).manifest
    assert (manifest["format"], "private" in manifest, (path / DETACHED).exists()) == (3, False, False)
    assert manifest["closed"][0]["status"] == "completed"
    assert problems(path) == ""
