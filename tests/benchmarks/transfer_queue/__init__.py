"""The TransferQueue against its public peer, on one workload: `python -m tests.benchmarks.transfer_queue`."""
