"""The commands that the user types: in a file each, or a few to a file; heavy imports wait for the call."""
