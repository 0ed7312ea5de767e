"""The parts of the gate, in its order; a file each, with `run(setting)`, which yields a `Check` after each thing."""

from harness.acceptance.gpu_gate.runner import Part

_HERE = "harness.acceptance.gpu_gate.parts"

PARTS = (
    Part("device", "versions, and what the device reaches bare", f"{_HERE}.device", 120),
    Part("worlds", "process groups of what is there", f"{_HERE}.worlds", 240),
    Part("kernels", "sampling, log-probabilities, attention and losses against float64", f"{_HERE}.kernels", 240),
    Part("training", "training steps, and their memory", f"{_HERE}.training", 480),
    Part("rollout", "the embedded engine against the CPU, and its speed", f"{_HERE}.rollout", 300),
    Part("weights", "every way that weights travel, and its bandwidth", f"{_HERE}.weights", 300),
    Part("engines", "the other engines, where they are installed", f"{_HERE}.engines", 590),
    Part("jobs", "whole jobs under every schedule that fits", f"{_HERE}.jobs", 590),
    Part("profile", "times of this device, and costs fitted to them", f"{_HERE}.profile", 590),
)
