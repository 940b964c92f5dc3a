"""Numbers for people: intervals, Markdown tables, figures, and the machine they were measured on."""
