"""A trainer of somebody else, plain PyTorch: python trainer.py <batches> <max_staleness> <engine> ...

REINFORCE with the mean of a group as its baseline and truncated importance weights. The schedule is in `main`: prompts
of the next batches are admitted before this one is trained, as far as the staleness that the service bounds."""

import math
import sys

import torch
from policy import LENGTH, TOKENS, Policy
from service import get, post, put, receive

GROUPS, GROUP = 16, 8
LONGEST_WAITS = 10


def main(batches: int, max_staleness: float, engines: list[str]) -> None:
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.2)
    post(
        "init_engines",
        columns={
            "prompt": {"dtype": "int64"},
            "response": {"dtype": "int64", "shape": [LENGTH]},
            "log_probs": {"dtype": "float32", "shape": [LENGTH]},
        },
        tasks={
            "rollout": {"reads": ["prompt"], "writes": ["response", "log_probs"], "lease_s": 60.0},
            "train": {"reads": ["prompt", "response", "log_probs"], "whole_groups": True},
        },
        engines=engines,
        batch_groups=GROUPS,
        group_size=GROUP,
        max_staleness=max_staleness,
    )
    put("sync_actor_model?version=0", policy.state_dict())
    draws, loaded = torch.Generator().manual_seed(0), 0
    for batch in range(batches):
        while loaded < min(batches, batch + 1 + math.ceil(max_staleness)):
            prompts = torch.randint(TOKENS, (GROUPS,), generator=draws).repeat_interleave(GROUP)
            loaded = put("load_prompt_data", {"prompt": prompts})["batch"] + 1
        post("admit", below=loaded * GROUPS)
        reward = train(policy, optimizer)
        put(f"sync_actor_model?version={batch + 1}", policy.state_dict())
        print(f"batch {batch}: reward {reward:.3f}", flush=True)
    post("close")
    print(get("ledger"))


def train(policy: Policy, optimizer: torch.optim.Optimizer) -> float:
    """One step on the batch of this version; its mean reward."""
    rewards, done, waits = 0.0, 0, 0
    while done < GROUPS * GROUP:
        status, _, rows = receive("train", "trainer", GROUPS * GROUP, minimum=GROUP)
        if status != 200:
            waits += 1
            if waits == LONGEST_WAITS:
                raise SystemExit(f"nothing of this batch came in {LONGEST_WAITS} calls of half a minute: no engine?")
            continue
        right = (rows["response"] == rows["prompt"][:, None]).float().mean(-1)
        advantages = (right.view(-1, GROUP) - right.view(-1, GROUP).mean(-1, keepdim=True)).flatten()
        log_probs = policy.log_probs(rows["prompt"], rows["response"])
        weights = (log_probs.detach() - rows["log_probs"]).exp().clamp(max=2.0)
        loss = -(weights * advantages[:, None] * log_probs).sum() / (GROUPS * GROUP)
        loss.backward()
        rewards, done = rewards + right.sum().item(), done + len(right)
    optimizer.step()
    optimizer.zero_grad()
    return rewards / done


main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
