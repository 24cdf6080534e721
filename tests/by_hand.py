"""Safetensors files made by hand, so that they can be wrong."""

import json

Tensor = tuple[str, list[int], bytes]  # dtype, shape, bytes


def header(tensors: dict[str, Tensor]) -> dict:
    """The header of tensors that lie end to end."""
    entries, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        end = at + len(data)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return entries


def data(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(data for _, _, data in tensors.values())


def file(text: dict | str | bytes, data: bytes, length: int | None = None) -> bytes:
    """text: of the header; length: what the file says that it has, if not its own"""
    text = json.dumps(text) if isinstance(text, dict) else text
    text = text.encode() if isinstance(text, str) else text
    length = len(text) if length is None else length
    return length.to_bytes(8, "little") + text + data
