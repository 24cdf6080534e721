"""DFlash, block diffusion drafting: a small model that reads the target's features.

Published drafters are loaded as they are; what is not supported is refused by name.
"""

from kdtree.drafters.dflash.drafter import BESIDE, DflashConfig

__all__ = ["BESIDE", "DflashConfig"]
