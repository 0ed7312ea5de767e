"""Runs across hosts of a cluster: three namespaces of this machine, each with an address and shared memory of its own,
and Ray, with its token, between them."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.comparison.promises import read_finished
from harness.config.registries import find
from tests.support.hosts import Host, RayHosts, ray_hosts, why_not
from tests.support.invariants import check_run
from tests.support.project import ROOT
from tests.support.real_runs import BARE, STARTED_WITHIN_S, command, environment, lines

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(3000),  # each wait has a limit of its own
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

RUN_TIMEOUT_S = 1500  # several of STARTED_WITHIN_S
LEFT_FOR_S = 60
ITERATIONS = 3
SMALL = (
    f"backend=real model.warm_start=false smoke=true save_weights=false loggers=[] {BARE} iterations={ITERATIONS} "
    f"cluster.wait_timeout_s={STARTED_WITHIN_S}"
)
WEIGHTS = 125_000 * 4
"""Bytes of the tiny model's, and few more."""

TRAINING_APART = ("cluster.devices=2",)
ENGINES_APART = ("cluster.devices=3", "schedule.split.rollout=2")
RANKS_APART = ("cluster.devices=3", "schedule.split.rollout=1")
SMALL_BATCHES = ("algorithm.batch_groups=4", "algorithm.micro_batch_groups=2", "algorithm.group_size=4")
SLOW_SAMPLES = ("task=lookup", "task.latency_s=1", "engine.slots=8", *SMALL_BATCHES)
"""So that an iteration takes seconds, by waiting: on a machine that computes much else not many more."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    """A device on each host."""
    with ray_hosts(3, cpus=1) as running:
        yield running


class Driver:
    """`make bench` on the first host."""

    def __init__(self, cluster: RayHosts, results: Path, *settings: str) -> None:
        self.results, self.output, self._host = results, results / "output.txt", cluster.hosts[1]
        arguments = command("experiment=hosts", "seeds=[0]", *SMALL.split(), *settings)
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                self._host.command(*arguments),
                cwd=ROOT,
                env=environment(results) | cluster.environment | {"RAY_ADDRESS": cluster.address},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def folder(self) -> Path:
        return next(self.results.glob("hosts/*/seed=0"))

    def iterations(self) -> int:
        return lines(self.results, "hosts")

    def wait_until(self, true: Callable[[], bool]) -> None:
        """While it runs."""
        until = time.monotonic() + RUN_TIMEOUT_S
        while not true():
            assert self.process.poll() is None and time.monotonic() < until, self.said[-8000:]
            time.sleep(0.05)

    def terminate(self) -> None:
        """By SIGTERM, to the oldest process of its command."""
        self._host.run("pkill -TERM -o -f '[e]xperiment=hosts'")

    def ended(self) -> int:
        """Its exit status. Fails, with what it said, where it does not end, and leaves none to the next test."""
        try:
            return self.process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._host.run("pkill -KILL -f '[e]xperiment=hosts'")
            self.process.wait(RUN_TIMEOUT_S)
            pytest.fail(f"it has not ended after {RUN_TIMEOUT_S} s, and said {self.said[-8000:]}")

    def check_finished(self) -> None:
        assert self.ended() == 0, self.said[-8000:]
        check_run(read_finished(self.folder))


@pytest.mark.parametrize("schedule", ["colocate_sync", "separated_sync", "half_step"])
def test_a_schedule_of_each_way_of_weights_keeps_its_promises_with_a_device_on_each_host(
    schedule: str, cluster: RayHosts, tmp_path: Path
) -> None:
    """None; to all engines at once; or by way of host memory. The others are in the tests below. Neither
    names of Python's, which Ray pickles, nor that of the group that brings weights are heard between hosts."""
    colocated = find("schedule", schedule).colocated
    before = sum(cluster.hosts.sent().values())
    with cluster.hosts.overheard("WorkerActor", "weights of", "in clear") as heard:
        cluster.hosts[1].run(f"bash -c 'echo in clear > /dev/udp/{cluster.hosts[2].address}/9'")
        Driver(
            cluster, tmp_path, f"schedule={schedule}", *(TRAINING_APART if colocated else ENGINES_APART)
        ).check_finished()
    sent = sum(cluster.hosts.sent().values()) - before
    assert sent > (0 if colocated else 2 * WEIGHTS), "each engine had one version at least"
    assert heard == ["in clear"]


_LISTENING = """
import psutil, sys

for process in psutil.process_iter():
    if process.cmdline()[:1] == ["ray::WorkerActor"]:
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and not one.laddr.ip.startswith("127."):
                print(f"{sys.argv[1] if one.laddr.ip == '::' else one.laddr.ip}:{one.laddr.port}")
"""
_TRIES = """
import socket, ssl, sys

context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    try:
        stranger = socket.create_connection((host, int(port)), timeout=0.3)
    except TimeoutError:
        print("dropped")
        continue
    stranger.settimeout(5)
    print(context.wrap_socket(stranger).version())
"""


def test_between_hosts_listeners_speak_tls_or_drop_all_once_groups_formed(cluster: RayHosts, tmp_path: Path) -> None:
    """The run's own listeners and Ray's; Gloo's."""
    driver = Driver(cluster, tmp_path, "schedule=one_step_off", "iterations=1000", *RANKS_APART)
    driver.wait_until(lambda: driver.iterations() >= 2)
    places = [place for host in cluster.hosts for place in _run_python(host, _LISTENING, host.address)]
    heard = _run_python(cluster.hosts[2], _TRIES, *places)
    driver.terminate()
    assert driver.ended() == 143, driver.said[-8000:]
    assert len(heard) == len(places) and set(heard) == {"TLSv1.3", "dropped"}, [*zip(places, heard, strict=False)]


