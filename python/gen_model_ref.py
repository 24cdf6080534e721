"""The oracle: makes a small model and what it must compute, in numpy float64, on its own.

    python python/gen_model_ref.py --list
    python python/gen_model_ref.py --variant NAME --out DIR [--seed S]
    python python/gen_model_ref.py --check DIR

Nothing of the package is imported here, so that the two cannot share a mistake. DIR gets a model
in Hugging Face layout (config.json, generation_config.json, safetensors) whose weights are exact in
bfloat16 or INT4, and golden.safetensors. `--check` makes DIR's model again from the variant and the
seed named there, and compares: integers and weights exactly, results to 1e-9.

Letters: T prompt tokens, D hidden, W vocabulary, K experts a token, M MoE layers, G = 64 tokens of
a continuation. Position of the prompt's first token: 0; of the first continued token: T. All F64 or
I64. Tensors of golden.safetensors:

    prompt.ids                        [T]
    prompt.logits                     [T, W]
    layers.{i}.after_attention        [T, D]  residual stream after layer i's attention
    layers.{i}.after_mlp              [T, D]  and after its MLP: the layer's output
    layers.{i}.router.ids             [T, K]  MoE layers only; best first
    layers.{i}.router.weights         [T, K]  what multiplies the experts, scaling included
    layers.{i}.router.margin          [T]     gap at the cut-off of the experts' or groups' scores
    layers.{i}.router.order_margin    [T]     least gap between two chosen experts' scores
    layers.{i}.latents                [T, C + R]  where latents are cached in FP8: normed latents
    layers.{i}.cached                 [T, C + R]  and rotated rope parts, as made and as read
    greedy.ids, sampled.ids           [G]     continuations of the prompt; EOS does not stop them
    greedy.logits, sampled.logits     [G, W]  row g: the raw logits that token g was picked from
    greedy.margin, sampled.margin     [G]     best less second best logit; sampled: of logit + noise
    greedy.router_{ids,weights,margin}, sampled.*  [G - 1, M, K], margins [G - 1, M]: as above, of
                                              the rows at positions T .. T + G - 2
    greedy.{latents,cached}, sampled.*  [G - 1, L, C + R]

Sampling is at temperature 1, by Gumbel-max: argmax over v of logits[v] - log(-log(u)), where u
comes from Philox4x32-10 with key (seed low, seed high) and counter (v >> 2, p low, p high, 0), word
v & 3, p the position of the drawn token: u = ((word >> 9) + 0.5) / 2^23.

Metadata: variant, kv_cache_dtype ("auto" or "fp8": latents in e4m3), seed,
sample_seed, prompt_length, moe_layers (JSON list), and the least of each
margin: greedy_margin, sampled_margin, router_margin, router_order_margin ("inf" without MoE), and
distinct_greedy, how many ids the greedy continuation has.

The variants of model_ref/drafters.py are drafters: DIR gets the model of one of the others, and
DIR/drafter a DFlash drafter beside it, whose golden.safetensors holds, for both texts, prompt and
continuation (S tokens; R = G rounds, the first after the prompt's last token but one):

    greedy.features, sampled.features [S, D]         what the drafter makes of the model's streams
    greedy.hidden, sampled.hidden     [R, N - 1, D]  of each round's block, without its first slot
    greedy.logits, sampled.logits     [R, N - 1, W]
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from model_ref import checkpoint, drafters
from model_ref.drafters import DRAFTERS
from model_ref.forward import Cache, Model, Trace
from model_ref.philox import gumbel
from model_ref.variants import VARIANTS, Variant
from model_ref.weights import make_weights

STEPS = 64  # tokens of a continuation
CLOSE = 1e-9  # of two runs on different machines, relative to max(1, |x|)


@dataclass
class Generated:
    """generation_config: None for a drafter"""

    config: dict
    generation_config: dict | None
    tensors: dict[str, checkpoint.Stored]
    golden: dict[str, checkpoint.Stored]
    metadata: dict[str, str]
    model: Model | None = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The oracle: a small model and its golden outputs."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--variant", choices=[*VARIANTS, *DRAFTERS], metavar="NAME")
    what.add_argument("--list", action="store_true", help="names the variants")
    what.add_argument("--check", type=Path, metavar="DIR", help="makes DIR again and compares")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument(
        "--seed", type=int, help="default: the variant's, whose margins are healthy"
    )
    args = parser.parse_args()
    if args.list:
        for name, v in VARIANTS.items():
            print(f"{name:15} seed {v.seed:3}  {v.about}")
        for name, d in DRAFTERS.items():
            print(f"{name:15} drafter of {d.target}: {d.about}")
    elif args.check:
        differences = check(args.check)
        print("\n".join(differences) or f"{args.check}: as generated")
        return 1 if differences else 0
    elif args.out is None:
        parser.error("--variant needs --out DIR")
    else:
        draft = DRAFTERS.get(args.variant)
        name = draft.target if draft else args.variant
        made = generate(name, args.seed)
        write(made, args.out, VARIANTS[name].shards)
        if draft:
            made = generate_drafter(args.variant, made)
            write(made, args.out / "drafter", 1)
        print(" ".join(f"{k}={v}" for k, v in made.metadata.items()))
    return 0


def generate(name: str, seed: int | None = None) -> Generated:
    v = VARIANTS[name]
    seed = v.seed if seed is None else seed
    weights = make_weights(v, seed)
    c = v.config()
    fp8 = v.kv_cache_dtype == "fp8"
    model = Model(c, {"theta": v.theta, "yarn": v.yarn}, weights.value, fp8)
    prompt = np.random.default_rng([seed, 1]).integers(0, c["vocab_size"], v.prompt)
    sample_seed = (seed + 1) * 0x9E3779B97F4A7C15 % 2**63
    results = run(model, prompt, sample_seed)
    metadata = {
        "variant": name,
        "seed": str(seed),
        "sample_seed": str(sample_seed),
        "prompt_length": str(v.prompt),
        "kv_cache_dtype": v.kv_cache_dtype,
        "moe_layers": json.dumps([i for i in range(c["num_hidden_layers"]) if is_moe(c, i)]),
    } | summary(results)
    used = np.concatenate([results[f"{part}.ids"] for part in ("prompt", "greedy", "sampled")])
    unused = np.setdiff1d(np.arange(c["vocab_size"]), used).tolist()
    golden = {k: ("I64" if x.dtype.kind == "i" else "F64", x) for k, x in results.items()}
    bos, eos = unused[0], unused[-2:]
    config = hf_config(v, c, {"bos_token_id": bos, "eos_token_id": eos[0]})
    generation = {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False}
    return Generated(config, generation, weights.stored, golden, metadata, model)


def generate_drafter(name: str, target: Generated) -> Generated:
    v, seed = DRAFTERS[name], int(target.metadata["seed"])
    c = v.config(target.model.c)
    weights = drafters.make_weights(v, c, seed)
    results = {k: x for k, (_, x) in target.golden.items()}
    prompt = results["prompt.ids"]
    texts = {t: np.concatenate([prompt, results[f"{t}.ids"]]) for t in ("greedy", "sampled")}
    rounds = drafters.golden(c, v, weights, target.model, texts, len(prompt) - 1)
    golden = {k: ("F64", x) for k, x in rounds.items()}
    if v.int4:
        c["quantization_config"] = checkpoint.QUANTIZATION["int4"]
    return Generated(c, None, weights.stored, golden, {"variant": name, "seed": str(seed)})


def is_moe(c: dict, layer: int) -> bool:
    return layer >= c["first_k_dense_replace"]


def run(model: Model, prompt: np.ndarray, sample_seed: int) -> dict[str, np.ndarray]:
    cache = Cache()
    logits, trace = model.forward(prompt, cache)
    results = {"prompt.ids": prompt, "prompt.logits": logits}
    for i in range(len(trace.after_mlp)):
        results[f"layers.{i}.after_attention"] = trace.after_attention[i]
        results[f"layers.{i}.after_mlp"] = trace.after_mlp[i]
    for i, (latents, cached) in enumerate(zip(trace.latents, trace.cached, strict=True)):
        results[f"layers.{i}.latents"], results[f"layers.{i}.cached"] = latents, cached
    for i, chosen in trace.routes.items():
        for key in ("ids", "weights", "margin", "order_margin"):
            results[f"layers.{i}.router.{key}"] = getattr(chosen, key)
    for name, seed in (("greedy", None), ("sampled", sample_seed)):
        part = continue_from(model, cache.copy(), logits[-1], seed)
        results |= {f"{name}.{key}": x for key, x in part.items()}
    return results


def continue_from(
    model: Model, cache: Cache, logits: np.ndarray, seed: int | None
) -> dict[str, np.ndarray]:
    """STEPS tokens from the logits of the last row in the cache; without a seed, greedy."""
    ids, rows, margins, traces = [], [logits], [], []
    for _ in range(STEPS):
        score = rows[-1]
        if seed is not None:
            score = score + gumbel(seed, cache.length(), len(score))
        order = np.argsort(-score, kind="stable")
        ids.append(order[0])
        margins.append(score[order[0]] - score[order[1]])
        if len(ids) < STEPS:
            row, trace = model.forward(np.array(ids[-1:]), cache)
            rows.append(row[0])
            traces.append(trace)
    cached = {}
    if traces[0].cached:
        kinds = ("latents", "cached")
        cached = {k: np.array([np.concatenate(getattr(t, k)) for t in traces]) for k in kinds}
    return {
        "ids": np.array(ids),
        "logits": np.array(rows),
        "margin": np.array(margins),
        **cached,
        **{f"router_{key}": routes(traces, key) for key in ("ids", "weights", "margin")},
    }


def routes(traces: list[Trace], key: str) -> np.ndarray:
    """[steps, MoE layers, ...] of one-row forwards."""
    rows = [[getattr(r, key)[0] for r in trace.routes.values()] for trace in traces]
    return np.array(rows, np.int64 if key == "ids" else np.float64)


def summary(results: dict[str, np.ndarray]) -> dict[str, str]:
    def least(suffixes: tuple[str, ...]) -> str:
        found = [x for name, x in results.items() if name.endswith(suffixes)]
        return f"{min((x.min() for x in found if x.size), default=np.inf):.3g}"

    return {
        "greedy_margin": least(("greedy.margin",)),
        "sampled_margin": least(("sampled.margin",)),
        "router_margin": least(("router.margin", "router_margin")),
        "router_order_margin": least(("router.order_margin",)),
        "distinct_greedy": str(len(set(results["greedy.ids"].tolist()))),
    }


def hf_config(v: Variant, c: dict, special: dict) -> dict:
    text = c | special | hf_rope(v)
    if v.format in checkpoint.QUANTIZATION:
        text["quantization_config"] = checkpoint.QUANTIZATION[v.format]
    if not v.wrapper:
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"model_type": "moonvit", "hidden_size": 8},
        "tie_word_embeddings": True,  # the wrapper's default says nothing about the text model
    }


def hf_rope(v: Variant) -> dict:
    """The spelling of the hub's checkpoints, or that of transformers 5."""
    if v.rope_spelling == "rope_scaling":
        return {"rope_theta": v.theta, "rope_scaling": v.yarn and {"type": "yarn", **v.yarn}}
    kind = "yarn" if v.yarn else "default"
    return {"rope_parameters": {"rope_type": kind, "rope_theta": v.theta, **(v.yarn or {})}}


