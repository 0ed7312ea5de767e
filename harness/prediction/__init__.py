"""Published tables: read, calibrated on some of their rows, and predicted in the others by running schedule files."""