def _run_python(host: Host, script: str, *arguments: str) -> list[str]:
    return host.run(shlex.join([sys.executable, "-c", script, *arguments])).split()


def test_what_workers_print_on_hosts_without_the_results_is_brought_there(cluster: RayHosts, tmp_path: Path) -> None:
    """When one of them dies, and at the end: of a run that is broken off, so that it does not end before that one is
    back."""
    results = results_of_the_first_alone(cluster, tmp_path)
    driver = Driver(cluster, results, "schedule=fully_async", "iterations=1000", *ENGINES_APART, *SLOW_SAMPLES)
    driver.wait_until(lambda: driver.iterations() >= 2)
    log = next(path for path in cluster.folder.glob("host?/cadence-*.log") if path.read_text().startswith("rollout"))
    began = log.read_text().splitlines()[0]
    cluster.hosts[int(log.parent.name.removeprefix("host"))].run("pkill -KILL -f ^ray::WorkerActor")
    driver.wait_until(lambda: "at work again" in driver.said)
    driver.terminate()
    assert driver.ended() == 143, driver.said[-8000:]
    said = [path.read_text() for path in (driver.folder / "logs").glob("device*.log")]
    assert all(any(f" on {host.address}\n" in text for text in said) for host in cluster.hosts)
    assert [text.count(began) for text in said if began in text] == [2]
    assert not list(cluster.folder.glob("host?/cadence-*.log"))


def test_ranks_that_do_not_see_where_checkpoints_go_are_named_in_one_line(cluster: RayHosts, tmp_path: Path) -> None:
    """Also where they have a folder of this name, as from a run that was driven there."""
    results = results_of_the_first_alone(cluster, tmp_path)
    for _ in range(2):
        driver = Driver(cluster, results, "schedule=one_step_off", "checkpoint.every=1", *RANKS_APART)
        assert driver.ended() == 2
        (line,) = [line for line in driver.said.splitlines() if f"has no {driver.folder}, or may not write it" in line]
        assert line.startswith("device[") and "Traceback" not in driver.said
        for host in list(cluster.hosts)[1:]:
            host.run(f"mkdir -p '{driver.folder}/logs'")


def test_an_engine_whose_host_is_cut_off_comes_back_and_the_run_goes_on(cluster: RayHosts, tmp_path: Path) -> None:
    """Ended by nobody, the engine that was given up is there again for a while, and must not take samples. All of it
    while little a second leaves the driver's host."""
    with cluster.hosts[1].limited(megabits=20):
        driver = Driver(cluster, tmp_path, "schedule=fully_async", "iterations=40", *ENGINES_APART, *SLOW_SAMPLES)
        driver.wait_until(lambda: driver.iterations() >= 2)
        engine, host = next(
            (role, cluster.hosts[number])
            for role, number in places(driver.folder).items()
            if role.startswith("rollout") and number > 1
        )
        cluster.hosts.cut_off(host.number)
        before = driver.iterations()
        driver.wait_until(lambda: driver.iterations() >= before + 3)
        cluster.hosts.bring_back(host.number)
        driver.wait_until(lambda: driver.iterations() >= before + 4)
        cluster.start_again(host.number)
        driver.check_finished()
    assert f"lost {engine}" in driver.said and f"(on {host.address}); started again" in driver.said


def test_a_ranks_host_is_lost_then_the_drivers_and_the_run_ends_whole(cluster: RayHosts, tmp_path: Path) -> None:
    """The first takes all roles back to a checkpoint. What the second leaves on other hosts ends by itself, though
    Ray's head is lost with it; the same command goes on. The last test of this cluster."""
    hosts = cluster.hosts
    settings = ("schedule=one_step_off", "iterations=10", "checkpoint.every=1", "cluster.heartbeat_timeout_s=10")
    settings += (*RANKS_APART, *SLOW_SAMPLES)
    driver = Driver(cluster, tmp_path, *settings)
    driver.wait_until(lambda: driver.iterations() >= 3)
    rank = next(number for role, number in places(driver.folder).items() if role.startswith("actor") and number > 1)
    hosts.cut_off(rank)
    driver.wait_until(lambda: "going on from version" in driver.said)
    hosts.bring_back(rank)
    cluster.start_again(rank)
    driver.wait_until(lambda: "all went back to version" in driver.said)
    hosts.cut_off(1)
    hosts[1].end_processes()
    assert driver.ended() != 0
    until = time.monotonic() + LEFT_FOR_S
    while workers := [line for host in hosts for line in host.processes() if line == "ray::WorkerActor"]:
        assert time.monotonic() < until, workers
        time.sleep(0.5)
    hosts.bring_back(1)
    for host in hosts:
        cluster.start_again(host.number)
    again = Driver(cluster, tmp_path, *settings)
    again.check_finished()
    assert "going on from version" in again.said


def results_of_the_first_alone(cluster: RayHosts, folder: Path) -> Path:
    """A folder for results that the others have, too, each its own."""
    results = folder / "results"
    results.mkdir()
    for host in list(cluster.hosts)[1:]:
        host.run(f"mount -t tmpfs none '{results}'")
    return results


def places(folder: Path) -> dict[str, int]:
    """The number of its host, by the role that is alone in its worker."""
    first = [path.read_text().splitlines()[0] for path in (folder / "logs").glob("device*.log")]
    return {role: int(address.rpartition(".")[2]) for role, _, address in (line.partition(" on ") for line in first)}
