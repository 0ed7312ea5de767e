"""The commands that the user types: a file for each, with a function `run`; heavy imports wait until it is called."""
