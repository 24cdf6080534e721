"""Files and number formats: safetensors, bfloat16, FP8 and packed INT4, written by hand.

A stored tensor is a pair (dtype name, array); BF16 is held as uint16 and F8_E4M3 as uint8, which
numpy lacks.
"""

import json
from pathlib import Path

import numpy as np

Stored = tuple[str, np.ndarray]

NUMPY = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F8_E4M3": np.dtype("u1"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
GROUP = 32  # input features that share an INT4 scale
BLOCK = 128  # output and input features that share an FP8 scale
E4M3 = np.array(  # the finite magnitudes of FP8, by their codes: three bits of mantissa, bias 7
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)

IGNORE = (
    r"lm_head re:.*self_attn.* re:.*shared_experts.* re:.*mlp\.(gate|up|gate_up|down)_proj.*"
).split()

INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
    "actorder": None,
    "dynamic": False,
}
QUANTIZATION = {  # quantization_config, by format
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"input_activations": None, "targets": ["Linear"], "weights": INT4}
        },
        "ignore": IGNORE,
    },
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    },
}


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest FP8, ties to the even code; beyond the largest, that. Sign in the top bit."""
    above = np.clip(np.searchsorted(E4M3, abs(x)), 1, len(E4M3) - 1)
    low, high = abs(x) - E4M3[above - 1], E4M3[above] - abs(x)
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (code | np.signbit(x) * 128).astype(np.uint8)


def from_e4m3(code: np.ndarray) -> np.ndarray:
    return np.where(code < 128, 1, -1) * E4M3[code & 127]


def cached_fp8(latent: np.ndarray) -> np.ndarray:
    """What a cache in FP8 returns of latents [T, C]: e4m3 codes times one float32 scale a row."""
    scale = (np.abs(latent).max(-1, keepdims=True) / E4M3[-1]).astype(np.float32)
    scale = np.where(scale == 0, 1, scale.astype(np.float64))
    return from_e4m3(to_e4m3(latent / scale)) * scale


def blocks(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Each element's scale: [O, I], of scales [ceil(O / 128), ceil(I / 128)]."""
    return np.repeat(np.repeat(scale, BLOCK, 0)[: shape[0]], BLOCK, 1)[:, : shape[1]]


def quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w: [O, I], I a multiple of 32. Returns values in [-8, 7]: [O, I], scales: [O, I / 32] bf16.

    The largest magnitude of a group maps to 7.5, so that all sixteen values occur.
    """
    groups = w.reshape(len(w), -1, GROUP)
    scale = to_bf16(np.abs(groups).max(-1) / 7.5)
    q = np.clip(np.rint(groups / from_bf16(scale)[..., None]), -8, 7)
    return q.astype(np.int64).reshape(w.shape), scale


def dequantize(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return q * np.repeat(from_bf16(scale), GROUP, axis=1)


def pack(q: np.ndarray) -> np.ndarray:
    """Values in [-8, 7]: [O, I] to int32: [O, ceil(I / 8)], low nibble first, code = q + 8."""
    codes = np.pad(q + 8, ((0, 0), (0, -q.shape[1] % 8))).reshape(len(q), -1, 8)
    return (codes << (4 * np.arange(8))).sum(-1).astype(np.uint32).view(np.int32)


def unpack(words: np.ndarray, inputs: int) -> np.ndarray:
    codes = words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    return codes.reshape(len(words), -1)[:, :inputs].astype(np.int64) - 8


def write_safetensors(path: Path, tensors: dict[str, Stored], metadata: dict[str, str]) -> None:
    """Widest dtype first, so that every tensor is aligned to its own size."""
    header, data, offset = {"__metadata__": metadata}, [], 0
    for name in sorted(tensors, key=lambda n: (-NUMPY[tensors[n][0]].itemsize, n)):
        dtype, x = tensors[name]
        data.append(np.ascontiguousarray(x, NUMPY[dtype]).tobytes())
        end = offset + len(data[-1])
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *data]))


def read_safetensors(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        x = np.frombuffer(raw[begin:end], NUMPY[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = entry["dtype"], x
    return tensors, metadata


def write_model(out: Path, tensors: dict[str, Stored], shards: int) -> None:
    """model.safetensors, or `shards` files and their index."""
    metadata = {"format": "pt"}
    if shards == 1:
        write_safetensors(out / "model.safetensors", tensors, metadata)
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(sorted(tensors))}
    for file in files:
        part = {name: x for name, x in tensors.items() if weight_map[name] == file}
        write_safetensors(out / file, part, metadata)
    total = sum(x.size * NUMPY[dtype].itemsize for dtype, x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(out / "model.safetensors.index.json", index)


def read_model(path: Path) -> dict[str, Stored]:
    tensors = {}
    for file in sorted(path.glob("model*.safetensors")):
        tensors |= read_safetensors(file)[0]
    return tensors


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
