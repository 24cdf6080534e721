"""Drafters: who proposes the tree that the target verifies.

A drafter is a config, which a user names or fills in, and what it creates for one engine. The
engine knows the protocol alone.
"""

from kdtree.drafters.base import Drafter, DrafterConfig, Setup
from kdtree.drafters.dflash import DflashConfig
from kdtree.drafters.ngram import NgramConfig
from kdtree.drafters.none import NoDraft, NoneConfig
from kdtree.drafters.oracle import OracleConfig

DRAFTERS: dict[str, type[DrafterConfig]] = {
    "dflash": DflashConfig,
    "none": NoneConfig,
    "ngram": NgramConfig,
}  # by name; the oracle has no name, since it wants the truth


def create(config: DrafterConfig, setup: Setup) -> Drafter:
    """The drafter of an engine; trees of the root alone want none. Raises as the config does."""
    made = config.create(setup)
    return NoDraft() if made.nodes == 1 else made


__all__ = [
    "DRAFTERS",
    "DflashConfig",
    "Drafter",
    "DrafterConfig",
    "NgramConfig",
    "NoneConfig",
    "OracleConfig",
    "Setup",
    "create",
]
