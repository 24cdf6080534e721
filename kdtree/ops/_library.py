"""Loads `_C.so`, which registers the ops. A missing library raises: there is no fallback."""

from importlib.resources import files

import torch

library = files("kdtree") / "_C.so"
if not library.is_file():
    raise ImportError(f"{library} is missing: build it with `pip install -e .` or `make build`")
torch.ops.load_library(str(library))

ops = torch.ops.kdtree
