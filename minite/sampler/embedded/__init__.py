"""The built-in engine. See ../README.md."""

from minite.sampler.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
