"""Faults on real runs of the tiny model: a process of a run is killed or stands still, a disk is full, a checkpoint is
damaged, a connection is slow, torn or refused; the same command again until the run is done; and what is promised of
it then.

Of connections: a runtime whose connections to some processes go by way of a relay, which delays, tears or refuses them
when told to (harness/cli/relayed.py)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import psutil

from harness.acceptance.chaos.faults import DAMAGES, Damage, Damaged, damage, finished_with, whole_checkpoints
from harness.campaigns.process import RunProcess
from harness.comparison.conservation import check_conservation
from harness.comparison.runs import read_run
from harness.config.registries import SCHEDULES
from harness.driver.checkpoint_files import last_checkpoint
from harness.metrics.atomic_files import write_text
from harness.metrics.done import is_done
from harness.metrics.formatting import markdown_table
from harness.metrics.run_files import load_metrics
from harness.rpc.sockets import Address, client_socket, listen, new_address
from harness.runtime.local_runtime import LocalRuntime
from harness.runtime.runtime import Storage
from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.remote.client import RemoteQueue

What = Literal["SIGKILL", "SIGSTOP", "damage", "full disk", "torn", "delayed", "refused"]

ITERATIONS = 12
_ATTEMPTS = 4
_ATTEMPT_S = 240.0  # seconds that an attempt may take; longer is a hang, which is what is looked for
_STARTED_S = 12.0  # seconds in which a run starts: a fault of its start happens in one of them
_GONE_S = 20.0
_POLL_S = 0.02
_JOB = (
    "backend=real cluster.oversubscribe=true model.warm_start=false smoke=true algorithm.recompute_log_probs=false "
    f"save_weights=false seeds=[0] iterations={ITERATIONS} checkpoint.every=2 cluster.wait_timeout_s=60 "
    "cluster.stall_timeout_s=120"
).split()
_DEVICES = {"colocate_sync": 2, "half_step": 4, "delayed_update": 3, "rolling_update": 4, "fully_async": 3}
"""Devices of schedules that do not do with two, or have two engines."""
ROLES = ("driver", "fork server", "queue", "host", "device")


@dataclass(frozen=True)
class RealFault:
    """A fault of a real run. whom: a role, or of `damage` what is done; at: iteration after which it happens, 0 while
    the run starts, the last one while it ends; size: 0 to 1."""

    number: int
    schedule: str
    what: What
    whom: str
    at: int
    size: float


@dataclass
class Felt:
    """The consequences of a fault. whom: by name; happened: how the attempts ended, or that it went on; seconds: until
    an iteration was done that had not been before; problems: promises that were broken."""

    fault: RealFault
    whom: str = ""
    at_s: float = 0.0
    happened: list[str] = field(default_factory=list)
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)


def draw_real_faults(count: int, first: int) -> list[RealFault]:
    """Numbers from `first` on, each drawn from its own."""
    return [_drawn(number) for number in range(first, first + count)]


def _drawn(number: int) -> RealFault:
    random = Random(number)
    schedule = list(SCHEDULES)[number % len(SCHEDULES)]
    kinds: Sequence[What] = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGSTOP", "damage", "damage", "full disk")
    what = random.choice((*kinds, "torn", "delayed", "refused"))
    whom = random.choice(DAMAGES) if what == "damage" else random.choice(ROLES)
    if what == "full disk":
        whom = "the results folder"
    elif what in ("torn", "delayed", "refused"):
        whom = random.choice(("queue", "host", "device"))
    at, size = random.randint(4, ITERATIONS - 5), random.random()
    if what in ("SIGKILL", "SIGSTOP"):
        at = random.choice((0, at, at, ITERATIONS - 1))
    return RealFault(number, schedule, what, whom, at, size)


def feel(fault: RealFault, results: Path) -> Felt:
    """Let one fault happen to a run of its own, whose folder stays where a promise was broken."""
    felt, random = Felt(fault), Random(fault.number)
    if fault.what != "full disk":
        _feel(felt, results, results, random, None)
        return felt
    with small_disk(results / f"disk_{fault.number}") as disk:
        if disk is None:
            felt.happened.append("no small file system can be mounted here: left out")
        else:
            _feel(felt, disk.folder, results, random, disk)
    return felt


def _feel(felt: Felt, results: Path, logs: Path, random: Random, disk: Disk | None) -> None:
    """Let the fault happen. logs: where what is said is kept whole, however full the disk of `results` is."""
    experiment = f"fault_{felt.fault.number}"
    settings = [f"experiment={experiment}", f"schedule={felt.fault.schedule}", *_JOB]
    settings.append(f"cluster.devices={_DEVICES.get(felt.fault.schedule, 2)}")
    go, damaged = results / f".{experiment}.go", Damaged()
    struck_at: float | None = None
    reached = -1
    for number in range(_ATTEMPTS):
        log = logs / f"{experiment}.{number}.log"
        with _attempt(felt.fault, settings, log, results, go, first=not number) as attempt:
            if struck_at is None:
                if not _wait_for(partial(_is_due, felt.fault, results, experiment, attempt), attempt):
                    if felt.fault.at == ITERATIONS - 1 and attempt.ended() == 0:
                        felt.happened.append("it had ended before")
                        return
                    felt.problems.append(f"nothing was to happen to it yet, and it ended: {attempt.log_tail()}")
                    return
                reached, struck_at = _iterations(results, experiment), time.monotonic()
                felt.at_s = round(attempt.seconds, 1)
                _strike(felt, attempt, random, go, disk)
            _wait_for(partial(_beyond, results, experiment, reached), attempt)
            if felt.seconds is None and _beyond(results, experiment, reached):
                felt.seconds = round(time.monotonic() - struck_at, 1)
            code = _end_of(attempt)
            if code is None:
                felt.problems.append(f"it did not end within {_ATTEMPT_S:g} s: {attempt.log_tail()}")
                return
        said = log.read_text(encoding="utf-8", errors="replace")
        if "Traceback" in said:
            felt.problems.append(f"a traceback: {attempt.log_tail()}")
        run = next((results / experiment).glob("*/seed=0"), results)  # where it had none yet, there is nothing in it
        felt.problems += [f"{one} was damaged, and is not named" for one in damaged if number and one not in said]
        damaged.clear()
        if code == 0 and is_done(run):
            felt.problems += after(run)
            return
        felt.seconds, reached = None, max(reached, _iterations(results, experiment))
        felt.happened.append(f"killed by signal {-code}" if code < 0 else _last_words(said) or f"exit code {code}")
        if disk is not None:
            disk.empty()
        if felt.fault.what == "damage" and number == 0 and (whole := whole_checkpoints(run, {})):
            kind: Damage = next(kind for kind in DAMAGES if kind == felt.fault.whom)
            felt.happened.append(damage(whole[-1], kind, random, damaged))
        checkpoint, _ = last_checkpoint(run)
        felt.happened.append(f"again, from version {0 if checkpoint is None else checkpoint.version}")
    felt.problems.append(f"it had not come to its end after {_ATTEMPTS} attempts")


@contextmanager
def _attempt(
    fault: RealFault, settings: Sequence[str], log: Path, results: Path, go: Path, *, first: bool
) -> Iterator[RunProcess]:
    """The command, by way of a relay where the fault is one of connections; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "harness", "bench"]
    if first and fault.what in ("torn", "delayed", "refused"):
        told = json.dumps({"what": fault.what, "whom": fault.whom, "size": fault.size, "go": str(go)})
        command = [sys.executable, "-m", "harness.cli.relayed", told]
    attempt = RunProcess.spawn(
        f"fault {fault.number}", [*command, *settings], log, {"CADENCE_RESULTS": str(results), "OMP_NUM_THREADS": "1"}
    )
    try:
        yield attempt
    finally:
        attempt.end()


