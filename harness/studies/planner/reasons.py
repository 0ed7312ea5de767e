"""Why one plan is slower than another, in a sentence."""

from __future__ import annotations

from collections.abc import Callable

from harness.studies.planner.plan import WORTH, Choice

_WORTH_TELLING = 0.01  # of an iteration
_TAIL = 0.4  # of an iteration: a response that takes longer is what pools wait for


def why_slower(slower: Choice, best: Choice) -> str:
    """What costs `slower` more of its time than `best` of its own."""
    lost = 1 - best.outcome.seconds / slower.outcome.seconds
    head = f"{slower.name} needs {slower.outcome.seconds:.3g} s an iteration, {best.name} {best.outcome.seconds:.3g} s"
    if lost < WORTH:
        return (
            f"{head}: no difference worth its lag of {slower.outcome.lag_mean:.2f} against {best.outcome.lag_mean:.2f}."
        )
    seconds, cause = max(((_more(slower, best, of), told) for of, told in _CAUSES), key=lambda pair: pair[0])
    if seconds < _WORTH_TELLING * slower.outcome.seconds:
        return (
            f"{head}: its pools are no less busy, but the busiest has more to do: at least "
            f"{slower.outcome.bound:.3g} s, against {best.outcome.bound:.3g} s."
        )
    return f"{head}: {cause(slower, best)}."


def _more(slower: Choice, best: Choice, seconds: Callable[[Choice], float]) -> float:
    return seconds(slower) - seconds(best)


def _rollout_idle_s(its: Choice) -> float:
    return its.outcome.rollout_idle * its.outcome.seconds


def _training_idle_s(its: Choice) -> float:
    return its.outcome.training_idle * its.outcome.seconds


def _exposed_s(its: Choice) -> float:
    return its.outcome.exposed_s


def _rollout_idles(slower: Choice, best: Choice) -> str:
    return (
        f"its rollout devices do nothing for {abs(slower.outcome.rollout_idle):.0%} of the time "
        f"(against {abs(best.outcome.rollout_idle):.0%}), {_waiting(slower, 'for training and weights')}"
    )


def _training_idles(slower: Choice, best: Choice) -> str:
    return (
        f"its training devices do nothing for {abs(slower.outcome.training_idle):.0%} of the time "
        f"(against {abs(best.outcome.training_idle):.0%}), {_waiting(slower, 'for samples')}"
    )


def _waiting(its: Choice, otherwise: str) -> str:
    outcome = its.outcome
    if outcome.longest_s < _TAIL * outcome.seconds:
        return f"waiting {otherwise}"
    return f"waiting for the tail: the longest response alone takes {outcome.longest_s:.3g} s"


def _transfer_shows(slower: Choice, best: Choice) -> str:
    return (
        f"its devices stand still for weights for {slower.outcome.exposed_s:.2g} s of an iteration "
        f"(against {best.outcome.exposed_s:.2g} s)"
    )


_CAUSES: tuple[tuple[Callable[[Choice], float], Callable[[Choice, Choice], str]], ...] = (
    (_rollout_idle_s, _rollout_idles),
    (_training_idle_s, _training_idles),
    (_exposed_s, _transfer_shows),
)
