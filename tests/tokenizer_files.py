"""Small tokenizers with the shapes of published ones, and real ones where they are installed."""

import base64
import importlib.util
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the cat then the thing, in the return of the def; THE Cat's 1234 things",
    "你好，世界。你好 naïve café ├── 🙂🙂 \n\n\t  return x  \r\n",
]

# DeepSeek-V3's order: digits, Chinese and Japanese, then the rest.
DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
DEEPSEEK_OTHERS = ["<｜User｜>", "<｜Assistant｜>", "<|EOT|>", "<think>", "</think>"]

# Kimi's names of slots, by their distance from the first.
KIMI_SLOTS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
KIMI_TEXT = {22, 23}  # not special: they have text


def train(splits, vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE; the single bytes are its first tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 9, trainer)
    return tokenizer


def write_deepseek(directory: Path, vocab_size: int = 330) -> None:
    """tokenizer.json: three special tokens, others in the middle and at the end."""
    tokenizer = train(DEEPSEEK_SPLITS, vocab_size)
    tokenizer.add_special_tokens(DEEPSEEK_SPECIAL)
    tokenizer.add_tokens([AddedToken(n, special=False, normalized=True) for n in DEEPSEEK_OTHERS])
    tokenizer.add_special_tokens(["<｜place▁holder▁no▁0｜>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": {"content": DEEPSEEK_SPECIAL[0]}, "eos_token": DEEPSEEK_SPECIAL[1]}
    write_config(directory, config)


def published_deepseek() -> Path | None:
    """DeepSeek-V3's tokenizer.json, which the package litellm carries."""
    found = importlib.util.find_spec("litellm")
    if found is None:
        return None
    path = Path(found.origin).parent / "litellm_core_utils/tokenizers/deepseek_tokenizer.json"
    return path if path.is_file() else None


def kimi_ranks() -> dict[bytes, int]:
    """Single bytes, then words byte by byte, as tiktoken merges them; 你 and 🙂 stay in pieces."""
    words = [" the", "then", " cat", "THE", "'s", "123", "  ", "\n\n", "世界", "ï", "├", "<|"]
    words += ["A世", "a世", "世x"]  # which the pattern cuts apart
    grown = [word.encode()[:n] for word in words for n in range(2, len(word.encode()) + 1)]
    tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *grown])
    return {token: rank for rank, token in enumerate(tokens)}


def write_kimi(directory: Path) -> dict[bytes, int]:
    """tiktoken.model and tokenizer_config.json; returns the ranks."""
    ranks = kimi_ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("".join(lines))
    tokens = {
        str(len(ranks) + slot): {"content": name, "special": slot not in KIMI_TEXT}
        for slot, name in KIMI_SLOTS.items()
    }
    config = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": tokens}
    write_config(directory, config)
    return ranks


def write_config(directory: Path, config: dict) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """The single-byte token of each byte."""
    singles = {tokenizer.token_bytes(id): id for id in range(len(tokenizer))}
    return [singles[bytes([byte])] for byte in data]
