"""The queue in a folder: saved while it is in use, and loaded by another process."""
