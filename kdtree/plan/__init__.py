"""What a model takes and how fast it could be, from its config and headers alone."""

from kdtree.plan.estimate import Machine, Part, Plan, Size, StepTime, make_plan
from kdtree.plan.source import Source, read
from kdtree.plan.tensors import Tensors, stored

__all__ = [
    "StepTime",
    "Machine",
    "Part",
    "Plan",
    "Size",
    "Source",
    "Tensors",
    "make_plan",
    "read",
    "stored",
]
