"""Command lines: what is for the command itself, and what are settings of the job."""

from __future__ import annotations

from collections.abc import Sequence

SEEDS = "seeds=3"
"""Of a comparison, by default: the fewest that give an interval worth printing."""


def own_arguments(arguments: Sequence[str], *names: str) -> tuple[dict[str, list[str]], list[str]]:
    """A command's own arguments, `name=value`, by name; and the others."""
    own: dict[str, list[str]] = {name: [] for name in names}
    others = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in own:
            own[name].append(value)
        else:
            others.append(argument)
    return own, others


def comparison_arguments(arguments: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Of a comparison: its own arguments, those of `names` and `dry`; and settings of its jobs, always with seeds."""
    given, settings = own_arguments(arguments, *names, "dry")
    own = {name: values[-1] for name, values in given.items() if values and values[-1]}
    chosen = [setting for setting in settings if setting.partition("=")[0] == "seeds"]
    return own, settings if chosen and chosen[-1] != "seeds=" else [SEEDS, *settings]
