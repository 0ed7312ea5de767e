"""An agent loop of your own: task.generate=my_lab.agents:two_tries (docs/plugins.md)."""

from harness.tasks import Conversation, Problem


async def two_tries(problem: Problem, sample: Conversation, *, second: float = 0.5) -> float:
    """Right at once is worth 1; after a hint, `second`."""
    if await sample.say() == problem.answer:
        return 1.0
    sample.hear("ab")
    return second if await sample.say() == problem.answer else 0.0
