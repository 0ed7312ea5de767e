"""An environment of your own, for a task of several turns: its attribute `environment` (docs/plugins.md)."""

from dataclasses import dataclass

from harness.tasks import Problem, Step


@dataclass
class Game:
    number: str
    guesses: int = 0


@dataclass(frozen=True)
class Guessing:
    max_turns: int = 8
    step_timeout_s: float = 30.0

    async def reset(self, problem: Problem, seed: int) -> Game:
        return Game(problem.answer)

    async def step(self, state: Game, action: str) -> Step:
        state.guesses += 1
        if action == state.number:
            return Step("", done=True, reward=1.0 / state.guesses)
        return Step("more" if int(action) < int(state.number) else "less", done=False)

    async def close(self, state: Game) -> None:
        """Nothing to give back."""
