"""A reward of your own: task.reward=my_lab.rewards:brief (docs/plugins.md)."""

from harness.tasks import Sample


def brief(sample: Sample, *, price: float = 0.01) -> float:
    """1 for the right answer, less a price for each token."""
    return float(sample.stopped and sample.response == sample.answer) - price * sample.tokens
