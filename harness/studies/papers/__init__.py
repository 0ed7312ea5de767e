"""Experiments of published papers: what they report, simulated by the schedule files, and in miniature measured."""
