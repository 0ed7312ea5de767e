"""The parts of the gate, in its order; a file each, with `run(setting)`, which yields a `Check` after each thing."""

from harness.acceptance.gpu_gate.runner import GatePart

_HERE = "harness.acceptance.gpu_gate.parts"

PARTS = (
    GatePart("device", "versions, and what the device reaches bare", f"{_HERE}.device", 120),
    GatePart("worlds", "process groups of what is there", f"{_HERE}.worlds", 240),
    GatePart("kernels", "sampling, log-probabilities, attention and losses against float64", f"{_HERE}.kernels", 240),
    GatePart("training", "training steps, and their memory", f"{_HERE}.training", 480),
    GatePart("rollout", "the embedded engine against the CPU, and its speed", f"{_HERE}.rollout", 300),
    GatePart("weights", "every way that weights travel, and its bandwidth", f"{_HERE}.weights", 300),
    GatePart("engines", "the other engines, where they are installed", f"{_HERE}.engines", 590),
    GatePart("jobs", "whole jobs under every schedule that fits", f"{_HERE}.jobs", 590),
    GatePart("profile", "times of this device, and costs fitted to them", f"{_HERE}.profile", 590),
)
