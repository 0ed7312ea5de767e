"""Code of your own, named by import path: `my_lab.schedules:Mine`, from any folder that Python imports from.

Wherever a setting takes a name of a registry, it takes such a path, too. Folders are those of PYTHONPATH and the
current one; worker processes get the same. What a path names is checked before anything starts.
"""

import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from harness.config.fields import ConfigError, first_line

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
GIVEN = {"given": True}
"""Metadata of a field that is no option: the job gives its value."""


@dataclass(frozen=True)
class Plugin:
    """Code of the user's that a run used: the setting that named it, the file that defines it, and its digest."""

    setting: str
    path: str
    file: str
    sha256: str


def is_path(name: str) -> bool:
    """Whether this names code by where it is, not by a registry."""
    return ":" in name


def as_file_name(name: str) -> str:
    """A name of a registry, or a path, as part of a folder's name."""
    return name.replace(":", ".")


def import_folders() -> list[str]:
    """Folders where workers have to look, besides where Python looks anyway: PYTHONPATH, and the current folder."""
    named = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return list(dict.fromkeys([*named, os.getcwd()]))


def load(path: str, setting: str) -> Any:
    """The object that `package.module:Name` names. Raises ConfigError where it is no such path, or cannot be
    imported."""
    if not _PATH.fullmatch(path):
        raise ConfigError(f"{setting}={path} is no import path; write `package.module:Name`")
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{setting}={path}: there is no module {error.name} in {', '.join(import_folders())}; "
                "put the folder that holds it on PYTHONPATH"
            ) from error
        why = str(error).partition("\n")[0]
        raise ConfigError(f"{setting}={path}: {module_name} fails to import: {type(error).__name__}: {why}") from error
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise ConfigError(f"{setting}={path}: {module_name} has no {name}; it defines {', '.join(own) or 'nothing'}")
    return getattr(module, name)


def make(factory: Callable[..., T], options: Mapping[str, Any], setting: str, path: str, **given: Any) -> T:
    """An instance of a dataclass, each option checked by its field's type. setting: what they stand under, such as
    `schedule`; given: values of those of its fields that are marked as `GIVEN`. Raises ConfigError for an option that
    it lacks, or a value of another type."""
    _check_class(factory, setting, path)
    if not is_dataclass(factory):
        _checked({}, options, setting, path)
        return factory()
    checked = _checked(_typed_options(factory), options, setting, path)
    marked = {own.name: given[own.name] for own in fields(factory) if own.metadata.get("given") and own.name in given}
    made: T = factory(**checked, **marked)  # type: ignore[assignment]
    return made


def keywords(
    function: Callable[..., Any], options: Mapping[str, Any], setting: str, path: str, given: Container[str] = ()
) -> dict[str, Any]:
    """Options of a function, checked by the types of its keyword-only parameters, but those that are `given` to it by
    others. Raises ConfigError as `make`."""
    types = {
        one.name: (TypeAdapter(Any if one.annotation is one.empty else one.annotation), one.default is one.empty)
        for one in inspect.signature(function, eval_str=True).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.name not in given
    }
    return _checked(types, options, setting, path)


def named_by(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are keyword-only parameters of the function."""
    own = [one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    return {name: value for name, value in options.items() if name in own}


def _checked(
    known: Mapping[str, tuple[TypeAdapter[Any], bool]], options: Mapping[str, Any], setting: str, path: str
) -> dict[str, Any]:
    """known: of each option the check of its type, and whether it needs a value."""
    for option in options:
        if option not in known:
            raise ConfigError(f"{setting}.{option} is no option of {path}; it has {', '.join(known) or 'none'}")
    for name, (_, needed) in known.items():
        if needed and name not in options:
            raise ConfigError(f"{setting}.{name} has no value; give it one, {setting}.{name}=...")
    checked = {}
    for name, value in options.items():
        try:
            checked[name] = known[name][0].validate_python(value)
        except ValidationError as error:
            raise ConfigError(first_line(error, f"{setting}.{name}")) from error
    return checked


def of_batch(function: Function) -> Function:
    """Marks a loss or an advantage that is another one of part of a batch. Code of the user's own may set the
    attribute `whole_batch = True` itself."""
    function.whole_batch = True  # type: ignore[attr-defined]
    return function


def check_called(function: Any, arguments: int, setting: str, path: str, signature: str) -> None:
    """Raises ConfigError where this is no function that can be called with so many arguments."""
    try:
        if inspect.isclass(function):
            raise TypeError
        kinds = inspect.signature(function).parameters.values()
        inspect.signature(function).bind(
            *[None] * arguments, **{own.name: None for own in kinds if own.kind is own.KEYWORD_ONLY}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting}={path} cannot be called as {signature}; write a function that can") from error


def defaults(cls: type, setting: str, path: str) -> dict[str, Any]:
    """The options of a dataclass with their defaults; `???` for those that the user has to set."""
    _check_class(cls, setting, path)
    values = {own.name: _default(own) for own in _options(cls)} if is_dataclass(cls) else {}
    return {name: "???" if value is MISSING else value for name, value in values.items()}


@cache
def _typed_options(cls: Any) -> dict[str, tuple[TypeAdapter[Any], bool]]:
    """Kept, because a plan makes the options of thousands of jobs, and checks of types take a millisecond to build."""
    types = get_type_hints(cls, include_extras=True)
    return {own.name: (TypeAdapter(types[own.name]), _default(own) is MISSING) for own in _options(cls)}


def _options(cls: Any) -> list[Field[Any]]:
    """Fields of a dataclass that settings may name."""
    return [own for own in fields(cls) if own.init and not own.metadata.get("given")]


def _check_class(found: Any, setting: str, path: str) -> None:
    if not isinstance(found, type):
        raise ConfigError(f"{setting}={path} is no class; make it a frozen dataclass, whose fields are its options")


def _default(own: Field[Any]) -> Any:
    """MISSING where there is none: a field without a default may hide a property of its base class, which is none."""
    value = own.default if own.default_factory is MISSING else own.default_factory()
    return MISSING if isinstance(value, property) else value


def plugin(setting: str, path: str) -> Plugin:
    """Raises ConfigError where it cannot be imported."""
    found = load(path, setting)
    module = sys.modules[getattr(found, "__module__", None) or path.partition(":")[0]]
    file = inspect.getsourcefile(module) or ""
    with open(file, "rb") as source:
        return Plugin(setting, path, file, hashlib.sha256(source.read()).hexdigest())
