"""The oracle itself: its formulas against numbers worked out elsewhere, its files, its promises."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "python/gen_model_ref.py"
sys.path.insert(0, str(SCRIPT.parent))

import gen_model_ref  # noqa: E402
from model_ref import checkpoint, forward, philox, variants, weights  # noqa: E402

ASKED = """
base dims one-layer one-head heads-128 dense no-shared two-shared q-lora-none v-dim groups yarn
softmax-greedy experts-384 bias-large tied rope-halves int4 int4-odd vocab-odd norm-tiny"""
FILES = {"config.json", "generation_config.json", "model.safetensors", "golden.safetensors"}


def generate(name: str, out: Path) -> Path:
    gen_model_ref.write(gen_model_ref.generate(name), out, variants.VARIANTS[name].shards)
    return out


def small_model(name: str) -> forward.Model:
    v = variants.VARIANTS[name]
    rope = {"theta": v.theta, "yarn": v.yarn}
    return forward.Model(v.config(), rope, weights.make_weights(v, v.seed).value)


def test_imports_only_numpy_and_the_standard_library():
    allowed = set(sys.stdlib_module_names) | {"numpy", "model_ref"}
    for path in [SCRIPT, *sorted((SCRIPT.parent / "model_ref").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_command_line(tmp_path):
    def run(*args: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True)

    listed = {line.split()[0] for line in run("--list").stdout.splitlines()}
    assert listed >= set(ASKED.split())
    assert run("--variant", "one-layer", "--out", str(tmp_path)).returncode == 0
    assert {p.name for p in tmp_path.iterdir()} == FILES
    assert run("--check", str(tmp_path)).returncode == 0
    assert run("--variant", "one-layer").returncode == 2
    assert run("--variant", "nonesuch", "--out", str(tmp_path)).returncode == 2


@pytest.mark.parametrize("name", ["one-head", "kimi"])
def test_same_seed_same_bits(name, tmp_path):
    a, b = generate(name, tmp_path / "a"), generate(name, tmp_path / "b")
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name
    other, own = gen_model_ref.generate(name, 123).golden, gen_model_ref.generate(name).golden
    assert not np.array_equal(other["prompt.logits"][1], own["prompt.logits"][1])


@pytest.mark.parametrize(
    "file, tensor, change",
    [
        ("model.safetensors", "model.layers.0.self_attn.o_proj.weight", lambda x: x ^ 1),
        ("golden.safetensors", "greedy.ids", lambda x: x + 1),
        ("golden.safetensors", "layers.0.after_mlp", lambda x: x + 1e-6),
    ],
)
def test_check_notices_one_value(file, tensor, change, tmp_path):
    path = generate("one-layer", tmp_path)
    tensors, metadata = checkpoint.read_safetensors(path / file)
    dtype, x = tensors[tensor]
    x = x.copy()
    x.flat[7] = change(x.flat[7])
    tensors[tensor] = dtype, x
    checkpoint.write_safetensors(path / file, tensors, metadata)
    assert gen_model_ref.check(path) == [tensor]


def test_check_notices_config_and_missing_tensors(tmp_path):
    path = generate("one-layer", tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"rms_norm_eps": 1e-6}
    checkpoint.write_json(path / "config.json", config)
    tensors, metadata = checkpoint.read_safetensors(path / "golden.safetensors")
    del tensors["sampled.logits"]
    checkpoint.write_safetensors(path / "golden.safetensors", tensors, metadata)
    assert gen_model_ref.check(path) == ["config.json", "missing or unknown: sampled.logits"]


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_variant_is_healthy(name):
    made = gen_model_ref.generate(name)
    g, m = made.golden, made.metadata
    assert all(np.isfinite(x).all() for _, x in g.values())
    assert float(m["greedy_margin"]) > 1e-3 and float(m["sampled_margin"]) > 1e-3
    assert float(m["router_margin"]) > 1e-4 and float(m["router_order_margin"]) > 2e-5
    assert int(m["distinct_greedy"]) >= 8
    assert 2 < g["prompt.logits"][1].std() < 4
    assert not set(made.generation_config["eos_token_id"]) & set(g["greedy.ids"][1].tolist())
    assert len(g["greedy.ids"][1]) == len(g["sampled.ids"][1]) == 64


def test_public_reader_agrees(tmp_path):
    path = generate("int4", tmp_path)
    with safe_open(path / "model.safetensors", "pt") as f:
        stored, _ = checkpoint.read_safetensors(path / "model.safetensors")
        assert set(f.keys()) == set(stored)
        w = f.get_tensor("model.embed_tokens.weight")
        np.testing.assert_array_equal(
            w.double().numpy(), checkpoint.from_bf16(stored["model.embed_tokens.weight"][1])
        )
    with safe_open(path / "golden.safetensors", "np") as f:
        assert f.metadata()["variant"] == "int4"
        assert f.get_tensor("greedy.logits").shape == (64, 512)


@pytest.mark.parametrize("name", ["yarn", "groups", "q-lora-none"])
def test_token_by_token_equals_at_once(name):
    model, ids = small_model(name), np.arange(30) * 7 % 500
    want, whole = model.forward(ids, forward.Cache())
    cache, got = forward.Cache(), []
    for chunk in np.split(ids, [1, 2, 9, 29]):
        logits, _ = model.forward(chunk, cache)
        got.append(logits)
    np.testing.assert_allclose(np.concatenate(got), want, rtol=0, atol=1e-10)
    assert len(whole.after_mlp) == len(whole.after_attention) == 3


def test_continuations_follow_from_their_logits():
    g = {k: x for k, (_, x) in gen_model_ref.generate("vocab-odd").golden.items()}
    seed = int(gen_model_ref.generate("vocab-odd").metadata["sample_seed"])
    assert seed >> 32 and len(g["prompt.ids"]) == 24
    np.testing.assert_array_equal(g["greedy.logits"].argmax(1), g["greedy.ids"])
    noise = np.array([philox.gumbel(seed, 24 + i, 509) for i in range(64)])
    np.testing.assert_array_equal((g["sampled.logits"] + noise).argmax(1), g["sampled.ids"])
    logits, _ = small_model("vocab-odd").forward(
        np.concatenate([g["prompt.ids"], g["sampled.ids"][:-1]]), forward.Cache()
    )
    np.testing.assert_allclose(logits[23:], g["sampled.logits"], rtol=0, atol=1e-10)


KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1"""


