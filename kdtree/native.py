"""The extension `kdtree._graph`, csrc/graph/, which is built where nvcc is, and for one Python."""

from types import ModuleType

import torch
from torch import Tensor

try:
    import kdtree._graph as _graph

    _missing = ""
except ImportError as error:
    _graph, _missing = None, str(error)


def graph() -> ModuleType:
    """The module. Raises RuntimeError, which says why, where there is none."""
    if _graph is None:
        raise RuntimeError(f"kdtree._graph is not there: {_missing}")
    return _graph


def address(x: Tensor, dtype: torch.dtype) -> int:
    """Where a contiguous tensor's data are, which must be of this dtype."""
    assert x.dtype == dtype and x.is_contiguous()
    return x.data_ptr()


def stream(device: torch.device) -> int:
    """The current one of a device, as a cudaStream_t."""
    return torch.cuda.current_stream(device).cuda_stream
