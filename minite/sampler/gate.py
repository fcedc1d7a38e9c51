"""Whether an engine may sample, and with which weights: what begin_update, finish_update and generate of all engines
have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minite.sync.errors import SyncError
from minite.types import WeightVersion


class UpdateGate:
    """Open with the weights of a version, or shut and saying why. An update shuts it, and opens it when it succeeds."""

    def __init__(self, plan_digest: str) -> None:
        self.version: WeightVersion | None = None  # of the weights that may be used
        self.incoming: WeightVersion | None = None  # of the update under way; the engine sets it when it takes buckets
        self._plan_digest, self._reason = plan_digest, "no weights were loaded yet"

    def announce(self, version: WeightVersion, live: int) -> None:
        """Shut for an update. SyncError while ``live`` requests are, and for weights of another plan."""
        if live:
            raise SyncError(
                f"cannot update weights while {live} requests are live; abort() them or let generate() return"
            )
        self.version = self.incoming = None
        if version.plan_digest != self._plan_digest:
            self._reason = (
                f"the weights of step {version.step} were made under another precision plan: "
                f"theirs {version.plan_digest}, this engine's {self._plan_digest}; start both from one recipe"
            )
            raise SyncError(self._reason)
        self._reason = f"the update to step {version.step} (weight digest {version.weight_digest}) did not finish"

    def under_way(self, call: str) -> WeightVersion:
        """The version of the update that ``call`` is part of. SyncError when none has begun."""
        if self.incoming is None:
            raise SyncError(f"{call} without begin_update; announce the version first")
        return self.incoming

    @contextmanager
    def finishing(self) -> Iterator[WeightVersion]:
        """The block makes sure of the weights; without a SyncError the gate is open with them after it."""
        version, self.incoming = self.under_way("finish_update"), None
        try:
            yield version
        except SyncError as error:
            self._reason = f"the update to the weights of step {version.step} failed: {error}"
            raise
        self.version = version

    def require(self, what: str) -> WeightVersion:
        """The version of the weights in use. SyncError, with the reason, when there are none."""
        if self.version is None:
            raise SyncError(f"refusing to {what}: {self._reason}")
        return self.version
