"""`cadence --help`, `--version` and `--print-completion`: what there is before a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cadence import __version__
from harness.cli.options import Parser, add_options

SHELLS = ("bash", "zsh", "fish", "tcsh")


def front(arguments: Sequence[str], commands: Mapping[str, str]) -> int:
    """Print what was asked for. commands: what each does. Raises ConfigError for what is no option."""
    parser = whole_parser(commands)
    shell = parser.parse_args(arguments).print_completion
    if shell is None:
        parser.error("which command?")
    print(completion(commands, shell))
    return 0


def whole_parser(commands: Mapping[str, str], complete: Callable[[str], object] | None = None) -> Parser:
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
        add_options(of_commands.add_parser(name, help=what), name, complete)
    return parser


def completion(commands: Mapping[str, str], shell: str) -> str:
    """A script that completes commands, options, and the choices that have files."""
    import shtab

    from harness.config.compose import choices

    parser = whole_parser(commands, lambda group: shtab.cmd(f"echo {' '.join(choices(group))}"))
    script: str = shtab.complete(parser, shell)
    return script