def write(made: Generated, out: Path, shards: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(out / "config.json", made.config)
    if made.generation_config:
        checkpoint.write_json(out / "generation_config.json", made.generation_config)
    checkpoint.write_model(out, made.tensors, shards)
    checkpoint.write_safetensors(out / "golden.safetensors", made.golden, made.metadata)


def check(path: Path) -> list[str]:
    """What differs in `path` from what its variant and seed give."""
    golden, metadata = checkpoint.read_safetensors(path / "golden.safetensors")
    name, seed = metadata["variant"], int(metadata["seed"])
    draft = DRAFTERS.get(name)
    made = generate(draft.target if draft else name, seed)
    made = generate_drafter(name, made) if draft else made
    differences = [f"metadata {k}" for k in made.metadata if metadata.get(k) != made.metadata[k]]
    for file, want in (
        ("config.json", made.config),
        ("generation_config.json", made.generation_config),
    ):
        if want is not None and json.loads((path / file).read_text()) != want:
            differences.append(file)
    pairs = ((checkpoint.read_model(path), made.tensors), (golden, made.golden))
    for got, want in pairs:
        differences += [f"missing or unknown: {name}" for name in sorted(got.keys() ^ want.keys())]
        differences += [n for n in sorted(got.keys() & want.keys()) if not same(got[n], want[n])]
    return differences


def same(a: checkpoint.Stored, b: checkpoint.Stored) -> bool:
    if a[0] != b[0] or a[1].shape != b[1].shape:
        return False
    if a[0] != "F64":
        return np.array_equal(a[1], b[1])
    return np.allclose(a[1], b[1], rtol=CLOSE, atol=CLOSE)


if __name__ == "__main__":
    sys.exit(main())
