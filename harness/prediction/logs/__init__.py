"""Logs of others, read as they are: which software wrote them, what a step took, and what was run."""
