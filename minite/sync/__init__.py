"""Learner tensors -> sampler tensors, moved in buckets and verified. See README.md."""

from minite.sync.errors import SyncError

__all__ = ["SyncError"]