@pytest.mark.parametrize("line", KNOWN_ANSWERS.strip().splitlines())
def test_philox_known_answers_of_random123(line):
    words = [int(x, 16) for x in line.split()]
    counter = np.array([words[:4]], np.uint64)
    assert philox.philox4x32(counter, (words[4], words[5]))[0].tolist() == words[6:]


def test_noise_reads_the_contract_s_word():
    seed, position = 0x12345678_9ABCDEF0, 5 << 32 | 77
    u = philox.uniform(seed, position, 11)
    block = philox.philox4x32(np.array([[2, 77, 5, 0]], np.uint64), (0x9ABCDEF0, 0x12345678))
    assert u[9] == ((int(block[0, 1]) >> 9) + 0.5) * 2.0**-23
    assert (u.astype(np.float32) == u).all() and ((0 < u) & (u < 1)).all()
    # mean and variance of the Gumbel distribution
    g = philox.gumbel(seed, 0, 100000)
    assert abs(g.mean() - 0.5772) < 0.02 and abs(g.var() - np.pi**2 / 6) < 0.05


def test_int4_packing():
    q = np.array([[*range(-8, 8)]])
    assert checkpoint.pack(q).tolist() == [[0x76543210, 0xFEDCBA98 - 2**32]]
    np.testing.assert_array_equal(checkpoint.unpack(checkpoint.pack(q), 16), q)
    assert checkpoint.pack(q[:, :12]).shape == (1, 2)  # a row is padded to whole words
    w = np.random.default_rng(0).standard_normal((6, 96))
    q, scale = checkpoint.quantize(w)
    assert scale.shape == (6, 3) and q.min() == -8 and q.max() == 7
    step = np.repeat(checkpoint.from_bf16(scale), 32, 1)
    assert (abs(checkpoint.dequantize(q, scale) - w) <= 0.6 * step).all()


def test_bf16_rounds_to_nearest_even():
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7, 1 + 2**-8 + 2**-16])
    want = [1.0, 1.0, 1 + 2**-6, -1 - 2**-7, 1 + 2**-7]
    assert checkpoint.from_bf16(checkpoint.to_bf16(x)).tolist() == want


HEAD = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
UNSET = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


@pytest.mark.parametrize(
    "factor, mscale, want",
    [(None, None, 0.0721688), (64, 1.0, 0.1446796), (40, 1.0, 0.1352338), (40, 0.707, 0.1147214)],
)
def test_softmax_scale(factor, mscale, want):
    yarn = factor and UNSET | {"factor": factor, "mscale": mscale, "mscale_all_dim": mscale}
    assert abs(forward.softmax_scale(HEAD, {"theta": 5e4, "yarn": yarn}) - want) < 5e-7
    cos, sin = forward.rope_table({"theta": 5e4, "yarn": yarn}, 64, np.array([0]))
    assert (cos == 1).all() and (sin == 0).all()


