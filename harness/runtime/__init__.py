"""Runtimes, in which roles run."""
