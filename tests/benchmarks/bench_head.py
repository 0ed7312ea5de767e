"""Log-probabilities and their gradients from hidden states, in chunks of logits and all at once, in CPU seconds.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_head [--model qwen0.5b] [--rows 2048] [--rounds 3]

The output layer of a model. `before`: chunks of the default, and gradients added up as soon as four of them wait.
"""

import argparse
import statistics
import time
from unittest import mock

import torch

from harness.config import TrainingConfig
from harness.config.compose import compose_job
from harness.cost_model.head_rows import HeadRows
from harness.rl.log_probs import head_log_probs

WHOLE = 1 << 40
SIZES = {f"{size >> 20} MiB": size for size in (TrainingConfig.logit_bytes, 256 << 20, 512 << 20, 1 << 30)}


def seconds(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, limit: int) -> float:
    hidden.grad = weight.grad = None
    started = time.process_time()
    head_log_probs(hidden, weight, tokens, logit_bytes=limit)[0].sum().backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen0.5b")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    model = compose_job([f"model={arguments.model}"]).model
    dtype, random = getattr(torch, arguments.dtype), torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, model.hidden, generator=random).mul(0.1).to(dtype).requires_grad_()
        for rows in (arguments.rows, model.vocabulary)
    )
    tokens = torch.randint(model.vocabulary, (arguments.rows,), generator=random)
    seconds(hidden, weight, tokens, TrainingConfig.logit_bytes)
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        whole = seconds(hidden, weight, tokens, WHOLE)
        for name, limit in SIZES.items():
            found.setdefault(name, []).append(seconds(hidden, weight, tokens, limit) / whole)
        with mock.patch.object(HeadRows, "product", _four_chunks):
            before = seconds(hidden, weight, tokens, TrainingConfig.logit_bytes)
        found.setdefault("before", []).append(before / whole)
        print(f"whole: {whole:.1f} s of CPU;", ", ".join(f"{name} {each[-1]:.3f}" for name, each in found.items()))
    for name, ratios in found.items():
        print(f"{name}: {statistics.median(ratios):.3f} of all at once ({min(ratios):.3f} to {max(ratios):.3f})")


def _four_chunks(rows: HeadRows, _: int) -> int:
    return rows.chunk * max(1, 4 * rows.limit // (rows.chunk * rows.columns * rows.itemsize))


if __name__ == "__main__":
    main()
