"""Phrases that must not come back: the docs, comments, messages and help texts are in plain, idiomatic English."""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SKIPPED = {"build", "data", "dist", "runs", "wheelhouse"}
READ = {".env", ".md", ".proto", ".py", ".sh", ".svg", ".toml", ".yaml", ".yml", "Dockerfile", "Makefile"}

# What "one file a site" counts and what it divides by. "60 a minute" and "once a round" are idiomatic and stay allowed.
NUMBER = r"(?:\d|\d[\d.,]*\d|one|two|three|five|ten|twenty)"
NOT_A_UNIT = r"(?!(?:and|as|at|by|for|from|gives?|has|in|is|leaves?|makes?|of|on|to|with)\b)"
AMOUNT = rf"(?:seconds|minutes|hours|milliseconds|(?<!')m?s|bytes|[KMG]i?B|{NUMBER}(?: {NOT_A_UNIT}\w+)?)"
PER = (
    r"(?:aggregator|attempt|batch|benchmark|bucket|class|client|column|coordinate|data set|draw|epoch|file|layer|level"
    r"|line|message|owner|party|process|record|role|round|row|run|site|step|window)"
)
VERB = r"(?:asks?|can|gets?|has|holds?|is|may|might|must|needs?|sees?|sends?|should|takes?|was|will)"

# A pattern, and what to write instead. All are case-insensitive and match across line breaks.
PHRASES: tuple[tuple[str, str], ...] = (
    (r"\banew\b", "again"),
    (r"\bmend(?:s|ed|ing)?\b", "fix"),
    (r"\bto be had\b", "supported, available"),
    (r"\b(?:go|goes|going|gone|went) on with\b", "resume, continue"),
    (r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)", "reported, receives"),
    (r"\btells? of\b", "reveals, describes"),
    (r"\bno business\b", "not allowed"),
    (r"\bby another way\b|\bover a safe way\b", "over a separate channel"),
    (r"\bcan be anybody\b", "can impersonate any party"),
    (r"\bunsigns?\b", "revokes"),
    (r"\bfor the \d+\. time\b", "attempt 2 of 3"),
    (r"(?<!encrypted )(?<!encryption )(?<!data )\bat rest\b", "idle"),
    (
        r"(?<!not )\bprov(?:e|es|ing) (?:it|privacy)\b|\bproof that it is private\b",
        "attacks measure, they do not prove",
    ),
    (rf"\b{AMOUNT} an? {PER}\b(?! {VERB}\b)", "per round, per site, ..."),
)


def paths() -> Iterator[Path]:
    """Every text file of the project except this one."""
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(n for n in names if not n.startswith((".", "__")) and n not in SKIPPED)
        for path in sorted(Path(folder) / file for file in files):
            if path != Path(__file__) and {path.suffix, path.name} & READ:
                yield path


def python_texts(source: str) -> Iterator[str]:
    """Comments, strings and names of tests. Neighbouring comments or strings are joined: a phrase can span lines."""
    joined: list[str] = []
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("NL", "FSTRING_START", "FSTRING_END"):
            continue
        kind = kind.replace("FSTRING_MIDDLE", "STRING")  # what Python 3.12 and newer make of an f-string
        if joined and kind != before:
            yield " ".join(joined)
            joined = []
        if kind in ("COMMENT", "STRING"):
            joined.append(re.sub(r"""^#|^\w{0,2}(\"{3}|"|')|(\"{3}|"|')$""", "", token.string))
        elif token.string.startswith("test_"):
            yield token.string.replace("_", " ")
        before = kind


def texts(path: Path) -> Iterator[str]:
    """What people read in a file, paragraph by paragraph, each on one line."""
    content = path.read_text(encoding="utf-8")
    paragraphs = (
        python_texts(content)
        if path.suffix == ".py"
        else re.split(r"\n\s*\n", re.sub(r"^\s*#", "", content, flags=re.MULTILINE))
    )
    yield from (" ".join(paragraph.split()) for paragraph in paragraphs)


def findings(text: str) -> list[str]:
    return [
        f"...{text[max(0, hit.start() - 30) : hit.end() + 30]}...: write {instead!r}"
        for pattern, instead in PHRASES
        for hit in re.finditer(pattern, text, re.IGNORECASE)
    ]


def test_the_texts_are_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {finding}" for path in paths() for text in texts(path) for finding in findings(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "The order is drawn anew.",
        "2 something to mend",
        "is not to be had with shards",
        "An interrupted run is gone on with.",
        "It goes on with the next round.",
        "The server is told metrics alone.",
        "a line would tell of the future",
        "it has no business here",
        "Send the key by another way.",
        "who has it can be anybody",
        "the round is tried for the 2. time",
        "sites that are at rest",
        "and prove it",
        "0.3 seconds a round",
        "{mean:.2f} s a round",
        "one file a site",
        "200 sites, 20 a round",
        "20 rounds a message",
        "One row a client",
    ],
)
def test_a_phrase_is_found(text: str) -> None:
    assert findings(text)


@pytest.mark.parametrize(
    "text",
    [
        "The server opens a round.",
        "rows can be told apart",
        "at most 60 a minute",
        "once a round",
        "the rounds a site is invited to",
        "seconds a round may take",
        "one in a process of its own",
        "it's a round trip",
        "updates are encrypted at rest",
        "An attack does not prove privacy.",
        "recommended: amend the commit",
        "renewal; a new key",
    ],
)
def test_idiomatic_english_is_not(text: str) -> None:
    assert not findings(text)


def test_phrases_are_found_in_names_of_tests_and_across_lines_of_comments_and_strings() -> None:
    source = '# This is\n# told.\nx = (\n    "one file "\n    f"a site"\n)\ndef test_it_is_told(): pass\n'
    assert sum(len(findings(" ".join(text.split()))) for text in python_texts(source)) == 3
