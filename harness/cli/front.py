"""Settings from words, as argparse reads them; `cadence --help`, `--version`, `--print-completion`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from shutil import get_terminal_size
from textwrap import wrap
from typing import NoReturn

from cadence import __version__
from harness.cli.commands import COMMANDS, SETTINGS, Option, as_options, overview, takes
from harness.cli.console import folded, write
from harness.cli.spelling import BY_MAKE, Spelling
from harness.config import ConfigError
from harness.metrics.tables import WHOLE_WORDS

SHELLS = ("bash", "zsh", "fish", "tcsh")


class _Help(argparse.HelpFormatter):
    """Breaks no word: neither an option nor what is to be copied is."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, **WHOLE_WORDS)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(self._split_lines(text, width))


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where others end the process."""

    def _print_message(self, message: str, file: object = None) -> None:
        """Print help, or the version."""
        write(folded(message, get_terminal_size().columns) if sys.stdout.isatty() else message)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, which names where the options are listed."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help lists what it takes")


def front(arguments: Sequence[str]) -> int:
    """Print what was asked for. Raises ConfigError for what is no option."""
    parser = whole_parser()
    shell = parser.parse_args(arguments).print_completion
    if shell is None:
        parser.error("which command?")
    from harness.cli.completion import completion

    write(f"{completion(shell)}\n")
    return 0


def whole_parser(complete: Callable[[Option | None], object] | None = None) -> Parser:
    """complete: as in `_add_options`; where it is given the parser is a shell's, and has no help."""
    what = "The same RL post-training job of a language model under interchangeable schedules, measured."
    parser = Parser(
        prog="cadence",
        usage="cadence <command> [options] [setting=value ...]",
        description=f"{what}\n\n{overview()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cadence <command> --help lists its options; every setting of a job stands in experiments/.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cadence {__version__}")
    parser.add_argument(
        "--print-completion", choices=SHELLS, help='for your shell: eval "$(cadence --print-completion bash)"'
    )
    listed = argparse.SUPPRESS if complete is None else None  # as argparse lists them, which knows no groups
    of_commands = parser.add_subparsers(required=False, help=listed)
    for name, command in COMMANDS.items():
        _add_options(of_commands.add_parser(name, help=command.help), name, complete)
    return parser


def settings_of(name: str, words: Sequence[str]) -> list[str]:
    """Return the settings that options, make's variables and settings are, those of options first, then others as they
    were given. Raises ConfigError for an option or a variable that the command does not take, SystemExit after its
    help."""
    command = COMMANDS[name]
    variables = " ".join(f"{option.variable}=" for option in command.options)
    example = f"For example: {Spelling([name])(f'cadence {name} {command.example}'.rstrip())}"
    parser = Parser(
        prog=f"cadence {name}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        usage=f"cadence {name} [options] {command.free}".rstrip(),
        epilog=f"Make's variables are {variables} {example}" if os.environ.get(BY_MAKE) else example,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    _add_options(parser, name)
    try:
        given, settings = parser.parse_known_args(as_options(name, words))
    except ValueError as refused:
        raise ConfigError(str(refused)) from refused
    own = [option.setting.partition("=")[0] for option in command.options]
    for before, word in pairwise(words):
        if before.endswith(",") and word in settings and "=" not in word:
            raise ConfigError(f"{before} {word}: a list has no blanks; write {before}{word}")
    for unknown in settings:
        if unknown.startswith("-"):
            parser.error(f"unknown option {unknown}")
        if not command.free and unknown.partition("=")[0] not in own:
            raise ConfigError(f"{name} does not take {unknown}; {takes(name)}")
    found = []
    for option in command.options:
        value = getattr(given, option.flag.replace("-", "_"))
        if option.value is None:
            found += [option.setting] * bool(value)
        else:
            found += [f"{option.setting}={each}" for each in value or ()]
    return found + settings


def _add_options(
    parser: argparse.ArgumentParser, command: str, complete: Callable[[Option | None], object] | None = None
) -> None:
    """complete: how a shell completes the values of an option, or settings, as shtab has it."""
    if complete is not None and COMMANDS[command].free == SETTINGS:
        _complete(parser.add_argument("settings", nargs="*"), complete(None))
    for option in COMMANDS[command].options:
        if option.value is None:
            parser.add_argument(f"--{option.flag}", action="store_true", help=option.help)
            continue
        told = f"{option.help} (default: {option.default})" if option.default else option.help
        action = parser.add_argument(f"--{option.flag}", action="append", metavar=option.value, help=told)
        if complete is not None:
            _complete(action, complete(option))


def _complete(action: argparse.Action, how: object) -> None:
    if how is not None:
        action.complete = how  # type: ignore[attr-defined]
