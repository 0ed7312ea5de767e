"""A machine that has torch and transformers with what these require, and nothing else."""

import os
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.project import ROOT

_HOOK = """
import re
from importlib import metadata
from importlib.machinery import PathFinder

find_spec, from_name = PathFinder.find_spec, metadata.Distribution.from_name


def installed(name):
    if re.sub("[-_.]+", "-", name).lower() in ABSENT:
        raise metadata.PackageNotFoundError(name)
    return from_name(name)


PathFinder.find_spec = lambda name, *where: None if name.partition(".")[0] in REFUSED else find_spec(name, *where)
metadata.Distribution.from_name = installed
"""


def required_by(*names: str) -> set[str]:
    """Canonical names of these distributions and of all that they require here, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # CUDA's libraries, where torch is of the CPU's
            continue
        needed = [Requirement(line) for line in requires]
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def bare_environment(folder: Path) -> dict[str, str]:
    """Environment in which Python does not find what torch and transformers do not require, in the processes that
    it starts, too. folder: gets the hook that does."""
    there = required_by("torch", "transformers")
    modules = {
        module: {canonicalize_name(name) for name in names}
        for module, names in metadata.packages_distributions().items()
        if not (ROOT / module).exists()
    }
    refused = {module for module, names in modules.items() if not there & names}
    absent = {name for names in modules.values() for name in names} - there
    assert {"msgspec", "psutil", "hydra", "mlflow", "ray", "pyarrow", "scipy"} <= refused
    (folder / "sitecustomize.py").write_text(f"REFUSED, ABSENT = {refused!r}, {absent!r}\n{_HOOK}")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
