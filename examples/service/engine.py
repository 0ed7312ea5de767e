"""An engine of somebody else: python engine.py <its name>

It loads the newest weights whenever there are some, and samples what the service gives it under them."""

import sys

import torch
from policy import Policy
from safetensors.torch import load
from service import get, post, put, receive, send


def main(name: str) -> None:
    policy, version = Policy(), -1
    torch.manual_seed(sum(name.encode()))
    while True:
        newest = get(f"versions?newer_than={version}&timeout_s={0 if version >= 0 else 30}")["trainer"]
        if newest is not None and newest > version:
            status, weights, _ = send(f"weights/{newest}", None, "")
            if status == 410:  # the trainer has been faster: there are newer ones
                continue
            version = newest
            policy.load_state_dict(load(weights))
            post(f"engines/{name}/version", version=version)
        if version < 0:
            continue
        status, lease, rows = receive("rollout", name, 64)
        if status == 410:
            return
        if status == 204:
            continue
        with torch.no_grad():
            responses = torch.distributions.Categorical(logits=policy(rows["prompt"])).sample()
            log_probs = policy.log_probs(rows["prompt"], responses)
        put(
            f"send_experience_data?lease={lease}", {"rows": rows["rows"], "response": responses, "log_probs": log_probs}
        )


main(sys.argv[1])
