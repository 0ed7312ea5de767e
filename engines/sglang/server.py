"""SGLang servers: one that is started here, watched and stopped, or one that somebody else runs."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from types import MappingProxyType

import torch

from engines.loading import write_model
from engines.requests import Served
from engines.sglang.options import SOCKET, TOKEN, URL, Options, interpreter, servers
from engines.torch.lora import base_of
from engines.torch.model import float32_head, model_shape
from harness.protocols import EngineDied
from harness.rpc.children import kill_group
from harness.rpc.process_id import descendants

_LAUNCHER = Path(__file__).with_name("launcher.py")
_KILL_TIMEOUT_S = 30.0
_SPARE_TOKENS = 8
"""The server wants some room beyond prompt and response."""
_CPU_CACHE_TOKENS = 1 << 16
"""Tokens of the cache at most, where no plan of memory says more."""
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000  # above those of most services, and of Ray's workers


def open_server(served: Served, name: str, owner: str, options: Options) -> LocalServer | RemoteServer:
    """The server of engine `name`: the one that the environment names, else one that is started.

    Raises ValueError if it names servers, but none for this engine; FileNotFoundError as `interpreter`.
    """
    urls = servers()
    if not urls:
        return LocalServer(served, owner, options)
    if not name.isdecimal() or int(name) >= len(urls):
        raise ValueError(f"{URL}={','.join(urls)}: {len(urls)} servers, none for {owner}; name one for each engine")
    return RemoteServer(urls[int(name)], os.environ.get(TOKEN, ""))


class RemoteServer:
    """A server that was running before and will be afterwards. Its weights are anybody's, until it was given some."""

    process_ids: tuple[int, ...] = ()
    holds: Mapping[str, float] = MappingProxyType({})
    """Bytes on the device of what it gives back when it sleeps: not known of a server of others."""
    has_initial_weights = False
    base = None
    receivers = 0
    """Processes that can receive from the trainer: where they run is not known, nor what they have imported."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token

    def has_started(self) -> None:
        """Do nothing: it had started before this process came."""

    def require_alive(self) -> None:
        """Do nothing: only a request can tell."""

    def stop(self) -> None:
        """Do nothing: it was not started here."""


class LocalServer:
    """A server for one engine, on loopback, with a token that only this process knows. It ends with this object's
    process, however that ends, and with `stop`."""

    has_initial_weights = True

    def __init__(self, served: Served, owner: str, options: Options) -> None:
        """Returns at once; the server needs half a minute.

        Raises FileNotFoundError where there is no interpreter for it.
        """
        self.owner, self.token, self.receivers = owner, secrets.token_urlsafe(32), served.tensor_parallel
        self.holds: Mapping[str, float] = _holds(served, options)
        self._folder = tempfile.TemporaryDirectory(prefix="cadence-sglang-")
        folder = Path(self._folder.name)
        (folder / "model").mkdir()
        write_model(served.model, folder / "model")
        self.base = base_of(served.model, folder / "model")
        """The base of adapters, if there are any: then the model's folder stays."""
        with (folder / "server.log").open("wb") as log, bound_socket() as bound:
            port = int(bound.getsockname()[1])
            self.url = f"http://127.0.0.1:{port}"
            self._log = (folder / "server.log").open("rb")
            self._process = subprocess.Popen(
                [str(interpreter()), "-P", str(_LAUNCHER), *_flags(served, folder / "model", port, options)],
                stdin=subprocess.PIPE,  # held open for as long as the server may live: see launcher.py
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(served, self.token) | {SOCKET: str(bound.fileno())},
                pass_fds=(bound.fileno(),),
                start_new_session=True,
            )

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The server's processes, the one that answers first."""
        return (self._process.pid, *(child.number for child in descendants(self._process.pid)))

    def has_started(self) -> None:
        """Remove the model's folder, which the server has read, if adapters do not need it: nothing stays on disk,
        however this process ends. Its log is still open."""
        if self.base is None:
            self._folder.cleanup()

    def require_alive(self) -> None:
        """Raises EngineDied, with the end of its log, if the server is gone."""
        if (code := self._process.poll()) is not None:
            raise EngineDied(
                f"{self.owner}: its SGLang server (process {self._process.pid}) ended with exit code {code}; its log "
                f"ends:\n{self._last_words()}"
            )

    def stop(self) -> None:
        """Kill the server with all of its processes. Returns when it is gone."""
        kill_group(self._process.pid)
        self._process.wait(_KILL_TIMEOUT_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._log.close()
        self._folder.cleanup()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-12:]).replace(self.token, "***")


