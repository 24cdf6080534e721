"""What hardware a device is, and what is taken for its kind."""

import os
import platform
from pathlib import Path

import torch


def card(device: torch.device) -> str:
    """A GPU's name; a CPU's, with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {torch.get_num_threads()} threads"


def mma_sync() -> bool:
    """Whether a GPU with wgmma is to do as others do: KDTREE_MMA_SYNC=1, as the kernels read it."""
    return os.environ.get("KDTREE_MMA_SYNC", "")[:1] == "1"
