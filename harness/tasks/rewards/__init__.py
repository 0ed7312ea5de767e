"""Rewards that have names, `task.reward=<name>`: functions of a sample, whose keyword-only parameters are options."""
