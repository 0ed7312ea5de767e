"""Studies of simulated runs: published experiments, the table of schedules."""
