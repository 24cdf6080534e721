"""Products of many rows as cards without wgmma have them: KDTREE_MMA_SYNC=1 asks for that form."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_case import random_case

from kdtree import ops

HERE = Path(__file__).parent
NAMES = "linear", "int4_linear", "moe_experts_forms", "mla_attention_latent"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


def bits() -> str:
    """A hash of what the products give for rows enough that their form differs between cards."""
    rng = torch.Generator().manual_seed(0)
    sums = hashlib.sha256()

    def rand(*shape):
        return torch.randn(shape, generator=rng).to("cuda", torch.bfloat16)

    def codes(*shape):
        words = (*shape[:-1], shape[-1] // 8)
        return torch.randint(-(2**31), 2**31, words, generator=rng, dtype=torch.int64).int().cuda()

    dense = (12, 1024, 320), (17, 1024, 320), (64, 2048, 192), (40, 160, 18016), (130, 576, 1056)
    for T, I, O in dense:
        x = rand(T, I)
        packed = ops.int4_pack(codes(O, I), rand(O, I // 32).abs())
        for y in (ops.linear(x, rand(O, I)), ops.int4_linear(x, *packed)):
            sums.update(y.float().cpu().numpy().tobytes())
    T, D, F, E, K = 200, 256, 192, 5, 3
    shapes = (E, 2 * F, D), (E, D, F)
    banks = [ops.int4_pack(codes(*s), rand(*s[:2], s[2] // 32).abs()) for s in shapes]
    (up, up_scale), (down, down_scale) = banks
    ids = torch.rand(T, E, generator=rng).topk(K).indices.to("cuda", torch.int32)
    weights = torch.rand(T, K, generator=rng).cuda()
    y = ops.moe_experts(rand(T, D), ids, weights, up, down, up_scale, down_scale)
    sums.update(y.float().cpu().numpy().tobytes())
    for context, N, H in (([300, 5], 12, 20), ([5000], 3, 64), ([4600], 40, 8)):
        y = random_case(context, N, H, 512, 64, torch.bfloat16, rng).to("cuda").run()
        sums.update(y.float().cpu().numpy().tobytes())
    return sums.hexdigest()


def elsewhere(*command: str) -> str:
    """What it prints where products are those of other cards."""
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    env = os.environ | {"KDTREE_MMA_SYNC": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_bits_are_those_of_other_cards():
    assert elsewhere("-c", "import test_other_cards as t; print(t.bits())").strip() == bits()


@pytest.mark.parametrize("name", NAMES)
def test_right_on_other_cards(name):
    plugins, path = ("-pno:cacheprovider", "-pno:xdist"), str(HERE / f"test_{name}.py")
    elsewhere("-m", "pytest", *plugins, "-k", "cuda", "-m", "not large", path)
