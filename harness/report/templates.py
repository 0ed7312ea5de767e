"""Pages from Jinja templates that stand beside the code which has their figures."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined


def read_beside(package: str, name: str) -> str:
    """A file of a package, as text."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def rendered(package: str, name: str, values: Mapping[str, Any], *, html: bool = False) -> str:
    """A page by a template of a package. values: that it names; html: whatever they hold is escaped. Raises
    jinja2.UndefinedError for one that is not there."""
    environment = Environment(
        loader=FunctionLoader(lambda part: read_beside(package, part)),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(values)
