"""The queue in a folder: a snapshot of it, and every call that changed it since."""