def _wait_for(happened: Callable[[], bool], attempt: RunProcess) -> bool:
    """Whether it did before the attempt ended, or took too long."""
    while not happened():
        if attempt.ended() is not None or attempt.seconds > _ATTEMPT_S:
            return happened()
        time.sleep(_POLL_S)
    return True


def _end_of(attempt: RunProcess) -> int | None:
    """Exit code of an attempt; None where it takes too long."""
    while (code := attempt.ended()) is None and attempt.seconds < _ATTEMPT_S:
        time.sleep(_POLL_S)
    return code


def _strike(felt: Felt, attempt: RunProcess, random: Random, go: Path, disk: Disk | None) -> None:
    fault = felt.fault
    if disk is not None:
        disk.fill()
        felt.whom = fault.whom
        return
    if fault.what in ("torn", "delayed", "refused"):
        go.write_text("now", encoding="utf-8")
        felt.whom = fault.whom
        return
    role = "driver" if fault.what == "damage" else fault.whom
    found = processes_by_role(attempt.pid or 0)
    names = sorted(name for name in found if name.startswith(role)) or ["driver"]
    felt.whom = random.choice(names)
    victim = found[felt.whom]
    with suppress(psutil.NoSuchProcess):
        if fault.what == "SIGSTOP":
            victim.send_signal(signal.SIGSTOP)
            time.sleep(1.0 + 4.0 * fault.size)
            victim.send_signal(signal.SIGCONT)
        else:
            family = psutil.Process(attempt.pid).children(recursive=True)
            victim.kill()
            if felt.whom == "driver":
                _, left = psutil.wait_procs(family, timeout=_GONE_S)
                felt.problems += [f"{one.name()} outlived its driver by {_GONE_S:g} s" for one in left]


