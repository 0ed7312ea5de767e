"""All that a schedule may ask of a job. It decides when groups are admitted, when roles work, and when engines take new
weights; it sees the roles through these protocols only, so the same file runs on a real cluster and on a virtual clock.

    prompts ----> rollout ----> stages ----> trainer
    admit         generate      process      train             groups, row by row, through the queue
    drop, close   stream        stream         |
                  completed                    |
                    ^                          | version v
                    +-------- weights ---------+               publish; or start_transfer, wait_arrived, swap[_newest]
    set_dispatch_limit, pause, put_off, resume                 mark_version: to no engine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

PauseMode = Literal["keep", "wait", "carry", "abort"]
"""The fate of samples under way when engines stop for new weights: they stay where they are, and go on under the new
ones; they end first, under the old ones; or they are taken out of the engines, and go on from the tokens that they have
under the new ones (carry), or begin again under them (abort)."""


class Prompts(Protocol):
    """The source of groups."""

    async def admit(self, below: int) -> None:
        """Put every group numbered under `below` that is not there yet into the queue; later calls go on from there.

        Never goes past the job's last group. Waits while the queue is at its cap.
        """

    async def drop(self, started_below: int) -> int:
        """Take every untrained group that an engine started under this dispatch limit, or a lower one, out of training.

        Returns how many; the job's last group moves on by as many, since as many will have to be admitted instead.
        """

    async def close(self) -> None:
        """Admit no more groups: what streams ends once it has worked through those that were."""


class Rollout(Protocol):
    """Rollout engines: all of them, or a cohort. They take groups from the queue on their own, whole and in order."""

    def split(self, cohorts: int | None = None) -> Sequence[Rollout]:
        """The engines dealt out into this many cohorts of nearly equal size; each engine alone if None.

        Raises ValueError where there are fewer engines than cohorts.
        """

    async def generate(self, iteration: int, batches: int = 1) -> None:
        """Generate batch `iteration` to the last token that these engines sample of it; or `batches` of them from there
        on as if they were one, so that slots which one leaves free are filled from the next.

        Where the device is shared with other roles, it is taken first and given back afterwards.
        """

    async def stream(self) -> None:
        """Generate whatever the dispatch limit allows, batch after batch, until the prompts are closed and done."""

    async def completed(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        """Wait until engines that stream have completed what `Trainer.train` trains in `iteration` with the same
        `first`. For schedules that declare `awaits_completion`."""

    async def filled(self, groups: int) -> None:
        """Wait until engines, lent ones too, have completed so many groups since the job began: in fifo order the first
        ones. For schedules that declare `lends`."""

    async def set_dispatch_limit(self, below: int) -> None:
        """Let engines start groups numbered under `below` (the dispatch limit)."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop all engines: between two tokens, or once their running samples are done (wait). Where the device is
        shared with other roles, it is given back until `resume`; then no sample may stay in an engine (not keep)."""

    async def put_off(self) -> None:
        """Stop all engines as `pause` does, and give back to the queue every group that is not complete: all of its
        samples begin again, wherever an engine takes it next. For schedules that declare `puts_off`."""

    async def resume(self, below: int, above: int = 0) -> None:
        """Go on under the loaded weights, with dispatch limit `below`; engines start no group numbered under
        `above`."""


class Lent(Rollout, Protocol):
    """Rollout engines on training devices, which they have from `resume` to `hand_over`. They stream meanwhile."""

    async def hand_over(self, to: Rollout) -> None:
        """Stop, give the devices back, and let these other engines go on with the samples under way, from the tokens
        that they have. Then `stream` ends."""


class Stage(Protocol):
    """A role between rollout and training: reward, reference, old log-probs, advantages."""

    @property
    def name(self) -> str:
        """The role that it runs."""

    async def process(self, iteration: int) -> None:
        """Work through every row of batch `iteration`, each as soon as its inputs are in the queue."""

    async def stream(self) -> None:
        """Work through every row of the job, each as soon as its inputs are there, until the prompts are closed."""


class Trainer(Protocol):
    """The training world."""

    @property
    def waited(self) -> float:
        """Share of the time of the last batch that it waited for rows, mean of its ranks; 0 of one that was trained
        before a run went on from a checkpoint."""

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        """Train on one batch, micro-batch by micro-batch as they become ready, then take one optimizer step.

        With order "fifo" these are the groups of batch `iteration`, in group order. With order "completion" they are
        the next `batch` groups to become ready, of whatever batch, within the window that the schedule says
        (`Schedule.window_groups`), as far as `first` leaves room: for each pair
        (limit, groups), those that an engine started under this dispatch limit, or a lower one, are all among the next
        `groups` groups that are trained, counted from this call on. Where they would not be if another one went
        before them, they are waited for.
        """


class Weights(Protocol):
    """New weights, all at once or in two steps. Engines that load must be paused or idle."""

    async def publish(self, version: int) -> None:
        """Bring the trained weights, now called `version`, to every engine but those that are lent, and load them."""

    async def mark_version(self, version: int) -> None:
        """Call the trained weights `version` without bringing them to any engine."""

    async def start_transfer(self, version: int) -> None:
        """Hand the trained weights over as `version` and let the trainer go on: they travel to the host memory of all
        engines in the background, while these generate. Waits for the transfer before it to arrive."""

    async def wait_arrived(self, version: int) -> None:
        """Wait until `version` is in the host memory of every engine; its transfer need not have started yet."""

    async def swap(self, rollout: Rollout, version: int) -> None:
        """Load what has arrived as `version` into these engines; those that are lent take it from the trainer."""

    async def swap_newest(self, rollout: Rollout) -> int:
        """Load the version that has arrived last into these engines, whichever that is; which."""


class Job(Protocol):
    """One training job, placed and ready."""

    @property
    def iterations(self) -> int:
        """Iterations that the job runs."""

    @property
    def batch(self) -> int:
        """Groups trained in one iteration."""

    @property
    def prompts(self) -> Prompts:
        """The source of groups."""

    @property
    def rollout(self) -> Rollout:
        """The rollout engines together."""

    @property
    def lent(self) -> Lent:
        """The engines on training devices, which are none of `rollout`. For schedules that declare `lends`."""

    @property
    def stages(self) -> Sequence[Stage]:
        """All stages: those on the host, then those on devices."""

    @property
    def trainer(self) -> Trainer:
        """The training world."""

    @property
    def weights(self) -> Weights:
        """Versions of the weights on their way to the engines."""
