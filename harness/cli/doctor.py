"""`make doctor`: is this machine fit for the main job, and if not? With settings: what lies on each device of a job."""

import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console

from harness.config.machine import installed, this_machine
from harness.cost_model.host_memory import HostMemory
from harness.metrics.formatting import plural, say
from harness.metrics.tables import Table
from harness.runtime.runtime import cluster_address

_GIB = 1 << 30
_NEEDED = ("torch", "transformers", "mlflow", "hydra-core", "pyarrow", "matplotlib")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `meaning` says what follows from it, where anything does."""

    grade: Literal["ok", "note", "bad"]
    what: str
    found: str
    meaning: str = ""


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Look at this machine and say what each missing thing means, or with settings plan the job's memory. Exit code 1
    if the main job cannot run, or its devices cannot hold it."""
    if arguments:
        from harness.config.compose import compose_job, refuse_unread

        of_any = [argument for argument in arguments if not argument.startswith(("schedule=", "schedule."))]
        refuse_unread(of_any, compose_job(of_any))
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("schedule=")]
    if arguments and not (set(named) - {"all"}):
        return _every_schedule([each for each in arguments if not each.startswith("schedule=")], console)
    if arguments:
        return _memory_of(arguments, console)
    findings = examine(results)
    for finding in findings:
        mark, style = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("missing", "red")}[finding.grade]
        console.print(f"[{style}]{mark:>8}[/]  {finding.what}: {finding.found}", highlight=False)
        if finding.meaning:
            say(console, f"          {finding.meaning}", "dim")
    return 1 if any(finding.grade == "bad" for finding in findings) else 0


def _every_schedule(arguments: Sequence[str], console: Console) -> int:
    """Print, where no schedule is named, a row for each. Exit code 1 if none is accepted."""
    from harness.planner.memory import COLUMNS, every_schedule

    made = every_schedule(arguments)
    console.print(Table(" ".join(arguments), COLUMNS, made))
    return 0 if any(cells[COLUMNS.index("a real run")] == "yes" for cells in made) else 1


def _memory_of(arguments: Sequence[str], console: Console) -> int:
    from harness.planner.memory import planned_memory, rows  # reads all settings, which this machine's check does not

    found = planned_memory(arguments)
    config, machine, plan = found.config, found.machine, found.plan
    memory, node = machine.gpu_bytes / _GIB, "" if machine.nodes == 1 else f" in {machine.nodes} nodes"
    say(
        console,
        f"{config.schedule.name}, {config.model.name} on {config.cluster.devices} of {machine.gpus} x {memory:.1f} GiB"
        f"{node}, of which {plan.there / _GIB:.1f} may be used; samples of up to {found.lengths.sample:,} tokens"
        f"{', as they are simulated: max_tokens= says otherwise' * found.as_simulated}",
        "bold",
    )
    for line in found.messages:
        say(console, line)
    for pool in plan.pools:
        lines = [(what, *("" if cell is None else f"{cell:.1f}" for cell in cells)) for what, cells in rows(pool)]
        lines.append(("in all", *(f"{pool.of(phase) / _GIB:.1f}" for phase in pool.phases)))
        title = f"{pool.name}: {plural(pool.devices, 'device')}, GiB on each"
        console.print(Table(title, ("what", *pool.phases), lines))
    if plan.host is not None:
        console.print(_host_table(plan.host))
    fullest = plan.fullest
    say(
        console,
        f"{'fits' if plan.fits else 'does not fit'}: at most {fullest.peak / _GIB:.1f} of {plan.there / _GIB:.1f} GiB, "
        f"on {fullest.name} in {fullest.peak_phase}{'' if plan.hosts_fit else '; the host has too little'}",
        "green" if plan.fits else "red",
    )
    if not plan.fits:
        fixes = ", or ".join(found.fixes) or "more or larger devices, as in device=h200"
        say(console, f"use {fixes}")
    return 0 if plan.fits else 1


def _host_table(host: HostMemory) -> Table:
    items = {item.what: item.bytes for item in host.items} | {"in all": host.everything, "may be used": host.there}
    title = f"the fullest host, of {plural(host.devices, 'device')}, GiB"
    return Table(title, ("what", "at most"), [(what, f"{size / _GIB:.1f}") for what, size in items.items()])


def examine(results: Path) -> list[Finding]:
    """All findings, the basic ones first."""
    return [
        _python(),
        _cores(),
        _memory(),
        _shared_memory(),
        _gpus(),
        *_packages(),
        _ray(),
        _ports(),
        _writable(results),
    ]


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("ok" if good else "bad", "python", found, "" if good else "Cadence needs Python 3.11 or 3.12")


def _cores() -> Finding:
    cores = this_machine().cores
    meaning = (
        "" if cores >= 2 else "the default split of fully_async needs 2; use schedule=colocate_sync cluster.devices=1"
    )
    return Finding("ok" if cores >= 2 else "note", "cores", str(cores), meaning)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    free = memory.available / _GIB
    meaning = "" if free >= 2 else "the main job's processes take about 1 GiB together; close something"
    found = f"{memory.total / _GIB:.0f} GiB, {free:.0f} GiB free"
    return Finding("ok" if free >= 2 else "bad", "memory", found, meaning)


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("note", "shared memory", "no /dev/shm", "transport `ipc` uses the disk instead, NCCL fails")
    free = shutil.disk_usage("/dev/shm").free / _GIB
    meaning = "" if free >= 2 else "transport `ipc`, and NCCL between GPUs, keep their buffers there"
    return Finding("ok" if free >= 2 else "note", "shared memory", f"{free:.1f} GiB free in /dev/shm", meaning)


def _gpus() -> Finding:
    machine = this_machine()
    if machine.gpus:
        meaning = "instances of divided GPUs (MIG): no job spans two of them" if machine.divided else ""
        return Finding("ok", "GPUs", f"{machine.gpus} with {machine.gpu_bytes / _GIB:.0f} GiB", meaning)
    return Finding(
        "note", "GPUs", "none", "model=tiny runs on cores; larger models need GPUs, and are simulated without"
    )


def _packages() -> list[Finding]:
    needed = [(name, installed(name)) for name in _NEEDED]
    return [
        Finding("ok", name, found)
        if found
        else Finding("bad", name, "not installed", f"install it beside Cadence: pip install {name}")
        for name, found in needed
    ]


def _ray() -> Finding:
    """Finding on Ray, which this machine alone does not need."""
    address, found = cluster_address(), installed("ray")
    if address and not found:
        return Finding(
            "bad", "ray", "not installed", f"RAY_ADDRESS={address} names a cluster: unset it, or install ray"
        )
    meaning = f"workers run on the cluster at RAY_ADDRESS={address}" if address else ""
    return Finding("ok", "ray", found or "not installed, and not needed without a cluster", meaning)


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    except OSError as error:
        return Finding("bad", "ports", str(error), "torch.distributed meets on loopback ports; allow them")
    return Finding("ok", "ports", f"loopback gives some (tried {port})")


def _writable(results: Path) -> Finding:
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        return Finding("bad", "results", str(error), "runs write there; fix its owner, or set CADENCE_RESULTS")
    return Finding("ok", "results", f"{results}/ can be written")
