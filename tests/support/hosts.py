"""Several "hosts" on this machine: namespaces of the kernel's, each with an address, processes, shared memory and a
folder for temporary files of its own, joined by a bridge without a way out.

All processes of a host end with its first one, which ends with this process, and what they had goes with them: so
nothing is left behind, however a test ends.
"""

import functools
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from tests.support.certificates import certificate_in
from tests.support.project import ROOT

DEVICE = "eth0"
PORT = 6379
_CLONED = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
_MADE_WITHIN_S = 10.0
_RAY_WITHIN_S = 120.0
_SHARED_MEMORY = "300m"
_OBJECT_STORE = 80 << 20  # bytes; Ray wants 75 MiB


@functools.cache
def why_not() -> str | None:
    """What keeps this machine from having such hosts; None where it can."""
    try:
        with Hosts(1):
            return None
    except (OSError, subprocess.CalledProcessError, TimeoutError) as error:
        said = getattr(error, "stderr", None)
        return f"no hosts in namespaces can be made here: {said or error}".strip()


class Host:
    """One of them."""

    def __init__(self, number: int) -> None:
        self.number, self.name, self.address = number, f"host{number}", f"10.77.0.{number}"
        self._first = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *_CLONED, "sleep", "infinity"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._own = self._wait_for_namespaces()
        self.run(f"hostname {self.name}")
        self.run(f"mount -t tmpfs -o size={_SHARED_MEMORY},mode=1777 none /dev/shm")
        self.run("ip link set lo up")

    def command(self, *arguments: str) -> list[str]:
        """That runs these there."""
        return ["nsenter", "--target", str(self._own), "--net", "--mount", "--uts", "--pid", "--", *arguments]

    def run(self, script: str) -> str:
        """What a short script prints there. Raises CalledProcessError."""
        command = self.command("sh", "-ec", script)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_MADE_WITHIN_S).stdout

    def sent(self) -> int:
        """Bytes that have left it."""
        return int(self.run(f"cat /proc/net/dev | sed -n 's/ *{DEVICE}: *//p'").split()[8])

    @contextmanager
    def limited(self, megabits: int) -> Iterator[None]:
        """That it sends a second, meanwhile."""
        self.run(f"tc qdisc add dev {DEVICE} root tbf rate {megabits}mbit burst 64kb latency 400ms")
        try:
            yield
        finally:
            self.run(f"tc qdisc delete dev {DEVICE} root")

    def processes(self) -> list[str]:
        """The command line of each."""
        return self.run("ps -eo args=").splitlines()

    def end_processes(self) -> None:
        """As when it is switched off: all, but the first."""
        subprocess.run(self.command("sh", "-c", "kill -9 -1"), check=False)

    def end(self) -> None:
        """All of its processes, and with them its namespaces."""
        self._first.kill()
        self._first.wait()
        self._first.stdout.close()

    @property
    def first(self) -> int:
        """Id of its first process, here."""
        return self._own

    def _wait_for_namespaces(self) -> int:
        until, children = time.monotonic() + _MADE_WITHIN_S, Path(f"/proc/{self._first.pid}/task/{self._first.pid}")
        while time.monotonic() < until:
            if self._first.poll() is not None:
                raise OSError(f"unshare: {self._first.stdout.read().strip()}")
            child = (children / "children").read_text().strip()
            if child and Path(f"/proc/{child}/comm").read_text() == "sleep\n":
                return int(child)
            time.sleep(0.01)
        raise TimeoutError(f"unshare made no namespaces within {_MADE_WITHIN_S} s")


