"""Audits: a matrix of federations, each run, attacked and scored; one JSON, one report, figures."""
