"""Rewards that have names, `task.reward=<name>`: functions of a sample, whose keyword-only parameters are options."""

REWARDS = {
    "exact": "harness.tasks.rewards.text:exact",
    "numeric": "harness.tasks.rewards.text:numeric",
    "math": "harness.tasks.rewards.mathematics:math",
    "regex": "harness.tasks.rewards.text:regex",
    "format": "harness.tasks.rewards.text:form",
    "length": "harness.tasks.rewards.text:length",
    "code": "harness.tasks.rewards.code:code",
}
"""Import path of each reward: none is imported before it is used."""

QUICK = ("exact", "numeric", "length")
"""Rewards that take microseconds whatever the response: they need no process of their own."""
