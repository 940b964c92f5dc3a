"""The version of the attack suite: raise it when a change gives an attack other numbers, and audits measure again."""

SUITE = 4
