"""The threat model names a test for every claim; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGES = ("threat-model.md",)
NAMED = re.compile(r"`(test_\w+\.py)::([\w:]+)`")


def names_in(file: Path) -> set[str]:
    """Test functions of a file, those in classes as CLASS::NAME."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_the_page_names_exists(page: str) -> None:
    named = NAMED.findall((TESTS.parent / "docs" / page).read_text())
    assert named
    assert not [f"{file}::{name}" for file, name in named if name not in names_in(TESTS / file)]