class Hosts:
    """So many, from 1, and the bridge between them, which is a host of its own. As a context manager."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._stack = ExitStack()
        self._hosts: list[Host] = []

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number - 1]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Self:
        try:
            self._bridge = self._made(Host(0))
            self._bridge.run("ip link add bridge type bridge && ip link set bridge up")
            for number in range(1, self._count + 1):
                self._hosts.append(self._made(Host(number)))
                self._join(self._hosts[-1])
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def cut_off(self, number: int) -> None:
        """Nothing reaches this host, or leaves it, as if its cable were pulled."""
        self._bridge.run(f"ip link set port{number} down")

    def bring_back(self, number: int) -> None:
        self._bridge.run(f"ip link set port{number} up")

    @contextmanager
    def overheard(self, *words: str) -> Iterator[list[str]]:
        """Those of them that hosts say to each other in clear meanwhile; known once it is left."""
        heard: list[str] = []
        with _started(self._bridge, "tests.support.eavesdropper", *words) as listening:
            yield heard
            said, _ = listening.communicate(timeout=_MADE_WITHIN_S)
            heard += said.splitlines()

    def sent(self) -> dict[str, int]:
        """Bytes that have left each."""
        return {host.name: host.sent() for host in self}

    def _made(self, host: Host) -> Host:
        self._stack.callback(host.end)
        return host

    def _join(self, host: Host) -> None:
        port = f"port{host.number}"
        host.run(f"ip link add {port} type veth peer name {DEVICE}")
        subprocess.run(  # from here, where processes of both have their ids
            ["nsenter", f"--target={host.first}", "--net", "ip", "link", "set", port, "netns", str(self._bridge.first)],
            check=True,
            capture_output=True,
            text=True,
        )
        self._bridge.run(f"ip link set {port} master bridge up")
        host.run(
            f"ip address add {host.address}/24 dev {DEVICE} && ip link set {DEVICE} up"
            f" && ip route add default dev {DEVICE}"  # leads nowhere; by it a program knows its own address
        )


def _started(host: Host, module: str, *arguments: str) -> subprocess.Popen[str]:
    """There, and ready; it ends with its standard input."""
    process = subprocess.Popen(
        host.command(sys.executable, "-m", module, *arguments),
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # nsenter goes to another folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


class RayHosts:
    """Ray on such hosts: the head on the first. Its token and its certificate are in files that their processes are
    told of."""

    def __init__(self, hosts: Hosts, folder: Path, cpus: int) -> None:
        self.hosts, self.cpus, self.folder = hosts, cpus, folder
        self.address = f"{hosts[1].address}:{PORT}"
        self._token = folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        self._certificate, self._key = certificate_in(folder, *(host.address for host in hosts))
        self.start(1)
        for number in range(2, len(list(hosts)) + 1):
            self.start(number)

    def start(self, number: int) -> None:
        """Ray on this host, which is not running there."""
        host = self.hosts[number]
        head = ("--head", f"--port={PORT}", "--include-dashboard=false", "--include-log-monitor=false")
        limits = (f"--num-cpus={self.cpus}", "--num-gpus=0", f"--object-store-memory={_OBJECT_STORE}")
        temporary = self.folder / host.name
        temporary.mkdir(exist_ok=True)
        where = head if number == 1 else (f"--address={self.address}",)
        own = (f"--node-ip-address={host.address}", f"--temp-dir={temporary}", *limits, "--disable-usage-stats")
        started = subprocess.run(
            host.command(str(Path(sys.executable).with_name("ray")), "start", *where, *own),
            env=self.environment | {"TMPDIR": str(temporary)}, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_RAY_WITHIN_S, check=False,
        )  # fmt: skip
        assert started.returncode == 0, started.stdout + started.stderr

    def start_again(self, number: int) -> None:
        """After the end of all that runs on this host, as when it was switched off and on."""
        self.hosts[number].end_processes()
        self.start(number)

    @property
    def environment(self) -> dict[str, str]:
        """Of all that speaks to it."""
        return os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_KEY": str(self._key),
            "RAY_TLS_SERVER_CERT": str(self._certificate),
            "RAY_TLS_CA_CERT": str(self._certificate),
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
            "RAY_enable_metrics_collection": "0",
            "RAY_prestart_worker_first_driver": "0",
        }


@contextmanager
def ray_hosts(count: int, cpus: int) -> Iterator[RayHosts]:
    """Of a fresh folder whose path is short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="hosts", dir="/tmp") as folder, Hosts(count) as hosts:
        yield RayHosts(hosts, Path(folder), cpus)
