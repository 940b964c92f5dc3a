"""Attacks on recorded runs: `run(view, knowledge)` sees one party's view, `score(findings, truth)` what it is worth."""
