"""The extension `kdtree._graph`, csrc/graph/, which is built where nvcc is, and for one Python."""

from types import ModuleType

import torch
from torch import Tensor

try:
    import kdtree._graph as _graph

    _missing = ""
except ModuleNotFoundError as error:
    _graph, _missing = None, str(error)


def graph() -> ModuleType:
    """The module. Raises RuntimeError, which says why, where there is none."""
    if _graph is None:
        raise RuntimeError(f"kdtree._graph is not there: {_missing}")
    return _graph


def make(kind: str, device: torch.device, **arguments: object) -> object:
    """A Generation or a Choice of the module's. The device is current meanwhile, as torch does it:
    whatever else is current gets no context by it."""
    made = getattr(graph(), kind)
    with torch.cuda.device(device):
        return made(device=device.index, **arguments)


def address(x: Tensor, dtype: torch.dtype) -> int:
    """Where a contiguous tensor's data are, which must be of this dtype."""
    assert x.dtype == dtype and x.is_contiguous()
    return x.data_ptr()


def launch(made: object, device: torch.device) -> None:
    """A graph of the module's, on the device's current stream."""
    with torch.cuda.device(device):
        made.launch(torch.cuda.current_stream().cuda_stream)
