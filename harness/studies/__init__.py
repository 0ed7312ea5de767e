"""What is studied with simulated runs: plans, predictions, published experiments, the table of schedules."""
