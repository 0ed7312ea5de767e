"""The Python interface: `cadence.run` makes runs, `cadence.load` reads finished ones, as pandas tables
(docs/results.md).

Everything else is in the package `harness`, and on the command line: `cadence --help`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadence.api import Results, load, run

__version__ = "0.1.0"
__all__ = ["Results", "load", "run"]


def __getattr__(name: str) -> Any:
    """The public functions, loaded when they are first used: the version alone brings nothing along."""
    if name not in __all__:
        raise AttributeError(f"module 'cadence' has no attribute {name!r}")
    from cadence import api

    return getattr(api, name)
