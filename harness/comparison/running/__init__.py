"""Comparisons carried out: cells from settings, runs in processes of their own, the equivalence gate, the verbs."""
