"""The shape of the code: which way imports point, how much there is of it, and what other programs may rely on."""

from __future__ import annotations

import ast
import importlib
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.combine.rules import RULES
from fl_privacy.registry import Registry
from fl_privacy.roles import ROLES
from fl_privacy.routes import ROUTES
from fl_privacy.steps import STEPS

ROOT = Path(__file__).parent.parent
LIBRARY = "fl_privacy"
APPS = ("server_app", "client_app", "shuffler_app", "aggregator_app")
ATTACKS = "attacks"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(*packages: str) -> list[Path]:
    """Every file that somebody wrote; not those that protoc did."""
    found = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if not path.stem.endswith("_pb2")]


# Imports


def running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree but for what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).removeprefix("typing.") == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from running(other)
        else:
            yield child
            yield from running(child)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of all that a file imports, also inside functions."""
    package = path.relative_to(ROOT).parent.parts
    for node in running(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def package_imports() -> dict[str, dict[str, list[str]]]:
    """Which packages of the library import which, and where."""
    edges: dict[str, dict[str, list[str]]] = {}
    for path in sources(LIBRARY):
        where = path.relative_to(ROOT)
        mine = edges.setdefault(where.with_suffix("").parts[1], {})
        for line, name in imports(path):
            top, _, rest = name.partition(".")
            if top == LIBRARY and rest:
                mine.setdefault(rest.partition(".")[0], []).append(f"{where}:{line}")
    return edges


def reach(start: str, edges: dict[str, dict[str, list[str]]]) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = set(edges.get(ahead.pop(), ())) - seen
        seen |= new
        ahead += new
    return seen


def test_packages_of_the_library_import_each_other_in_one_direction_only() -> None:
    edges = package_imports()
    assert len(edges) > 15
    cycles = {
        f"{package} -> {other}": places
        for package, others in edges.items()
        for other, places in others.items()
        if other != package and package in reach(other, edges)
    }
    assert cycles == {}


def test_nothing_in_the_library_imports_an_app() -> None:
    """But for the command that replays attacks, which would be nothing without them."""
    found = {
        str(path.relative_to(ROOT))
        for path in sources(LIBRARY)
        for _, name in imports(path)
        if name.partition(".")[0] in (*APPS, ATTACKS)
    }
    assert found == {"fl_privacy/cli/attack.py"}


@pytest.mark.parametrize(
    "module",
    [
        "client_app.app",
        "fl_privacy.cli",
        "fl_privacy.config",
        "fl_privacy.vector",
        "fl_privacy.transcript",
        "fl_privacy.shuffle.parameter",
        "fl_privacy.dp.ledger",
        "fl_privacy.shard.masks",
    ],
)
def test_what_needs_no_torch_does_not_import_it(module: str) -> None:
    """It takes seconds, and Flower starts a ClientApp anew for every message."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# What other programs may rely on

PUBLIC = (
    "config.Federation",
    "dp.gaussian.sigma",
    "dp.ledger.Ledger",
    "shard.masks",
    "shuffle.buckets.form",
    "shuffle.layer",
    "shuffle.model",
    "shuffle.parameter",
    "transcript.open_run",
    "vector",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_promised_names_are_there(name: str) -> None:
    module, _, attribute = f"{LIBRARY}.{name}".rpartition(".")
    try:
        importlib.import_module(f"{module}.{attribute}")
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(module), attribute)


# How much there is

BASE = 12_215  # lines of code in library and apps before the doors for other systems were opened, commit 60490a5
GROWTH = 1.05
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str()) as text), *_]:
                    yield text


def code_lines(source: str) -> int:
    """Lines that hold code: not those of comments, docstrings or nothing."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for text in docstrings(ast.parse(source)):
        found.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(found)


SAMPLE = '''"""Of the module,

long."""

A = """x

y"""  # three lines


def f():
    """Says what."""
    # why
    return (
        1
    )
'''


def test_lines_of_code_are_counted_without_comments_docstrings_and_blanks() -> None:
    assert code_lines(SAMPLE) == 7


def test_the_code_has_grown_by_no_more_than_agreed() -> None:
    assert sum(code_lines(path.read_text()) for path in sources(LIBRARY, *APPS)) <= GROWTH * BASE


# Who tests what a choice is

ASKED = ("fl_privacy/config/", "fl_privacy/routes/", "fl_privacy/steps/", "fl_privacy/roles.py")
ALLOWED = {
    "attacks/audit/matrix.py": ("value.get('kind') in (None, old.get('kind'))", "merging YAML before it is a config"),
    "attacks/common/auxiliary.py": ("isinstance(self._privatise, Ldp)", "an attacker knows the published clip"),
    "attacks/common/truth.py": ("view.observer != 'server'", "the server's view is the only one that always exists"),
    "fl_privacy/deploy/kits/kit.py": ("role not in ROLES", "a kit's role is looked up in the table"),
    "fl_privacy/identity/keyring.py": ("identity.role not in roles", "who may call is named by the service called"),
    "fl_privacy/tasks/attacker.py": ("dealt.kind == 'dirichlet'", "an attacker draws its sites as the partition does"),
    "fl_privacy/transcript/verify.py": ("signer.role != 'server'", "a manifest is signed by the server"),
    "fl_privacy/transcript/verify.py ": ("signer.role == 'site'", "truth is signed by a site, a view by a party"),
}


def ends_in(node: ast.AST) -> str:
    """The last word of a name, an attribute or a `get`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        return str(getattr(node.args[0], "value", ""))
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def literals(node: ast.AST) -> set[object]:
    """A constant, or those in a tuple, list or set."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return set().union(*map(literals, node.elts))
    return {node.value} if isinstance(node, ast.Constant) else set()


def choice_tests(tree: ast.AST, names: set[str], classes: set[str]) -> Iterator[str]:
    """Comparisons, matches and isinstance on kinds, roles, and the classes of routes, steps and rules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(ends_in(side) in ("kind", "role") for side in sides) or any(literals(s) & names for s in sides):
                yield ast.unparse(node)
        elif isinstance(node, ast.Match) and ends_in(node.subject) in ("kind", "role"):
            yield ast.unparse(node.subject)
        elif (
            isinstance(node, ast.Call)
            and ends_in(node.func) == "isinstance"
            and any(ends_in(found) in classes for found in ast.walk(node.args[1]))
        ):
            yield ast.unparse(node)


def choices_of_ours() -> tuple[set[str], set[str]]:
    """The names and the classes of all routes, steps and rules, and the names of roles."""
    registries: tuple[Registry[Any], ...] = (ROUTES, STEPS, RULES)
    classes = {registry.get(name).__name__ for registry in registries for name in registry.ours()}
    names = {name.rpartition(".")[2] for registry in registries for name in registry.ours()}
    return names | set(ROLES), classes | {"Route", "Step", "Rule", "Privatise"}


def test_nobody_but_the_choices_themselves_tests_a_kind_or_a_role() -> None:
    found = {
        (str(path.relative_to(ROOT)), text)
        for path in sources(LIBRARY, *APPS, ATTACKS)
        if not str(path.relative_to(ROOT)).startswith(ASKED)
        for text in choice_tests(ast.parse(path.read_text()), *choices_of_ours())
    }
    assert found == {(path.strip(), text) for path, (text, _) in ALLOWED.items()}
    assert len(ALLOWED) <= 10


def test_a_test_of_a_kind_is_found() -> None:
    text = "a = f.route.kind == 'x'\nb = 'shards' in c\nmatch x.role:\n    case _: pass\nisinstance(r, ShufflerRoute)"
    assert len(list(choice_tests(ast.parse(text), *choices_of_ours()))) == 4
