"""Handles of tests: a role whose calls pass through a function of the test."""

from collections.abc import Awaitable, Callable
from typing import Any

Carry = Callable[..., Awaitable[Any]]
"""(method, *arguments) -> its answer."""


class Proxy:
    """Every attribute is a coroutine function that is carried out by `carry`."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return lambda *arguments: self._carry(method, *arguments)
