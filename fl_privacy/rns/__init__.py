"""Residue numbers: updates as integers, and integers as residues that can be added up one by one."""
