"""Drafters: who proposes the tree that the target verifies.

A drafter is a config, which a user names or fills in, and what it creates for one engine. The
engine knows the protocol alone.
"""

from kdtree.drafters.base import Drafted, Drafter, DrafterConfig, Replanner, Setup, Sizes
from kdtree.drafters.dflash import DflashConfig
from kdtree.drafters.ngram import NgramConfig
from kdtree.drafters.none import NoneConfig
from kdtree.drafters.oracle import OracleConfig

DRAFTERS: dict[str, type[DrafterConfig]] = {
    "dflash": DflashConfig,
    "none": NoneConfig,
    "ngram": NgramConfig,
}  # by name; the oracle has no name, since it wants the truth


__all__ = [
    "DRAFTERS",
    "DflashConfig",
    "Drafted",
    "Drafter",
    "DrafterConfig",
    "NgramConfig",
    "NoneConfig",
    "OracleConfig",
    "Replanner",
    "Setup",
    "Sizes",
]
