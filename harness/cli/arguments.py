"""Command lines: what is for the command itself, and what are settings of the job."""

from collections.abc import Mapping, Sequence

from harness.config import ConfigError

SEEDS = "seeds=3"  # seeds of a comparison, by default: the fewest that give an interval worth printing


def own_arguments(arguments: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """A command's own arguments, `name=value`, by name, as given last, and not as nothing; and the others."""
    own: dict[str, str] = {}
    others = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in names:
            own[name] = value
        else:
            others.append(argument)
    return {name: value for name, value in own.items() if value}, others


def every_value(name: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """All values of an argument that may be given several times; and the other arguments."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{name}=")]
    return values, [argument for argument in arguments if not argument.startswith(f"{name}=")]


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
    tests, rest = every_value("fail_if", arguments)
    given, settings = own_arguments(rest, *names, "dry", "margin")
    if any(setting.startswith("config=") for setting in settings):
        raise ConfigError("config= is one job, for bench; a comparison takes its settings, each by itself")
    chosen = [setting for setting in settings if setting.partition("=")[0] == "seeds"]
    return given | {"fail_if": ",".join(tests)}, settings if chosen and chosen[-1] != "seeds=" else [SEEDS, *settings]
