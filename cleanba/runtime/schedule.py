"""Which policy version, and which epoch of environments, each rollout is collected with."""

from collections.abc import Collection
from typing import NamedTuple


class Schedule(NamedTuple):
    """The rollouts of a run: which policy version and which epoch of environments each is collected with.

    Rollout k is the one that update k learns from.  Both are counted from 1.
    """

    first: int
    """the first rollout to collect: 1, or later after a resume"""
    last: int
    concurrency: bool
    env_epoch: int
    """updates after which environments start afresh; 0 for never"""
    checkpoint_frequency: int = 0
    """updates between checkpoints; 0 where they are taken by time, or only at the end"""
    digests_after: Collection[int] = ()
    """further updates after which digests are logged"""

    def policy_version(self, rollout: int) -> int:
        """The version that collects this rollout.

        With concurrency rollout k+1 is collected with version k, while update k runs; otherwise with version k+1.
        """
        return max(1, rollout - 1) if self.concurrency else rollout

    def lag(self, rollout: int) -> int:
        """The policy lag of this rollout: how many versions the learner is ahead when it learns from it."""
        return rollout - self.policy_version(rollout)

    def epoch(self, rollout: int) -> int:
        """The epoch of environments that this rollout belongs to, from 0."""
        return (rollout - 1) // self.env_epoch if self.env_epoch else 0

    def starts_afresh(self, update: int) -> bool:
        """Whether environments start afresh after this update, if the run goes on."""
        return self.env_epoch > 0 and update % self.env_epoch == 0

    def ends_epoch(self, update: int) -> bool:
        """Whether environments stop after this update: at the end of an epoch, and of the run."""
        return update == self.last or self.starts_afresh(update)

    def logs_digests(self, update: int) -> bool:
        """Whether digests are logged after this update: at ends of epochs, and every `checkpoint_frequency` updates."""
        f = self.checkpoint_frequency
        return self.ends_epoch(update) or (f > 0 and update % f == 0) or update in self.digests_after

    def next_end(self, update: int) -> int:
        """The first update after `update` that ends an epoch."""
        f = self.env_epoch
        return min(self.last, (update // f + 1) * f) if f else self.last

    def starts_epoch(self, rollout: int) -> bool:
        """Whether environments start afresh before this rollout."""
        return rollout == self.first or self.epoch(rollout) != self.epoch(rollout - 1)
