"""The parts of the gate; a file each, with `run(setting)`, which yields a `Check` after each thing."""
