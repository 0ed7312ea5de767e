"""A member's way to the service: joins it, and keeps telling it that it is there and what it holds."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from harness.protocols import Clock
from harness.weight_sync.membership import Kind, MemberRequest

log = logging.getLogger(__name__)


class Refused(RuntimeError):
    """The service answered, and said no. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServiceClient:
    """Calls block for at most `timeout_s`. They raise Refused, or ConnectionError where the service is not there."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 10.0) -> None:
        self.url, self._token, self._timeout_s = url, token, timeout_s

    def join(self, name: str, version: int, *, kind: Kind = "engine", place: str = "") -> dict[str, Any]:
        return self._ask("POST", "/members", {"name": name, "kind": kind, "version": version, "place": place})

    def heartbeat(self, name: str, version: int) -> dict[str, Any]:
        """Joins anew where the service does not know the member: then it was restarted."""
        try:
            return self._ask("POST", f"/members/{urllib.parse.quote(name)}/heartbeat", {"version": version})
        except Refused as refused:
            if refused.status != 404:
                raise
            return self.join(name, version)

    def leave(self, name: str) -> dict[str, Any]:
        return self._ask("DELETE", f"/members/{urllib.parse.quote(name)}")

    def ask(self, name: str, wish: MemberRequest) -> dict[str, Any]:
        """Have an engine of a run leave, or come back, before the next transfer."""
        return self._ask("POST", f"/members/{urllib.parse.quote(name)}/{wish}")

    def topology(self) -> dict[str, Any]:
        return self._ask("GET", "/topology")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        # No proxy: the token is for this address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                told = json.loads(error.read() or b"{}").get("detail", error.reason)
            raise Refused(error.code, f"weight sync service at {self.url}: {told}") from error
        except (urllib.error.URLError, TimeoutError) as error:
            raise ConnectionError(f"no weight sync service at {self.url}: {error}") from error


async def send_heartbeats(
    client: ServiceClient, name: str, version: Callable[[], int], clock: Clock, *, every_s: float
) -> None:
    """Consumes the member's version, produces heartbeats, until it is cancelled. While the service is away the member
    goes on as it is, and is told again once there is one; a refusal is raised."""
    away = False
    while True:
        try:
            await asyncio.to_thread(client.heartbeat, name, version())
            away = False
        except ConnectionError as error:
            if not away:
                log.warning("%s goes on without the service: %s", name, error)
            away = True
        await clock.sleep(every_s)
