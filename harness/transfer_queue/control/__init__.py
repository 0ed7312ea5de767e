"""The control plane: which rows are ready, and who has them. Pure state machines, without I/O, waiting or a clock."""
