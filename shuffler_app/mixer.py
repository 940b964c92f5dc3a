"""`python -m shuffler_app.mixer FD DTYPE`: mix the rows of one round in place and exit.

The compiled kernels load a compiler of 130 MB. In a separate process, that memory is free again before the next round's
updates arrive. The job, including its keys, is read from standard input.
"""

from __future__ import annotations

import subprocess
import sys

from fl_privacy import kernels
from fl_privacy.coding import Payload
from fl_privacy.errors import ProtocolError
from fl_privacy.round.rows import Rows, mapped
from fl_privacy.shuffle.job import Job, mix

LARGE = 2**26  # entries: below, the numpy kernels finish before a process with the compiled ones has started


def mix_apart(matrix: Payload, rows: Rows, job: Job) -> None:
    """Run the job on the matrix stored in `rows`, in a separate process with compiled kernels if that is faster."""
    if matrix.size < LARGE or kernels.choose(matrix.size) == "numpy":
        mix(matrix, job, "numpy")
        return
    command = [sys.executable, "-m", "shuffler_app.mixer", str(rows.file), matrix.dtype.str]
    done = subprocess.run(command, input=job.to_json().encode(), pass_fds=(rows.file,), stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ProtocolError("UNAVAILABLE", f"mixing failed with exit code {done.returncode}; see the shuffler's log")


def main() -> int:
    job = Job.from_json(sys.stdin.read())
    mix(mapped(int(sys.argv[1]), job.rows, job.length, sys.argv[2]), job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
