"""An order of training of your own: schedule.order=my_lab.orders:NewestFirst (docs/plugins.md)."""

from harness.transfer_queue.control.policies import LongestFirst


class NewestFirst(LongestFirst):
    """Of the groups that are complete, the one that was admitted last."""

    weighs = False

    def add(self, units, tick, weights=None):
        self._key[units] = -units
        self.put_back(units)
