"""How fast is a simulation: 1,024 devices, 512 prompts x 16 responses, 20 iterations of `fully_async`, on one core?

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_simulation [settings ...]

Prints the processor's and the wall's seconds, microseconds a sample, and how much faster than the simulated time that
is. Target: 30 s.
"""

import argparse
import time

from harness.config.compose import compose_job
from harness.driver.session import simulate

JOB = (
    "schedule=fully_async model=qwen7b iterations=20 cluster.devices=1024 schedule.split.rollout=512 "
    "schedule.split.actor=256 schedule.split.actor_fwd=128 schedule.split.reference=128 algorithm.reference=true "
    "algorithm.batch_groups=512 algorithm.group_size=16 algorithm.micro_batch_groups=1"
).split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="more settings of the job, such as iterations=5")
    config = compose_job([*JOB, *parser.parse_args().settings])
    wall, processor = time.perf_counter(), time.process_time()
    recorder = simulate(config, 0)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    samples = len(recorder.samples())
    simulated = recorder.timeline.elapsed_window()[1]
    print(f"{samples:,} samples in {processor:.1f} s of one core ({wall:.1f} s of time; target 30 s)")
    print(f"{processor / samples * 1e6:.0f} microseconds a sample; {simulated:,.0f} s simulated")


if __name__ == "__main__":
    main()
