"""Plots of what runs wrote."""
