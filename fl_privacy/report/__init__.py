"""Readable results: confidence intervals, Markdown tables, figures and machine facts."""
