"""Messages of the driver and its workers: msgpack, decoded by the annotations of the roles' methods; no code travels.

Beyond what msgspec knows (builtins, dataclasses, its own structs) arrays, tensors, dtypes of torch and paths travel.
Exceptions arrive as themselves where both sides have the class, else as the nearest base that both have.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter, Signature, iscoroutinefunction, signature
from pathlib import PurePath
from typing import Any, get_origin, get_type_hints

import msgspec
import numpy as np

FRAME_LIMIT = 64 << 20
"""Bytes of a message, which takes half a second at 1 Gbit/s: rows stay in the queue, and what comes here is of a fixed
size for each sample. Checks refuse batches whose samples would not fit (`BYTES_OF_A_SAMPLE`), evaluations are cut into
calls that do (`BYTES_OF_A_TOKEN`)."""
BYTES_OF_A_SAMPLE = 64
"""The most that a message has of each sample of a batch: ids, a reward, or why it was dropped."""
BYTES_OF_A_TOKEN = 20
"""The most that a message has of each token of a held-out sample: 8 of the token, 4 of its log-prob and version each, a
mask."""


class CannotTravel(TypeError):
    """A value, or the type that an annotation asks for, that has no wire form."""


# -- values


def encode(value: Any) -> bytes:
    """Raises CannotTravel."""
    try:
        return _encoder.encode(value)
    except CannotTravel:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CannotTravel(f"{type(value).__name__} cannot travel: {error}") from error


def decode(data: bytes | memoryview | msgspec.Raw, wanted: Any) -> Any:
    """The value that `encode` encoded, as the type that is wanted; arrays are the reader's own, writable. Raises
    CannotTravel for such a type, ValueError where the data are something else."""
    return _decoder(wanted)(data)


@cache
def _decoder(wanted: Any) -> Callable[[Any], Any]:
    try:
        return msgspec.msgpack.Decoder(wanted, dec_hook=_from_plain).decode
    except (TypeError, NameError) as error:
        raise CannotTravel(f"{wanted} cannot travel: {error}") from error


Packed = tuple[str, tuple[int, ...], bytes]
"""(dtype, shape, bytes) of an array or a tensor."""


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.names is not None:
            raise CannotTravel(f"an array of {value.dtype} cannot travel")
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if torch is not None and isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1)
        return _plain(value.dtype), tuple(value.shape), data.view(torch.uint8).numpy().tobytes()
    raise CannotTravel(f"a {type(value).__module__}.{type(value).__qualname__} cannot travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def _from_plain(wanted: Any, plain: Any) -> Any:
    wanted = get_origin(wanted) or wanted
    if wanted is np.ndarray:
        dtype, shape, data = msgspec.convert(plain, Packed)
        array = np.empty(shape, np.dtype(dtype))
        if array.nbytes != len(data):
            raise ValueError(f"{len(data)} bytes are no {dtype} array of shape {shape}")
        if data:
            array[...] = np.frombuffer(data, array.dtype).reshape(shape)
        return array
    if isinstance(wanted, type) and issubclass(wanted, PurePath):
        return wanted(msgspec.convert(plain, str))
    torch = sys.modules.get("torch")
    if torch is not None and wanted is torch.dtype:
        return _torch_dtype(msgspec.convert(plain, str))
    if torch is not None and wanted is torch.Tensor:
        name, shape, data = msgspec.convert(plain, Packed)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(_torch_dtype(name)).view(shape)
    raise CannotTravel(f"{wanted} cannot travel: annotate a type with fields")


def _torch_dtype(name: str) -> Any:
    torch = sys.modules["torch"]
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


# -- methods


@dataclass(frozen=True)
class MethodTypes:
    """The types that one coroutine method of a role takes, without `self`, and returns."""

    signature: Signature
    arguments: Any
    answer: Any

    def bind(self, positional: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in order, defaults too. TypeError where they do not fit."""
        bound = self.signature.bind(*positional, **named)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def spread(self, arguments: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments, of those that `bind` put in order."""
        positional, named = [], {}
        for one, argument in zip(self.signature.parameters.values(), arguments, strict=True):
            if one.kind is Parameter.KEYWORD_ONLY:
                named[one.name] = argument
            else:
                positional.append(argument)
        return positional, named


@cache
def method_types(method: Callable[..., Any]) -> MethodTypes:
    """Types of a function in a class. Raises CannotTravel where it is no coroutine function, or lacks an annotation."""
    name = method.__qualname__
    if not iscoroutinefunction(method):
        raise CannotTravel(f"{name} is no coroutine function: only those can be called from afar")
    own = signature(method)
    parameters = list(own.parameters.values())[1:]
    try:
        hints = get_type_hints(method, include_extras=True)
    except NameError as error:
        raise CannotTravel(f"{name}: an annotation names what is imported for type checkers only: {error}") from error
    for one in parameters:
        if one.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) or one.name not in hints:
            raise CannotTravel(f"{name}: parameter {one.name} needs an annotation, and may be no *{one.name}")
    if "return" not in hints:
        raise CannotTravel(f"{name} needs an annotation of what it returns")
    taken = tuple(hints[one.name] for one in parameters)
    return MethodTypes(own.replace(parameters=parameters), tuple[taken], hints["return"])  # type: ignore[valid-type]


# -- errors


class Failure(msgspec.Struct, array_like=True):
    """An exception. kinds: its class and the bases of that, as module:name; arguments: those of it that are plain;
    parts: of a group."""

    kinds: list[str]
    text: str
    arguments: list[str | int | float | bool | None] | None
    notes: list[str]
    parts: list[Failure]


def failure_of(error: BaseException, where: str | None = None) -> Failure:
    """An error as it travels. where: it came from; then its traceback goes along as a note."""
    group = isinstance(error, BaseExceptionGroup)
    notes = list(getattr(error, "__notes__", ()))
    if where is not None:
        notes.append(f"in {where}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    plain = all(isinstance(one, str | int | float | bool | None) and _travels(one) for one in error.args)
    return Failure(
        [f"{kind.__module__}:{kind.__qualname__}" for kind in type(error).__mro__],
        _legible(error.message if isinstance(error, BaseExceptionGroup) else str(error)),
        list(error.args) if plain and not group else None,
        [_legible(note) for note in notes],
        [failure_of(part) for part in error.exceptions] if isinstance(error, BaseExceptionGroup) else [],
    )


def _legible(text: str) -> str:
    """The text as UTF-8 can have it: half of a pair of surrogates is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _travels(value: Any) -> bool:
    """Not so a number of more than 64 bits, or text that is not `_legible`."""
    try:
        encode(value)
    except CannotTravel:
        return False
    return True


def error_of(failure: Failure) -> Exception:
    """The exception, with its notes. Nothing is imported for it."""
    error = _exception(failure)
    for note in failure.notes:
        error.add_note(note)
    return error


def _exception(failure: Failure) -> Exception:
    if failure.parts:
        return ExceptionGroup(failure.text, [error_of(part) for part in failure.parts])
    for kind in failure.kinds:
        known = _known(kind)
        if known is None:
            continue
        if kind == failure.kinds[0]:
            if (same := _same(known, failure)) is not None:
                return same
        elif known is not Exception:
            return known.__new__(known, f"{_short(failure)}: {failure.text}")
    return RuntimeError(f"{_short(failure)}: {failure.text}")


def _same(known: type[Exception], failure: Failure) -> Exception | None:
    """An error made by its constructor, or without it, whichever makes an error of the arguments that says the same;
    None of a class that takes something else, or that only its own library can make."""
    arguments = [failure.text] if failure.arguments is None else failure.arguments
    for make in (known, partial(known.__new__, known)):
        try:
            error = make(*arguments)
            if str(error) == failure.text:
                return error
        except Exception:  # of the class's own code
            pass
    return None


def _known(kind: str) -> type[Exception] | None:
    module, _, name = kind.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _short(failure: Failure) -> str:
    return failure.kinds[0].rpartition(":")[2] if failure.kinds else "Exception"


# -- messages, once both sides have proved that they have the token


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A message; its class is its first item, and the number of the call is in the frame."""


class Call(Message):
    """A call of a role's method. role: its handle's name; arguments: encoded, a tuple."""

    role: str
    method: str
    arguments: msgspec.Raw


class ReadClock(Message):
    """time.monotonic there, which differs between hosts."""


class StartClock(Message):
    """Time 0 of all roles, a reading of time.monotonic there."""

    origin: float


class StopClock(Message):
    """The time of all roles stands still until StartClock. Answered with that time."""


class Ping(Message):
    """Ask whether the worker answers."""


class EndRole(Message):
    """End a role."""

    role: str


class Done(Message):
    """Answer of a call."""

    value: msgspec.Raw


class Failed(Message):
    """Failure of a call."""

    failure: Failure


Request = Call | ReadClock | StartClock | StopClock | Ping | EndRole
Answer = Done | Failed
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def done(value: Any) -> Done:
    """The answer with this value."""
    return Done(msgspec.Raw(encode(value)))
