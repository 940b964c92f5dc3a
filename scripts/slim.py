"""Make an environment smaller without changing what runs in it: `slim.py SITE-PACKAGES`, with its own Python.

Tests, headers and sources of packages go, as do libraries for remote services that the project has no use for and the
symbol tables that only debuggers read. Byte code is made for all of the small packages, and of the large ones for
what training and reporting import: the image's file system is read-only, so nothing can be compiled later.
"""

from __future__ import annotations

import compileall
import importlib
import re
import shutil
import struct
import sys
from pathlib import Path

FOLDERS = ("torch/test", "torch/include", "torch/share", "pyarrow/include", "pyarrow/src", "onnx/backend/test")
FILES = ("pyarrow/*flight*", "pyarrow/*s3*.so*", "torch/lib/*test*.so")
SOURCES = (".a", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pxd", ".pyx", ".pxi")
KEPT_PROGRAM = "torch_shm_manager"
LARGE = "fontTools functorch matplotlib networkx numba numpy pyarrow pygments scipy setuptools sklearn sympy torch"
IMPORTS = """
dp_accounting.pld dp_accounting.rdp lightgbm matplotlib.backends.backend_agg matplotlib.figure networkx numba
opacus.validators PIL.Image pyarrow.parquet rich.progress scipy.optimize scipy.special scipy.stats sklearn.cluster
sklearn.datasets sklearn.linear_model sklearn.metrics sklearn.model_selection sklearn.pipeline sklearn.preprocessing
torch.func
"""


def remove(packages: Path) -> None:
    found = [packages / name for name in FOLDERS]
    found += [path for pattern in FILES for path in packages.glob(pattern)]
    found += [path for path in packages.glob("*/**/tests") if path.is_dir()]
    found += [path for path in packages.rglob("*") if path.suffix in SOURCES and path.is_file()]
    found += [path for path in packages.glob("torch/bin/*") if path.name != KEPT_PROGRAM]
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def strip(path: Path) -> int:
    """Cut off what follows the last loaded byte of a 64-bit ELF file: symbol and debug tables. Returns the bytes saved.

    The loader reads program headers only, so section headers can go. A file with nothing behind is left alone.
    """
    with path.open("r+b") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
            return 0
        (start,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(start)
        table = file.read(size * count)
        end = start + size * count
        for index in range(count):
            offset, _, _, length = struct.unpack_from("<QQQQ", table, index * size + 8)
            end = max(end, offset + length)
        saved = file.seek(0, 2) - end
        if saved > 0:
            file.seek(40)
            file.write(bytes(8))  # where the section headers are
            file.seek(60)
            file.write(bytes(4))  # how many, and which has their names
            file.truncate(end)
        return max(saved, 0)


def libraries(packages: Path) -> list[Path]:
    files = (path for path in packages.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if re.search(r"\.so(\.\d+)*$", path.name) or path.stat().st_mode & 0o100]


def warm() -> None:
    """Import what the project does, and do a little of it, for what is imported at first use."""
    for name in IMPORTS.split():
        importlib.import_module(name)
    import numba
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(torch.ones(2, 2))
    numba.njit(lambda value: value + 1)(1)


def main(packages: Path) -> None:
    remove(packages)
    saved = sum(strip(path) for path in libraries(packages))
    print(f"slim: {saved / 1e6:.0f} MB of symbol tables", flush=True)
    warm()
    large = re.compile(f"/({LARGE.replace(' ', '|')})/")
    compileall.compile_dir(packages, quiet=2, rx=large, workers=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
