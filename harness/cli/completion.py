"""Scripts by which shells complete commands, options, names and lists of them, experiments, files, settings."""

from collections.abc import Iterable
from typing import Any

from harness.cli.commands import Option
from harness.cli.front import whole_parser
from harness.config.compose import EXPERIMENTS, GROUPS, choices, compose_job, plain, read_settings
from harness.config.job import flatten
from harness.studies.papers.experiment import names

_LIST = """
# $1=word: completes what follows its last comma
_cadence_list_{group}() {{
  [[ $1 == *,* ]] && local before="${{1%,*}},"
  compgen -P "${{before-}}" -W "{names}" -- "${{1##*,}}"
}}"""

_NO_SPACE = """
# behind the = of a setting comes its value
_cadence() { _shtab_cadence "$@"; [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace; return 0; }
complete -o bashdefault -F _cadence cadence
"""


def completion(shell: str) -> str:
    """A script for one of SHELLS."""
    import shtab

    script: str = shtab.complete(whole_parser(_completed), shell)
    return script + _NO_SPACE if shell == "bash" else script


def _completed(option: Option | None) -> Any:
    """How the value of an option is completed, as shtab has it; of None settings. Not at all: None."""
    import shtab

    if option is None:
        settings = all_settings()
        return _words(f"{setting}=" for setting in settings) | {"zsh": f"compadd -q -S = - {' '.join(settings)}"}
    if option.setting == "experiment":
        folder = r"(string length -q -- \$CADENCE_RESULTS; and echo \$CADENCE_RESULTS; or echo results)"
        return shtab.cmd("ls ${CADENCE_RESULTS:-results} 2>/dev/null") | {"fish": f"(ls {folder} 2>/dev/null)"}
    if option.setting == "paper":
        return _words(["all", *names()])
    if option.group is None:
        kind = {"FOLDER": shtab.DIRECTORY}.get(option.value or "")
        return shtab.FILE if option.value in ("FILE", "CSV", "JSON", "PEM") else kind
    if option.value != "NAMES":
        return _words(choices(option.group))
    names_of_group = ["all", *choices(option.group)]
    listed = " ".join(names_of_group)
    found: Any = shtab.cmd(f"echo {listed}")
    found["bash"] = f"_cadence_list_{option.group}"
    found["preamble"]["bash"] = _LIST.format(group=option.group, names=listed)
    found["zsh"], found["fish"] = (
        f"_sequence compadd - {listed}",
        f"(__fish_complete_list , 'string split , {','.join(names_of_group)}')",
    )
    return found


def _words(words: Iterable[str]) -> dict[str, Any]:
    import shtab

    listed = " ".join(words)
    return shtab.cmd(f"echo {listed}") | {"fish": listed}


def all_settings() -> list[str]:
    """Every setting of a job, of whatever schedule, engine or task."""
    found = set(flatten(plain(compose_job([]))))
    for group in GROUPS:
        for name in choices(group):
            found |= set(flatten({group: read_settings(EXPERIMENTS / group / f"{name}.yaml")}))
    return sorted((found | {*GROUPS}) - {f"{group}.name" for group in GROUPS})
