"""The event log: no event is lost, whoever writes, rotates, crashes or fills the disk."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fl_privacy.errors import LaunchError
from fl_privacy.ops import log as logs
from fl_privacy.ops.log import EventFile, Log
from observed import kept

WRITER = """
import sys
from pathlib import Path
from threading import Thread
from fl_privacy.ops.log import EventFile, Log
log = Log(sys.argv[2])
log._file = EventFile(Path(sys.argv[1]), 4096, 200)
def write(thread):
    for n in range(150):
        log.own("tick", name=f"{sys.argv[2]}/{thread}/{n}", pad="x" * (n % 40))
threads = [Thread(target=write, args=(t,)) for t in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
"""


def test_no_event_is_lost_while_many_threads_and_processes_rotate(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), f"p{n}"]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = [event["name"] for event in kept(path)]
    assert sorted(found) == sorted(f"p{p}/{t}/{n}" for p in range(3) for t in range(4) for n in range(150))
    files = list(tmp_path.glob("events.jsonl*"))
    assert len(files) > 10
    assert max(file.stat().st_size for file in files) <= 4096
    written = [file for file in files if file.suffix != ".lock"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in written} == {0o640}


def test_each_writer_s_events_stay_in_order_and_only_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    events = EventFile(tmp_path / "e", size=100, files=3)
    for n in range(100):
        events.append(b'{"n":%2d}\n' % n)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e", "e.1", "e.2", "e.lock"]
    numbers = [event["n"] for event in kept(tmp_path / "e")]
    assert numbers == list(range(numbers[0], 100))
    assert len(numbers) > 20


def test_a_line_truncated_by_a_crash_damages_no_other(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_text('{"event":"cut o')
    Log("site-0", events=path).own("whole")
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "whole"


def test_a_kept_event_starts_with_time_role_event_run_and_round_and_has_bounded_length(tmp_path: Path) -> None:
    path = tmp_path / "e"
    Log("site-0", events=path)("failed", round=3, reason="\n" + "x" * 9999, loss=float("nan"), own={"peer": "a"})
    (line,) = path.read_text().splitlines()
    event = json.loads(line)
    assert list(event)[:5] == ["time", "role", "event", "run", "round"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"])
    assert (event["run"], event["round"], event["loss"], event["peer"]) == (None, 3, None, "a")
    assert len(event["reason"]) == logs.LONGEST_TEXT


def test_a_full_disk_stops_nobody_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "e"
    log, write, full = Log("shuffler", events=path), os.write, True

    def short(handle: int, line: bytes) -> int:
        return write(handle, line[:7]) if full else write(handle, line)

    monkeypatch.setattr(logs.os, "write", short)
    for n in range(5):
        log("accepted", count=n)
    full = False
    log("released", count=5)
    told = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert told == ["accepted", "events-failing", *["accepted"] * 4, "released"]
    assert [(e["event"], e["count"]) for e in kept(path)] == [("events-lost", 5), ("released", 5)]


def test_a_full_file_system_stops_nobody_and_lost_events_are_counted(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small]).returncode:
        pytest.skip("needs root and permission to mount a small file system")
    try:
        log = Log("shuffler", events=small / "e")
        for n in range(500):
            log.own("tick", n=n)
        found = kept(small / "e")
        (small / "e").unlink()
        log.own("after")
        after = kept(small / "e")
    finally:
        subprocess.run(["umount", small], check=True)
    assert [event["n"] for event in found] == list(range(len(found)))
    assert [event["event"] for event in after] == ["events-lost", "after"]
    assert len(found) + after[0]["count"] == 500


def test_an_unusable_event_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "link", Path("/proc/events")):
        with pytest.raises(LaunchError, match=f"events {path}: .*--events"):
            Log("site-0", events=path)


def test_events_that_a_peer_can_cause_at_will_are_rate_limited_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, now = Log("shuffler", events=tmp_path / "e"), itertools.chain([1000.0] * 500, itertools.repeat(1061.0))
    monkeypatch.setattr(logs.time, "monotonic", lambda: next(now))
    for _ in range(501):
        log.rate_limited("refused", reason="again")
    found = kept(tmp_path / "e")
    assert len(found) == logs.PER_MINUTE + 1
    assert found[-1]["left_out"] == 500 - logs.PER_MINUTE
