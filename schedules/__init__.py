"""Schedules, one file each; `harness/config/registries.py` has their names."""

from schedules.base import Order, Schedule

__all__ = ["Order", "Schedule"]
