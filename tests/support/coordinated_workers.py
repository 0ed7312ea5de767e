"""Workers that write down what a coordinator of weights asks of them, and fail when they are told to."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from harness.protocols import Span
from harness.runtime.runtime import WorkerDied
from harness.weight_sync.collective import CollectiveOffer
from harness.weight_sync.coordinator import Coordinator, RetryPolicy
from harness.weight_sync.endpoints import SentOffer
from harness.weight_sync.ipc import SharedOffer, share_slots
from harness.weight_sync.membership import Fleet, OnLost
from harness.weight_sync.plan import TransferError, plan_transfer
from harness.weight_sync.process_group import Rendezvous
from harness.weight_sync.transports import GroupTransport
from tests.support.proxies import Proxy

PLAN = plan_transfer({"weight": torch.zeros(3)}.items(), 1 << 20)
RENDEZVOUS = Rendezvous(f"tcp:127.0.0.1:1#{64 * '0'} {64 * '0'}", 4, 5.0)
OFFER = SentOffer.of("collective", CollectiveOffer(PLAN, RENDEZVOUS))
KINDS = {"send": "publish_weights", "load": "load_weights", "stage": "stage_weights", "swap": "load_weights"}
BROKEN, DIED, WRONG = TransferError("the link broke"), WorkerDied("it died"), ValueError("the weights do not fit")
Errors = dict[str, list[Exception]]
"""By method: what its calls raise, one after the other, before they succeed."""


class Worker:
    """Logs its calls, in a log that all workers share; always fails at `fails`, as often as they last with `errors`,
    and waits for `gates`. Once it raised WorkerDied it is dead."""

    def __init__(self, name: str, log: list[str], fails: str = "", errors: Errors | None = None) -> None:
        self.name, self.log, self.fails, self.errors = name, log, fails, errors or {}
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.offer: SentOffer | None = None
        self.dead = False
        self.ends = 1

    @property
    def role(self) -> Any:
        return Proxy(self._call)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if method == "ends":
            return self.ends
        self.log.append(f"{self.name}.{method}")
        self.arguments[method] = arguments
        if self.dead:
            raise DIED
        if method in self.gates:
            await self.gates[method].wait()
        if method == self.fails:
            raise RuntimeError(f"{self.name} fails to {method}")
        if self.errors.get(method):
            error = self.errors[method].pop(0)
            self.dead = isinstance(error, WorkerDied)
            raise error
        match method:
            case "plan":
                return PLAN
            case "settled_version":
                return 1
            case "open_batch":
                await self.hold("open_batch").wait()
                return 1
            case "open" if arguments[0] == "ipc":
                self.offer = SentOffer.of("ipc", share_slots(PLAN, RENDEZVOUS))
                return self.offer
            case "open":
                return OFFER
            case "send" | "load" | "stage" | "swap":
                return [Span("role", self.name, KINDS[method], 0.0, 1.0, arguments[0], arguments[0] - 1)]
        return None

    async def death(self, within_s: float = 5.0) -> str | None:
        return "it died" if self.dead else None

    async def end(self) -> None:
        self.dead = True

    def hold(self, method: str) -> asyncio.Event:
        """From now on this call waits for the event."""
        return self.gates.setdefault(method, asyncio.Event())


class Setting:
    """Two training ranks, two engines, a scorer. fails: by worker, the method at which it always fails."""

    def __init__(self, transport: str, on_lost: OnLost = "end", attempts: int = 3, fails: Any = None, **errors: Any):
        self.log: list[str] = []
        self.lost: list[str] = []
        self.spans: list[Span] = []

        def workers(*names: str) -> list[Worker]:
            return [Worker(name, self.log, (fails or {}).get(name, ""), errors.get(name)) for name in names]

        self.trainers, self.engines = workers("trainer0", "trainer1"), workers("engine0", "engine1")
        (self.scorer,) = self.scorers = workers("scorer")
        self.fleet = Fleet(self.engines, on_lost=on_lost, notify=self.engine_event)
        self.coordinator = Coordinator(
            self.trainers,
            fleet=self.fleet,
            scorers=self.scorers,
            transport=GroupTransport(transport, lambda sender: "127.0.0.1", 5.0),
            bucket_bytes=1 << 20,
            observe=self.observe,
            retry=RetryPolicy(attempts),
        )

    def observe(self, spans: Iterable[Span]) -> None:
        self.spans += spans

    def engine_event(self, engine: str, what: str, why: str) -> None:
        if what == "lost":
            self.lost.append(f"{engine}: {why}")

    def calls(self) -> list[str]:
        """Since the last look."""
        calls, self.log[:] = list(self.log), []
        return calls

    def count(self, call: str) -> int:
        return self.log.count(call)

    @property
    def shared_path(self) -> Path:
        assert self.trainers[0].offer is not None
        shared = self.trainers[0].offer.opened()
        assert isinstance(shared, SharedOffer)
        return shared.path
