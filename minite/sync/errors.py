"""The error of a weight sync."""

from minite.errors import UserError


class SyncError(UserError):
    """The sampler does not hold what the learner sent, or must not use it. Names the first tensor concerned."""
