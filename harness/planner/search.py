"""Branch and bound over candidates, the best of all without running all; and what nothing beats in two respects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Outcome(Protocol):
    """The result of running a candidate."""

    @property
    def seconds(self) -> float:
        """Seconds of an iteration; never below the candidate's bound."""


C = TypeVar("C")
E = TypeVar("E", bound=Outcome)


@dataclass(frozen=True)
class Prospect(Generic[C]):
    """A candidate that was not run yet. bound: seconds of an iteration that it will not fall below; likely: that it
    will probably take; first: it is run before all others, if its bound allows."""

    candidate: C
    bound: float
    likely: float
    first: bool = False


@dataclass(frozen=True)
class SearchResult(Generic[C, E]):
    """The result of a search. tried: what was run, fastest first. pruned: how many were left out as their bound is no
    better than the best. left: the smallest bound of what could still have been better when the budget was spent; None
    if nothing could."""

    tried: list[tuple[C, E]]
    pruned: int
    left: float | None

    @property
    def gap(self) -> float:
        """The share of its time by which the best could at most be beaten by what was not run; 0: it is the best."""
        return 0.0 if self.left is None else max(0.0, 1.0 - self.left / self.tried[0][1].seconds)


def search(
    prospects: Sequence[Prospect[C]], run: Callable[[C], E], budget: int, opens: Callable[[C], bool] = lambda one: True
) -> SearchResult[C, E]:
    """Run the likeliest first, and none whose bound is no better than the best so far; at most `budget` of them. A
    bound that is equal to the best cannot beat it: so with budget to spare the first of `tried` takes no longer than
    any candidate would. opens: whether a candidate may be run, asked only where it matters; where none may, `tried` is
    empty. Raises ValueError without prospects."""
    if not prospects or budget < 1:
        raise ValueError(f"{len(prospects)} candidates and a budget of {budget} runs: nothing to search")
    tried: list[tuple[C, E]] = []
    best, skipped = float("inf"), []
    for prospect in sorted(prospects, key=lambda p: (not p.first, p.likely, p.bound)):
        if len(tried) == budget or prospect.bound >= best:
            skipped.append(prospect)
        elif opens(prospect.candidate):
            tried.append((prospect.candidate, run(prospect.candidate)))
            best = min(best, tried[-1][1].seconds)
    left = sorted((prospect for prospect in skipped if prospect.bound < best), key=lambda prospect: prospect.bound)
    tried.sort(key=lambda pair: pair[1].seconds)
    smallest = next((prospect.bound for prospect in left if opens(prospect.candidate)), None)
    return SearchResult(tried, pruned=len(skipped) - len(left), left=smallest)


T = TypeVar("T")


def front(items: Sequence[T], gain: Callable[[T], float], price: Callable[[T], float]) -> list[T]:
    """Items than which none gains as much for no higher a price, one strictly; cheapest first, of equals the first."""
    kept: list[T] = []
    for item in sorted(items, key=lambda item: (price(item), -gain(item))):
        if not kept or gain(item) > gain(kept[-1]):
            kept.append(item)
    return kept
