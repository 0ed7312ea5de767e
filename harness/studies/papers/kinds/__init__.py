"""How paper experiments are run, a file for each kind, each with `run(experiment, surroundings) -> Result`."""
