"""What HTTP costs: the same rows through the service (docs/service.md) and through the queue's own client.

    python -m tests.benchmarks.bench_service [--rounds 5] [--samples 1024] [--weights-mib 64]

One process drives each side in turn, whose server is a process of its own: it loads prompts, takes `--batch` of them as
an engine, sends responses of log-normal length (730 tokens in the mean; tokens and log-probs), and takes them as a
trainer. Prints samples/s of both, their ratio within a round, and bytes/s of weights sent and read back over HTTP.
"""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import httpx2
import numpy as np
from safetensors.numpy import save

from harness.service.tensors import decode, encode
from harness.transfer_queue.control.spec import QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.rows.columns import Column, ColumnSpec, Ragged

COLUMNS = {
    "prompt": ColumnSpec("int64", ragged=True),
    "response": ColumnSpec("int64", ragged=True),
    "log_probs": ColumnSpec("float32", ragged=True),
}
MADE = ("response", "log_probs")


def workload(samples: int) -> dict[str, Ragged]:
    """Prompts of 64 tokens, responses of 64 to 2,048."""
    draws = np.random.default_rng(0)
    lengths = draws.lognormal(np.log(600), 0.63, samples).clip(64, 2048).astype(np.int64)
    tokens = draws.integers(0, 1 << 17, lengths.sum())
    return {
        "prompt": Ragged(draws.integers(0, 1 << 17, 64 * samples), np.full(samples, 64)),
        "response": Ragged(tokens, lengths),
        "log_probs": Ragged(draws.standard_normal(lengths.sum()).astype(np.float32), lengths),
    }


class Native:
    def __init__(self, samples: int) -> None:
        tasks = {"rollout": TaskSpec(("prompt",), policy="ready"), "train": TaskSpec(tuple(COLUMNS))}
        self._process, self._samples, self._round = QueueProcess.start(QueueSpec(COLUMNS, tasks)), samples, 0
        self._queue = self._process.sync()

    def stream(self, data: dict[str, Ragged], batch: int) -> None:
        partition, rows = f"{self._round}", range(self._round * self._samples, (self._round + 1) * self._samples)
        self._queue.create_partition(partition, rows=rows)
        self._queue.put(partition, rows, {"prompt": data["prompt"]})
        for _ in range(self._samples // batch):
            given = self._queue.get("rollout", batch, partition=partition)
            self._queue.put(partition, given.rows, made(data, given.rows - rows[0]))
            assert self._queue.get("train", batch, partition=partition) is not None
        self._queue.clear(partition)
        self._round += 1

    def close(self) -> None:
        self._queue.close()
        self._process.stop()


class OverHttp:
    def __init__(self, samples: int, weights: bytes) -> None:
        self._weights = weights
        token = secrets.token_hex()
        command = [sys.executable, "-m", "harness", "serve", "port=0"]
        environment = os.environ | {"CADENCE_TOKEN": token, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        (url,) = (word for word in self._process.stdout.readline().split() if word.startswith("http:"))
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx2.Client(base_url=url, headers=headers, trust_env=False, timeout=120.0)
        self._samples, self._round = samples, 0
        tasks = {"rollout": {"reads": ["prompt"], "writes": list(MADE)}, "train": {"reads": list(COLUMNS)}}
        columns = {name: {"dtype": column.dtype, "ragged": True} for name, column in COLUMNS.items()}
        self._post("init_engines", columns=columns, tasks=tasks, engines=["a"], batch_groups=samples)
        self.sync()

    def stream(self, data: dict[str, Ragged], batch: int) -> None:
        self._send("load_prompt_data", _columns({"prompt": data["prompt"]}))
        self._post("admit", below=(self._round + 1) * self._samples)
        self._post("engines/a/version", version=self._round)
        for _ in range(self._samples // batch):
            given = self._post("recv_experience_data", task="rollout", reader="a", count=batch)
            rows, _ = decode(given.content)
            sent = encode(rows, made(data, rows - self._round * self._samples))
            self._send(f"send_experience_data?lease={given.headers['X-Lease']}", sent)
            decode(self._post("recv_experience_data", task="train", reader="trainer", count=batch).content)
        self._round += 1

    def sync(self) -> None:
        """Weights for the next round."""
        self._send(f"sync_actor_model?version={self._round}", self._weights)

    def weights(self) -> bytes:
        return self._http.get(f"weights/{self._round}").raise_for_status().content

    def _post(self, path: str, **fields: object) -> httpx2.Response:
        return self._http.post(path, json=fields).raise_for_status()

    def _send(self, path: str, body: bytes) -> None:
        self._http.post(path, content=body).raise_for_status()

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)


def made(data: dict[str, Ragged], rows: np.ndarray) -> dict[str, Column]:
    """What an engine sends of these."""
    return {name: data[name].take(rows) for name in MADE}


def _columns(columns: dict[str, Column]) -> bytes:
    """Without ids, which the service gives."""
    tensors: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        assert isinstance(column, Ragged)
        tensors |= {name: column.values, f"{name}.lengths": column.lengths}
    return save(tensors)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def figure(values: list[float], digits: int = 0) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--weights-mib", type=int, default=64)
    options = parser.parse_args()
    data = workload(options.samples)
    weights = save({"w": np.zeros(options.weights_mib << 20, np.uint8)})
    native, http = Native(options.samples), OverHttp(options.samples, weights)
    rates: dict[str, list[float]] = {"native": [], "http": []}
    sent, read = [], []
    try:
        for number in range(options.rounds + 1):  # the first does not count
            native_s = seconds(lambda: native.stream(data, options.batch))
            http_s = seconds(lambda: http.stream(data, options.batch))
            sync_s, load_s = seconds(http.sync), seconds(http.weights)
            if number:
                rates["native"].append(options.samples / native_s)
                rates["http"].append(options.samples / http_s)
                sent.append(options.weights_mib / sync_s)
                read.append(options.weights_mib / load_s)
    finally:
        native.close()
        http.close()
    ratios = [a / b for a, b in zip(rates["native"], rates["http"], strict=True)]
    print(f"native client: {figure(rates['native'])} samples/s")
    print(f"over HTTP: {figure(rates['http'])} samples/s")
    print(f"ratio: {figure(ratios, 1)}")
    print(f"weights of {options.weights_mib} MiB: sent at {figure(sent)} MiB/s, read at {figure(read)} MiB/s")


if __name__ == "__main__":
    main()
