"""Command lines: what is for the command itself, and what are settings of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.config import ConfigError

SEEDS = "seeds=3"
"""Seeds of a comparison, by default: the fewest that give an interval worth printing."""


def own_arguments(arguments: Sequence[str], *names: str) -> tuple[dict[str, list[str]], list[str]]:
    """A command's own arguments, `name=value`, by name; and the others."""
    own: dict[str, list[str]] = {name: [] for name in names}
    others = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in own:
            own[name].append(value)
        else:
            others.append(argument)
    return own, others


def last_values(own: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The last value of each argument that was given, and not as nothing."""
    return {name: values[-1] for name, values in own.items() if values and values[-1]}


def is_asked_for(name: str, given: Mapping[str, str]) -> bool:
    """Whether `name=true` was given. Raises ConfigError for what is neither true nor false."""
    value = given.get(name, "false").lower()
    if value not in ("true", "false"):
        raise ConfigError(f"{name}={given[name]} is neither true nor false")
    return value == "true"


def share_of(name: str, given: Mapping[str, str]) -> float | None:
    """The share that was given as `name=0.05`, if any. Raises ConfigError for what is none above 0 and below 1."""
    if name not in given:
        return None
    try:
        share = float(given[name])
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigError(f"{name}={given[name]} is no share above 0 and below 1, such as 0.02")
    return share


def comparison_arguments(arguments: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Arguments of a comparison: its own, those of `names`, `dry`, `margin` and `fail_if`, of which all that were given
    count; and settings of its jobs, always with seeds."""
    given, settings = own_arguments(arguments, *names, "dry", "margin", "fail_if")
    given["fail_if"] = [",".join(given["fail_if"])]
    if any(setting.startswith("config=") for setting in settings):
        raise ConfigError("config= is one job, for bench; a comparison takes its settings, each by itself")
    chosen = [setting for setting in settings if setting.partition("=")[0] == "seeds"]
    return last_values(given), settings if chosen and chosen[-1] != "seeds=" else [SEEDS, *settings]
