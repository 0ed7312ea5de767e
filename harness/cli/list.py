"""`make list`, `make metrics`: what can be chosen, and what is measured."""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError
from harness.metrics.formatting import say
from harness.metrics.tables import Table


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Every choice of every group, with its file's first line, and every paper; or what names of `of` are."""
    from harness.config.compose import EXPERIMENTS, GROUPS, choices
    from harness.studies.papers.experiment import names, read_experiment

    own, _ = own_arguments(arguments, "of")
    if setting := own.get("of"):
        _explain(setting, console)
        return 0
    for group in GROUPS:
        firsts = [(EXPERIMENTS / group / f"{name}.yaml").read_text("utf-8").split("\n")[0] for name in choices(group)]
        told = [(name, first.lstrip("# ")) for name, first in zip(choices(group), firsts, strict=True)]
        console.print(f"{group}=", style="bold")
        console.print(Table("", ("name", "what it is"), told))
    papers = [(name, read_experiment(name).title) for name in names()]
    console.print("paper= (of `cadence paper`)", style="bold")
    console.print(Table("", ("name", "what it is"), papers))
    console.print(f"Settings of each stand in {EXPERIMENTS.name}/<group>/<name>.yaml; change them by name, such as")
    say(console, "  cadence bench schedule.max_staleness=1 algorithm.correction=tis")
    return 0


def _explain(setting: str, console: Console) -> None:
    """Each name that a setting takes: options with defaults, and what its code says of itself."""
    from harness.config.registries import REGISTRIES, find
    from harness.rl.shaping import GIVEN

    if setting not in REGISTRIES:
        raise ConfigError(f"of={setting} has no names to explain; choose one of {', '.join(REGISTRIES)}")
    for name in REGISTRIES[setting]:
        what = find(setting, name)
        own = inspect.signature(what).parameters.values() if inspect.isfunction(what) else ()
        options = [
            one.name if one.default is one.empty else f"{one.name}={one.default}"
            for one in own
            if one.kind is one.KEYWORD_ONLY and one.name not in GIVEN and "Tensor" not in str(one.annotation)
        ]
        say(console, f"  {name}  {' '.join(options)}".rstrip(), "bold")
        if told := inspect.getdoc(what):
            sentences = re.sub(r"(?<=\S)\n(?=\S)(?!\w+: )", " ", told)  # in code they are broken
            say(console, indent(sentences, " " * 6) + "\n")


def metrics(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Every metric of an iteration: name, unit, title and, where that leaves something open, formula."""
    from harness.metrics.definitions import DEFINITIONS, FAMILIES

    rows = [(one.name, one.unit or "-", ": ".join(filter(None, (one.title, one.meaning)))) for one in DEFINITIONS]
    rows += [(names, "-", said) for names, said in FAMILIES.items()]
    of = "of an iteration; its window begins where the one before ends; over the samples that it trained"
    console.print(Table(of, ("metric", "unit", "what it is"), rows))
    return 0
