"""What the user types: a file for each command, with a function `run`; heavy imports wait until it is called."""
