"""`python -m benchmarks`: every measure with its limit; 1 if one is missed."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import kernels, machine, memory, noise, result, rounds, upload
from benchmarks.result import Better, Result


def _kernels(quick: bool) -> list[Result]:
    return [_kernel(row) for row in kernels.run(quick)]


def _kernel(row: dict[str, Any]) -> Result:
    better: Better = "higher" if row["least"] else "lower"
    return Result(row["name"], row["value"], row["limit"], row["unit"], better)


BENCHMARKS: dict[str, Callable[[bool], list[Result]]] = {
    "kernels": _kernels,
    "noise": noise.run,
    "upload": upload.run,
    "memory": memory.run,
    "rounds": rounds.small,
    "rounds-large": rounds.large,
}


def main() -> int:
    options = _arguments().parse_args()
    # Terminated is like interrupted: the processes of a benchmark end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts, found = machine.facts(), []
    for name in options.only or BENCHMARKS:
        began = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        results = BENCHMARKS[name](options.quick)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        found += results
        if not options.quick:
            result.save(name, results, facts)
            result.write_readme(list(BENCHMARKS))
    print(*map(result.line, found), sep="\n")
    return 0 if all(each.ok for each in found) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, and compare with the limits")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, for a look; limits hold for the full ones only"
    )
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
