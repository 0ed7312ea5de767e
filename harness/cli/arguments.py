"""Command lines: what is for the command itself, and what are settings of the job."""

from __future__ import annotations

from collections.abc import Sequence


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
