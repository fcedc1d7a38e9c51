"""`minite gap`: learner and sampler on the same tokens and weights, in one process, and where they part."""

from minite.driver.gap.examine import examine

__all__ = ["examine"]
