"""The formulas behind a plan: cache memory, traffic and flops of a step, what can be divided.

Letters as everywhere: S context, N nodes, L layers, H heads, C + R the latent's width, E experts, K
of them a token. Floors are those of the kernels' headers: every weight that is used is read once,
the latents once a layer; activations, far below both, are left out.
"""

from kdtree.cache import PAGE, fp8_row_bytes
from kdtree.config import ModelConfig
from kdtree.tree import MAX_NODES
from kdtree.weights.formats import GROUP

LATENT = 2  # bytes of a cached bfloat16
ROTARY = 4  # bytes of an entry of the rotary table, float32
# One H200: a sum over memory far larger than its caches, and a bfloat16 product of side 8192.
BANDWIDTH = 4.42e12  # bytes/s
PEAK = 690e12  # flop/s
# An all-reduce in a CUDA graph, torch's symmetric memory, between two H200s of one host (NVLink):
# 6.5, 7.2, 7.3 and 9.9 us for 1, 8, 16 and 64 rows of 7168 bfloat16. More ranks: not measured.
ALL_REDUCE_S = 6.45e-6
ALL_REDUCE_RATE = 266e9  # bytes/s beyond that


def seconds(bytes: float, flops: float, bandwidth: float, peak: float) -> float:
    """The least time of so much memory traffic and so many flops."""
    return max(bytes / bandwidth, flops / peak)


def row_bytes(config: ModelConfig, fp8: bool = False) -> int:
    """Of one token in one layer: C + R elements, or a row with FP8 latents."""
    latent, rope = config.mla.kv_lora_rank, config.mla.rope
    return fp8_row_bytes(latent, rope) if fp8 else (latent + rope) * LATENT


def cache_bytes(config: ModelConfig, fp8: bool = False) -> int:
    """Of one token, L rows; the same on every rank, for all heads share a latent."""
    return config.layers * row_bytes(config, fp8)


def longest_context(config: ModelConfig, free: float, fp8: bool = False) -> int:
    """Tokens of one sequence that fit in so many bytes, whatever the model was made for.

    Pages of the cache, MAX_NODES - 1 slots of a tree beyond the last token, and the rotary table.
    """
    token = cache_bytes(config, fp8) + config.mla.rope * ROTARY
    pages = int(free // (PAGE * token))
    return max(pages * PAGE - (MAX_NODES - 1), 0)


def distinct_experts(experts: int, per_token: int, rows: int) -> float:
    """Experts of a layer that so many rows touch, E (1 - (1 - K / E)^N), if routing is uniform."""
    return experts * (1 - (1 - per_token / experts) ** rows)


def attention_bytes(config: ModelConfig, context: int, fp8: bool = False) -> int:
    """Latents that one layer reads, S rows, on every rank."""
    return context * row_bytes(config, fp8)


def attention_flops(config: ModelConfig, context: int, nodes: int, ranks: int) -> int:
    """Of one layer and rank, 2 * S * (2 C + R) for each node and head."""
    a = config.mla
    return 2 * context * (2 * a.kv_lora_rank + a.rope) * nodes * (a.heads // ranks)


def all_reduces(config: ModelConfig) -> int:
    """Of one step: two a layer, one of the embeddings, one to compare the head's shares."""
    return 2 * config.layers + 2


def all_reduce_seconds(config: ModelConfig, nodes: int) -> float:
    """One sum over ranks of N rows of the residual stream in bfloat16."""
    return ALL_REDUCE_S + nodes * config.hidden * 2 / ALL_REDUCE_RATE


def indivisible(config: ModelConfig, ranks: int, int4: bool) -> list[str]:
    """Why a model cannot be divided among so many ranks; nothing where it can.

    int4: whether routed experts are held in INT4
    """
    c, m = config, config.moe
    reasons = []
    if c.mla.heads % ranks:
        reasons.append(f"{c.mla.heads} heads do not divide evenly")
    if m and int4 and m.width % (ranks * GROUP):
        reasons.append(
            f"the experts' width {m.width} does not divide into multiples of {GROUP} (INT4 groups)"
        )
    elif m and m.width % ranks:
        reasons.append(f"the experts' width {m.width} does not divide evenly")
    if not c.is_moe(0) and c.dense_width % ranks:
        reasons.append(f"the dense width {c.dense_width} does not divide evenly")
    if c.vocab % ranks:
        reasons.append(f"the vocabulary of {c.vocab} does not divide evenly")
    return reasons


def legal_sizes(config: ModelConfig, int4: bool) -> list[int]:
    """All numbers of ranks that a model can be divided among."""
    sizes = range(1, config.mla.heads + 1)
    return [ranks for ranks in sizes if not indivisible(config, ranks, int4)]
