"""Moves policy weights from the training world to the engines."""
