"""Puts a job together from its configuration, runs its schedule, and writes down what happened."""