def _flags(served: Served, folder: Path, port: int, options: Options) -> list[str]:
    """Command-line flags of the server; what the options leave open is chosen here for a CPU, and by SGLang for a
    GPU."""
    model, cpu = served.model, served.device.type == "cpu"
    flags: dict[str, object] = {
        "--model-path": folder,
        "--host": "127.0.0.1",
        "--port": port,
        "--device": served.device.type,
        "--tensor-parallel-size": served.tensor_parallel,
        "--dtype": options.dtype or str(model.dtype).removeprefix("torch."),
        "--context-length": served.longest + _SPARE_TOKENS,
        "--max-running-requests": served.slots,
        "--weight-version": 0,
        "--stream-interval": options.stream_interval,
        "--sampling-mask-max-tokens": model.config.vocab_size,
        "--log-level": options.log_level,
    }
    if cpu:
        flags |= {"--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
    if (tokens := _cache_tokens(served, options)) is not None:
        flags["--max-total-tokens"] = tokens
    chosen = {
        "--attention-backend": options.attention_backend,
        "--sampling-backend": options.sampling_backend,
        "--mem-fraction-static": options.mem_fraction_static,
        "--chunked-prefill-size": options.chunked_prefill_size,
    }
    flags |= {flag: value for flag, value in chosen.items() if value is not None}
    if cpu or not options.cuda_graph:
        flags |= {"--cuda-graph-backend-decode": "disabled", "--cuda-graph-backend-prefill": "disabled"}
    deterministic = cpu if options.deterministic is None else options.deterministic
    overlap = not cpu if options.overlap_schedule is None else options.overlap_schedule
    switches = {
        "--skip-tokenizer-init": True,
        "--skip-server-warmup": True,
        "--enable-deterministic-inference": deterministic,
        "--enable-return-routed-experts": served.routes,
        "--enable-fp32-lm-head": float32_head(model),
        "--disable-overlap-schedule": not overlap,
        "--enable-memory-saver": options.memory_saver and not cpu,
        "--enable-weights-cpu-backup": options.memory_saver and not cpu,  # or an engine that slept has none
    }
    return [*(f"{flag}={value}" for flag, value in flags.items()), *(flag for flag, on in switches.items() if on)]


def _cache_tokens(served: Served, options: Options) -> int | None:
    """Tokens of the server's cache; None where SGLang takes what is free of a GPU."""
    if served.device.type != "cpu" and options.max_total_tokens is None:
        return None
    longest = served.longest + _SPARE_TOKENS
    return max(longest, min(served.slots * longest, options.max_total_tokens or _CPU_CACHE_TOKENS))


def _holds(served: Served, options: Options) -> dict[str, float]:
    """Bytes on each device of what the server gives back when it sleeps."""
    model, devices = served.model, served.tensor_parallel
    itemsize = (model.dtype if options.dtype is None else getattr(torch, options.dtype)).itemsize
    shape = model_shape(model)
    token = 2 * shape["layers"] * -(-shape["kv_heads"] // devices) * shape["head_dim"] * itemsize
    weights = sum(parameter.numel() for parameter in model.parameters()) * itemsize / devices
    return {"weights": weights, "kv_cache": token * (_cache_tokens(served, options) or 0)}


def _environment(served: Served, token: str) -> dict[str, str]:
    """Environment of the server, which holds the token: other users can read command lines."""
    own = {
        TOKEN: token,
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",  # as -P, for the processes that the server spawns
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",  # this end lets go of idle connections; see client.py
    }
    if served.device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        own |= {
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
                str(cores[rank % len(cores)]) for rank in range(served.tensor_parallel)
            ),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes longer than a small job
        }
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return inherited | own


def bound_socket() -> socket.socket:
    """A socket of loopback for the server, which listens half a minute later: nobody else gets its port meanwhile, nor,
    unasked, one of the next thousand, of which some servers take more. OSError where no port is free."""
    below = int(_KERNELS_PORTS.read_text().split()[0]) - 1000
    own = range(_FIRST_PORT, below)
    bound = socket.socket()
    for port in SystemRandom().sample(own, min(len(own), 100)):
        with suppress(OSError):
            bound.bind(("127.0.0.1", port))
            return bound
    bound.bind(("127.0.0.1", 0))
    return bound
