"""Every schedule, one file each. Adding one touches its file, its YAML under experiments/schedule/, and this dict."""

from schedules.colocate_sync import ColocateSync
from schedules.fully_async import FullyAsync
from schedules.protocol import Schedule

SCHEDULES: dict[str, type[Schedule]] = {
    "colocate_sync": ColocateSync,
    "fully_async": FullyAsync,
}
