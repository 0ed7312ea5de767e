"""Studies of simulated runs: plans, predictions, published experiments, the table of schedules."""
