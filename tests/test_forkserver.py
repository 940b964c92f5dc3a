"""Forks behave like the commands they were asked for, inherit nothing, and end with their fork server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fl_privacy.deploy.forkserver import Forked, ForkServer, shared
from helpers import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local engine forks on Linux only")

PROGRAM = '''
import atexit, json, os, sys, threading, time
import library

def search(backwards):
    """Where in our memory the word is that this one is backwards: the needle itself does not count."""
    found = []
    with open("/proc/self/mem", "rb", 0) as memory, open("/proc/self/maps") as maps:
        for place, rights, *_ in map(str.split, maps.readlines()):
            start, end = (int(one, 16) for one in place.split("-"))
            if rights.startswith("rw"):
                memory.seek(start)
                found += [place] if backwards in (memory.read(end - start) or b"")[::-1] else []
    return found

def main():
    match sys.argv[1:]:
        case ["sleep"]:
            print("asleep", flush=True)
            time.sleep(600)
        case ["fail"]:
            sys.exit("as asked")
        case ["code", code]:
            sys.exit(int(code))
        case ["late"]:
            atexit.register(print, "at exit")
            threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
            sys.exit(3)
        case ["search", backwards]:
            print("found", search(backwards.encode()))
            return
    print(json.dumps({
        "argv": sys.argv[1:], "main": __name__, "loaded_by": library.LOADED_BY, "pid": os.getpid(),
        "environ": dict(os.environ), "first": open("/proc/self/environ").read(), "session": os.getsid(0),
        "files": sorted(os.listdir("/proc/self/fd")), "line": open("/proc/self/cmdline").read(),
    }))

if __name__ == "__main__":
    main()
'''


def ended(process: psutil.Process) -> bool:
    """Also if nobody has collected its exit code yet: an orphan's new parent may be slow."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Bench:
    """A fork server that has loaded PROGRAM, and a log for its forks."""

    def __init__(self, folder: Path) -> None:
        (folder / "program.py").write_text(PROGRAM)
        (folder / "library.py").write_text("import os\nLOADED_BY = os.getpid()\n")
        self.log = folder / "log"
        path = os.pathsep.join((str(folder), str(Path(__file__).parents[1])))
        self.server = ForkServer(["program"], {"PYTHONPATH": path})

    def start(self, *words: str, **env: str) -> Forked:
        with self.log.open("wb") as output:
            return self.server.start([sys.executable, "-m", "program", *words], {"SAID": "yes", **env}, output)

    @property
    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.server.stop()


def test_a_fork_is_a_process_of_its_own_with_what_was_loaded(bench: Bench) -> None:
    fork = bench.start("a", "b")
    assert fork.wait(30) == 0, bench.said
    told = json.loads(bench.said)
    assert (told["argv"], told["main"], told["pid"], told["session"]) == (["a", "b"], "__main__", fork.pid, fork.pid)
    assert told["loaded_by"] not in (fork.pid, os.getpid())
    assert told["line"].rstrip("\0") == f"{sys.executable} -m program a b"


def test_a_fork_inherits_no_environment_and_no_files(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SECRET", "hidden")
    assert bench.start().wait(30) == 0, bench.said
    told = json.loads(bench.said)
    assert told["environ"] == {"SAID": "yes"}
    assert "OUR_SECRET" not in told["first"]
    assert len(told["files"]) == 4  # input, output, errors, and the folder that is being listed


@pytest.mark.parametrize(("words", "code"), [(["code", "0"], 0), (["code", "3"], 3), (["fail"], 1)])
def test_exit_codes_are_those_of_the_command(bench: Bench, words: list[str], code: int) -> None:
    fork = bench.start(*words)
    assert fork.wait(30) == code
    assert fork.poll() == code
    assert ("as asked" in bench.said) is (words == ["fail"])


def test_a_fork_waits_for_its_threads_and_runs_what_was_registered(bench: Bench) -> None:
    fork = bench.start("late")
    assert fork.wait(20) == 3
    assert bench.log.read_text().splitlines() == ["thread ended", "at exit"]


def test_a_signal_shows_in_the_exit_code(bench: Bench) -> None:
    fork = bench.start("sleep")
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.1)
    os.killpg(fork.pid, signal.SIGKILL)
    assert fork.wait(30) == -signal.SIGKILL


def test_forks_run_side_by_side(bench: Bench) -> None:
    first, second = bench.start("sleep"), bench.start("code", "7")
    assert second.wait(30) == 7
    assert first.poll() is None
    first.terminate()
    assert first.wait(30) == -signal.SIGTERM


def test_forks_end_with_their_server_and_the_next_one_starts_another(bench: Bench) -> None:
    fork = bench.start("sleep")
    process = psutil.Process(fork.pid)
    eventually(lambda: "asleep" in bench.said)
    process.parent().kill()
    assert fork.wait(30) < 0
    eventually(lambda: ended(process))
    assert bench.start("code", "5").wait(30) == 5


def test_a_server_ends_with_its_owner(tmp_path: Path) -> None:
    here = Path(__file__).parent
    owner = f"""
import sys, time
sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]
from pathlib import Path
from test_forkserver import Bench
bench = Bench(Path({str(tmp_path)!r}))  # its server ends with the last reference to it
print(bench.start("sleep").pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fork = psutil.Process(int(process.stdout.readline()))
        server = fork.parent()
        assert server is not None
        process.kill()
    eventually(lambda: ended(fork) and ended(server))


def test_runs_of_one_process_share_a_server_and_another_environment_has_its_own() -> None:
    first = shared(["program", "library"], {"A": "1"})
    assert shared(["library", "program"], {"A": "1"}) is first
    assert shared(["library", "program"], {"A": "2"}) is not first


def test_a_server_outlives_the_thread_that_started_it(bench: Bench) -> None:
    with ThreadPoolExecutor(1) as pool:
        fork = pool.submit(bench.start, "sleep").result()
    time.sleep(0.2)
    assert fork.poll() is None
    fork.terminate()
    assert fork.wait(30) == -signal.SIGTERM


def test_a_server_without_forks_ends_after_a_while_and_the_next_request_starts_another(
    bench: Bench, tmp_path: Path
) -> None:
    quickly = "from fl_privacy.deploy import forkserver\nforkserver.IDLE = 0.3\n"
    (tmp_path / "library.py").write_text(f"import os\n{quickly}LOADED_BY = os.getpid()\n")
    first = bench.start("sleep")
    server = psutil.Process(first.pid).parent()
    assert server is not None
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(30) == -signal.SIGTERM
    eventually(lambda: ended(server))
    assert bench.start("code", "4").wait(30) == 4


def test_a_fork_finds_nothing_of_other_forks_in_its_memory(bench: Bench) -> None:
    for length in (1, 50, 2000):
        assert bench.start("code", "0", ENVIRONMENT="word-of-another-fork" * length).wait(30) == 0
    assert bench.start("search", "word-of-another-fork"[::-1]).wait(30) == 0, bench.said
    assert bench.said == "found []\n"


def test_what_cannot_be_loaded_is_an_error_at_once(tmp_path: Path) -> None:
    server = ForkServer(["no_such_module"], {"PYTHONPATH": str(Path(__file__).parents[1])})
    before = time.monotonic()
    with pytest.raises(OSError, match=r"exited|Broken pipe|reset"), (tmp_path / "log").open("wb") as output:
        server.start([sys.executable, "-m", "program"], {}, output)
    assert time.monotonic() - before < 60
    with pytest.raises(OSError, match="cannot load"), (tmp_path / "log").open("wb") as output:
        server.start([sys.executable, "-m", "program"], {}, output)
    server.stop()
