"""How whoever called spells commands and settings. Messages name them as Python does, `cadence bench`,
`cluster.devices=2`; what is printed has options of the command, `--devices 2`, or make's variables, `DEVICES=2`."""

import os
import re
from collections.abc import Sequence

from harness.cli.commands import COMMANDS, Option

BY_MAKE = "CADENCE_CALLED_BY_MAKE"  # environment variable that the Makefile sets
_COMMAND = re.compile(rf"\bcadence ({'|'.join(COMMANDS)})\b(?! --)")


class Spelling:
    """typed: words after `cadence`, the command first. Settings that were typed as such stay as they are."""

    def __init__(self, typed: Sequence[str]) -> None:
        self._command, self._by_make = "".join(typed[:1]), bool(os.environ.get(BY_MAKE))
        self._as_settings = {word.partition("=")[0] for word in typed if "=" in word}

    def __call__(self, text: str) -> str:
        """The text as it is to be printed."""
        named = (self._command, *_COMMAND.findall(text))
        options = {one.setting: one for name in named if name in COMMANDS for one in COMMANDS[name].options}
        for setting, option in options.items():
            name = setting.partition("=")[0]
            if name in text and name not in self._as_settings:
                text = self._spelt(option, text)
        if not self._by_make:
            return text
        return _COMMAND.sub(r"make \1", re.sub(r"\bcadence ([\w-]+) --help", r"make \1 ARGS=--help", text))

    def _spelt(self, option: Option, text: str) -> str:
        begins = rf"(?<![\w./-]){re.escape(option.setting)}"
        if option.value is None:
            return re.sub(rf"{begins}\b", f"{option.variable}=1" if self._by_make else f"--{option.flag}", text)
        if self._by_make:
            return re.sub(f"{begins}=", f"{option.variable}=", text)
        return re.sub(rf"{begins}=(?=(\S?))", lambda found: f"--{option.flag}{' ' * (found[1] not in ('', ','))}", text)
