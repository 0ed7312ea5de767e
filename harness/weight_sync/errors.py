"""What goes wrong on the way, as opposed to what is wrong with the code: it may go right the next time."""

from __future__ import annotations


class TransferError(RuntimeError):
    """Weights did not arrive whole: a peer died, a wait ended, a tensor is damaged. Whoever should have got them has
    the version that it had; the ends that took part have to be connected again."""