@pytest.mark.parametrize(
    "m, all_dim, want", [(1.0, 0.707, 1.41589 / 1.29403), (None, None, 1.41589)]
)
def test_yarn_scales_cos_and_sin_apart(m, all_dim, want):
    yarn = UNSET | {"factor": 64, "mscale": m, "mscale_all_dim": all_dim}
    cos, _ = forward.rope_table({"theta": 5e4, "yarn": yarn}, 64, np.array([0]))
    np.testing.assert_allclose(cos, want, rtol=1e-5)


@pytest.mark.parametrize(
    "theta, beta_fast, want", [(5e4, 32, (8, 20)), (5e4, 1, (19, 20)), (1e4, 32, (10, 23))]
)
def test_yarn_range(theta, beta_fast, want):
    assert forward.yarn_range(UNSET | {"factor": 64, "beta_fast": beta_fast}, theta, 64) == want
    # the lowest pairs keep their frequency, the highest are stretched by the factor
    rope = {"theta": theta, "yarn": UNSET | {"factor": 64, "beta_fast": beta_fast}}
    plain = forward.rope_table({"theta": theta, "yarn": None}, 64, np.array([1]))
    got = forward.rope_table(rope, 64, np.array([1]))
    ratio = (np.arctan2(got[1], got[0]) / np.arctan2(plain[1], plain[0]))[0]
    np.testing.assert_allclose(ratio[: want[0] + 1], 1)
    np.testing.assert_allclose(ratio[want[1] :], 1 / 64)


def test_rotation_pairs():
    x, cos, sin = np.array([[[1.0, 2, 3, 4]]]), np.array([[0.0, 1]]), np.array([[1.0, 0]])
    assert forward.rotate(x, cos, sin, True).tolist() == [[[-2, 1, 3, 4]]]
    assert forward.rotate(x, cos, sin, False).tolist() == [[[-3, 2, 1, 4]]]


ROUTER = {
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def test_router_masks_groups_and_takes_weights_without_bias():
    logits = np.array([[2, 1.9, -3, -3, 0.1, 0, -3, -3]])
    r = forward.route(logits, np.array([-0.95] * 4 + [-1.2] * 4), ROUTER)
    assert r.ids.tolist() == [[0, 1]]
    s = 1 / (1 + np.exp(-logits[0, :2]))
    np.testing.assert_allclose(r.weights[0], 2.5 * s / s.sum())
    np.testing.assert_allclose(r.margin[0], s[1] - 1 / (1 + np.exp(3)))  # within the group kept


def test_router_group_score_is_the_sum_of_two():
    logits = np.array([[3.0, -9, 2, 2]])  # the best expert stands alone
    assert forward.route(logits, np.zeros(4), ROUTER).ids.tolist() == [[2, 3]]
    limited = ROUTER | {"topk_method": "group_limited_greedy"}
    assert forward.route(logits, None, limited).ids.tolist() == [[0, 1]]


def test_router_ties_and_softmax():
    greedy = ROUTER | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    r = forward.route(np.log(np.array([[1.0, 3, 3, 1]])), None, greedy)
    assert r.ids.tolist() == [[1, 2]] and r.order_margin[0] == 0
    np.testing.assert_allclose(r.weights[0], 2.5 * 3 / 8)
    equal = ROUTER | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
    assert forward.route(np.zeros((1, 384)), np.zeros(384), equal).ids.tolist() == [[*range(8)]]


def test_inner_norms_have_their_own_eps(monkeypatch):
    model, x = small_model("norm-tiny"), np.random.default_rng(0).standard_normal((8, 128))
    assert model.c["rms_norm_eps"] == 1e-5 and forward.INNER_EPS == 1e-6
    want = model.attention(0, x, np.arange(8), forward.Cache(), forward.Trace())
    model.c["rms_norm_eps"] = 1.0  # is not asked inside of attention
    got = model.attention(0, x, np.arange(8), forward.Cache(), forward.Trace())
    np.testing.assert_array_equal(got, want)
    monkeypatch.setattr(forward, "INNER_EPS", 1e-5)  # the variant can tell the two apart
    got = model.attention(0, x, np.arange(8), forward.Cache(), forward.Trace())
    assert abs(got - want).max() > 0.1


def test_both_rope_spellings_and_the_wrapper():
    old, new = (gen_model_ref.hf_rope(variants.VARIANTS[v]) for v in ("softmax-greedy", "yarn"))
    assert old["rope_scaling"]["type"] == "yarn" and old["rope_theta"] == 10000.0
    assert new["rope_parameters"]["rope_type"] == "yarn" and "rope_theta" not in new
    made = gen_model_ref.generate("kimi")
    assert made.config["text_config"]["quantization_config"]["format"] == "pack-quantized"
    prefixes = {name.split(".")[0] for name in made.tensors}
    assert prefixes == {"language_model", "vision_tower", "mm_projector"}
