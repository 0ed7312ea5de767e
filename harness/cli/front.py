"""`cadence --help`, `--version` and `--print-completion`: what there is before a command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from cadence import __version__
from harness.cli.options import OPTIONS, Parser, add_options

SHELLS = ("bash", "zsh", "fish", "tcsh")


def front(arguments: Sequence[str], commands: Mapping[str, str]) -> int:
    """Print what was asked for. commands: what each does. Raises ConfigError for what is no option."""
    parser = whole_parser(commands)
    shell = parser.parse_args(arguments).print_completion
    if shell is None:
        parser.error("which command?")
    print(completion(parser, shell))
    return 0


def whole_parser(commands: Mapping[str, str]) -> Parser:
    parser = Parser(
        prog="cadence",
        usage="cadence <command> [options] [setting=value ...]",
        description="The same RL post-training job of a language model under interchangeable schedules, measured.",
        epilog="cadence <command> --help lists its options; every setting of a job stands in experiments/.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cadence {__version__}")
    parser.add_argument(
        "--print-completion", choices=SHELLS, help='for your shell: eval "$(cadence --print-completion bash)"'
    )
    of_commands = parser.add_subparsers(title="commands", metavar="<command>", required=False)
    for name, what in commands.items():
        add_options(of_commands.add_parser(name, help=what), name)
    return parser


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script that completes commands, options, and the choices that have files."""
    import shtab

    from harness.config.compose import choices

    groups = {option.flag: option.group for options in OPTIONS.values() for option in options if option.group}
    names = {flag: shtab.cmd(f"echo {' '.join(choices(group))}") for flag, group in groups.items()}
    for action in _actions(parser):
        for flag in action.option_strings:
            if flag.removeprefix("--") in names:
                action.complete = names[flag.removeprefix("--")]  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those of its commands, too."""
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for each in action.choices.values() for inner in _actions(each)]
    return found
