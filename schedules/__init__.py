"""Every schedule, one file each. Adding one touches its file, its YAML under experiments/schedule/, and this dict."""

from schedules.base import Order, Schedule, Transport
from schedules.colocate_sync import ColocateSync
from schedules.delayed_update import DelayedUpdate
from schedules.fully_async import FullyAsync
from schedules.half_step import HalfStep
from schedules.k_step_off import KStepOff
from schedules.one_step_off import OneStepOff
from schedules.separated_sync import SeparatedSync

__all__ = [
    "SCHEDULES",
    "ColocateSync",
    "DelayedUpdate",
    "FullyAsync",
    "HalfStep",
    "KStepOff",
    "OneStepOff",
    "Order",
    "Schedule",
    "SeparatedSync",
    "Transport",
]

SCHEDULES: dict[str, type[Schedule]] = {
    "colocate_sync": ColocateSync,
    "separated_sync": SeparatedSync,
    "one_step_off": OneStepOff,
    "k_step_off": KStepOff,
    "delayed_update": DelayedUpdate,
    "half_step": HalfStep,
    "fully_async": FullyAsync,
}
