"""The service from Python's standard library and safetensors: what a trainer or an engine of your own needs of it."""

import json
import os
import urllib.error
import urllib.request
from typing import Any

import torch
from safetensors.torch import load, save

URL, TOKEN = os.environ["CADENCE_URL"], os.environ["CADENCE_TOKEN"]
_LONGEST_ANSWER_S = 90.0  # the service answers a call that waits after a minute at most


def get(path: str) -> dict[str, Any]:
    return json.loads(send(path, None, "application/json")[1])


def post(path: str, **fields: Any) -> dict[str, Any]:
    return json.loads(send(path, json.dumps(fields).encode(), "application/json")[1])


def put(path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """POST tensors."""
    return json.loads(send(path, save(tensors), "application/octet-stream")[1])


def receive(task: str, reader: str, count: int, minimum: int = 1) -> tuple[int, int, dict[str, torch.Tensor]]:
    """200, a lease and rows of a task; or 204: not yet, or there are newer weights; or 410: nothing more."""
    fields = {"task": task, "reader": reader, "count": count, "minimum": minimum}
    status, body, headers = send("recv_experience_data", json.dumps(fields).encode(), "application/json")
    return (200, int(headers["X-Lease"]), load(body)) if status == 200 else (status, -1, {})


def send(path: str, body: bytes | None, kind: str) -> tuple[int, bytes, Any]:
    """POST, or GET without a body: status, answer, headers. 410: nothing more, or weights that newer ones replaced."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
    request = urllib.request.Request(f"{URL}/{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=_LONGEST_ANSWER_S) as got:
            return got.status, got.read(), got.headers
    except urllib.error.HTTPError as refused:
        if refused.code == 410:
            return 410, b"", refused.headers
        raise SystemExit(f"{path}: {refused.read().decode()}") from None
