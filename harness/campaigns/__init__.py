"""Comparisons carried out: cells from settings, runs in processes of their own, and the equivalence gate."""