def processes_by_role(driver: int) -> dict[str, psutil.Process]:
    """Processes of a run: `driver`, `fork server`, `queue`, `host`, `device[0]` and so on."""
    found = {"driver": psutil.Process(driver)}
    for process in found["driver"].children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            name, command = process.name(), " ".join(process.cmdline())
            if name.startswith(("device[", "host")):
                found[name] = process
            elif "transfer_queue.remote.process" in command:
                found["queue"] = process
            elif "harness.runtime.fork_server" in command:
                found.setdefault("fork server", process)
    return found


def _iterations(results: Path, experiment: str) -> int:
    """The last one that is written down, and one more."""
    for path in (results / experiment).glob("*/seed=0"):
        with suppress(FileNotFoundError, ValueError):
            if lines := load_metrics(path):
                return int(lines[-1]["iteration"]) + 1
    return 0


def _is_due(fault: RealFault, results: Path, experiment: str, attempt: RunProcess) -> bool:
    if fault.at == 0:
        return attempt.seconds > _STARTED_S * fault.size
    return _beyond(results, experiment, fault.at)


def _beyond(results: Path, experiment: str, iteration: int) -> bool:
    return _iterations(results, experiment) > iteration


def _last_words(said: str) -> str:
    """The line that a run printed about its end, without what it always says."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if "the same command starts this seed again" not in line]
    return told[-1] if told else ""


def after(run: Path) -> list[str]:
    """Problems of a run that came to its end."""
    _, problems = finished_with(run)
    problems += check_conservation([read_run(run)]).problems
    problems += [f"{left.name} was left behind" for left in run.glob(".*.tmp")]
    return problems


def line_of(felt: Felt) -> str:
    """A line for the console: the fault, what happened, and the command that repeats it where a promise was broken."""
    fault = felt.fault
    seconds = "" if felt.seconds is None else f"; samples again after {felt.seconds:.1f} s"
    again = f"; cadence chaos seeds=0 first={fault.number} real=1" if felt.problems else ""
    return f"{fault.number}: {fault.schedule}, {fault.what}, {felt.whom}: {_told(felt)}{seconds}{again}"


def _told(felt: Felt) -> str:
    return "; ".join([*(felt.happened or ["went on"]), *(f"BROKEN: {problem}" for problem in felt.problems)])


def table(felt: Sequence[Felt]) -> str:
    """A table of Markdown, a row for each fault."""
    heads = ("fault", "schedule", "what", "whom", "after", "what happened", "samples again")
    rows = [
        [
            *(f"{one.fault.number}", one.fault.schedule, one.fault.what, one.whom, f"{one.at_s:.1f} s", _told(one)),
            "" if one.seconds is None else f"{one.seconds:.1f} s",
        ]
        for one in felt
    ]
    return markdown_table(heads, rows) + "\n"


def write_felt(felt: Sequence[Felt], folder: Path) -> list[Path]:
    """real.json and real.md."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "real.json", folder / "real.md"]
    write_text(paths[0], json.dumps([asdict(one) for one in felt], indent=1) + "\n")
    broken = sum(bool(one.problems) for one in felt)
    head = f"# Faults on real runs\n\n{len(felt)} faults, {broken} broke a promise; {os.cpu_count()} cores.\n\n"
    write_text(paths[1], head + table(felt))
    return paths


