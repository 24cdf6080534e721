"""Plain decoding of the demo model by kdtree and by transformers, float32, the same weights.

transformers has no kernels for the INT4 experts, so it gets them dequantised. Both decode the same
prompts greedily to the same length, in turns; a time is of the whole call, prompt included. Where
the tokens differ, the margin between the two tokens in transformers' logits says whether that is
more than rounding. Needs `pip install transformers`, which nothing else here does.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import harness
import torch
import transformers
from eager import int4_weights
from safetensors.torch import load_file, save_file

from kdtree import Engine, SamplingParams
from kdtree.cli import bench

NEAR_TIE = 1e-3  # logits closer than this are ordered by rounding
DEMO = Path(bench.__file__).parents[1] / "demo"


def dequantized(model: Path, directory: Path) -> None:
    """Writes the model without quantisation, float32, as transformers reads it."""
    tensors = {}
    for file in sorted(model.glob("model*.safetensors")):
        tensors |= load_file(file)
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            weights = int4_weights(tensor, tensors[name.replace("_packed", "_scale")].float())
            plain[name.removesuffix("_packed")] = weights
        elif not name.endswith((".weight_scale", ".weight_shape")):
            plain[name] = tensor.float()
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    for key in ("quantization_config", "compression_config", "auto_map"):
        config.pop(key, None)
    (directory / "config.json").write_text(json.dumps(config))


def load_transformers(model: Path, device: torch.device) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as name:
        dequantized(model, Path(name))
        reference, report = transformers.DeepseekV3ForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
    wrong = {key: report[key] for key in ("missing_keys", "unexpected_keys") if report[key]}
    assert not wrong, f"transformers does not read the weights: {wrong}"
    reference.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return reference.to(device).eval()


@torch.inference_mode()
def continue_transformers(reference, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=reference.device)
    mask = torch.ones_like(ids)
    out = reference.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def margin(reference, tokens: list[int], ours: int, theirs: int) -> float:
    """By how much transformers prefers its own next token to ours."""
    logits = reference(torch.tensor([tokens], device=reference.device)).logits[0, -1]
    return float(logits[theirs] - logits[ours])


def agreement(reference, prompt: list[int], ours: list[int], theirs: list[int]) -> dict:
    """Where two continuations part, None if they do not, and the margin there."""
    pairs = zip(ours, theirs, strict=True)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return {"differs_at": None, "margin": None}
    gap = margin(reference, prompt + theirs[:at], ours[at], theirs[at])
    return {"differs_at": at, "margin": gap}


def timed(device: torch.device, call) -> tuple[float, list[int]]:
    start = time.perf_counter()
    tokens = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, tokens


def compare(engine: Engine, reference, prompt: list[int], tokens: int, repeat: int) -> dict:
    """One row: both in turns, so that a slower machine slows both."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    calls = {
        "kdtree": lambda: engine.generate(prompt, params).token_ids,
        "transformers": lambda: continue_transformers(reference, prompt, tokens),
    }
    seconds, texts = {name: [] for name in calls}, {}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            taken, texts[name] = timed(engine.device, call)
            if turn:  # the first one warms up
                seconds[name].append(taken)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    return {
        "kind": "transformers",
        "prompt_tokens": len(prompt),
        "tokens": tokens,
        "tokens_per_s": rates["kdtree"],
        "baseline": f"transformers {transformers.__version__}",
        "baseline_tokens_per_s": rates["transformers"],
        "ratio": rates["kdtree"] / rates["transformers"],
        **agreement(reference, prompt, texts["kdtree"], texts["transformers"]),
    }


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    peaks = harness.peaks(arguments.device)
    engine = Engine(arguments.model, device=str(arguments.device), dtype="float32")
    reference = load_transformers(arguments.model, arguments.device)
    rows = [
        compare(
            engine, reference, engine.tokenizer.encode(text), arguments.max_tokens, arguments.repeat
        )
        for text in bench.PROMPTS
    ]
    facts = harness.header(arguments.device, peaks, arguments.commit)
    harness.write(f"transformers_{arguments.device.type}", rows, facts, arguments.out)
    ratio = statistics.geometric_mean(row["ratio"] for row in rows)
    print(f"kdtree decodes {ratio:.2f} times as many tokens a second as transformers")
    for row in rows:
        if row["margin"] is not None and abs(row["margin"]) > NEAR_TIE:
            raise SystemExit(f"the tokens differ by more than rounding: {row}")


if __name__ == "__main__":
    main()