_SIZE = "64m"
_FILLER = ".filler"


@dataclass(frozen=True)
class Disk:
    """A mounted file system that can be filled."""

    folder: Path

    def fill(self) -> None:
        """Fill it to the last byte."""
        block = bytes(64 << 10)
        with (self.folder / _FILLER).open("wb", buffering=0) as file:
            while True:
                try:
                    if file.write(block) < len(block):
                        return
                except OSError:
                    return

    def empty(self) -> None:
        """Make room again."""
        (self.folder / _FILLER).unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk | None]:
    """None where this process may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or _run("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "chaos", str(folder)):
        yield None
        return
    try:
        yield Disk(folder)
    finally:
        _run("umount", "-l", str(folder))


def _run(*command: str) -> int:
    return subprocess.run(command, check=False, capture_output=True).returncode


_CHUNK, _DESCRIPTORS = 256 << 10, 64
_RELAY_POLL_S = 0.05
_SLOW_S = 0.5  # each chunk, at most
_SLOW_FOR_S = 10.0


class Told(msgspec.Struct, frozen=True):
    """An order to a relay, carried out once the file `go` is there. whom: `queue`, or how workers' names begin."""

    what: str
    whom: str
    size: float
    go: str


class Relay:
    """A relay between one process that listens and its clients, also for descriptors that travel with their bytes."""

    def __init__(self, told: Told, there: Address) -> None:
        self._told, self._there = told, there
        self._listener, self.address = listen(new_address())
        self._listener.setblocking(True)
        self._slow_until = 0.0
        self._torn = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        for work in (self._accept, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._torn.is_set() and self._told.what == "refused":
                client.close()
                continue
            server, place = client_socket(self._there)
            with suppress(OSError):
                server.connect(place)
            self._pairs.append((client, server))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _watch(self) -> None:
        while not Path(self._told.go).exists():
            time.sleep(_RELAY_POLL_S)
        if self._told.what == "delayed":
            self._slow_until = time.monotonic() + _SLOW_FOR_S
            return
        self._torn.set()  # the next chunk is torn
        if self._told.what == "refused":  # and whoever comes again
            for pair in self._pairs:
                _cut(*pair)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, _CHUNK, _DESCRIPTORS)
                if not data:
                    break
                if time.monotonic() < self._slow_until:
                    time.sleep(_SLOW_S * self._told.size)
                torn = self._torn.is_set()
                self._pass_on(target, data[: len(data) // 2] if torn else data, descriptors)
                if torn:
                    break
        _cut(source, target)

    def _pass_on(self, target: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
        try:
            sent = socket.send_fds(target, [data], list(descriptors)) if descriptors else 0
            target.sendall(data[sent:])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def relayed(told: Told) -> type[LocalRuntime]:
    """A runtime of this machine with relays before those whom it is about."""

    class RelayedRuntime(LocalRuntime):
        def start_queue(
            self, spec: QueueSpec, saves: Path | None = None, storage: Storage | None = None
        ) -> TransferQueue:
            queue = super().start_queue(spec, saves, storage)
            if told.whom != "queue":
                return queue
            assert isinstance(queue, RemoteQueue)
            address = Relay(told, queue.endpoint.address).address
            return RemoteQueue(replace(queue.endpoint, address=address))

        def reached_at(self, worker: str, address: Address) -> Address:
            return Relay(told, address).address if worker.startswith(told.whom) else address

    return RelayedRuntime
