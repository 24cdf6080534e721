"""Kimi's and Moonlight's tokenizer: tiktoken.model, read without any code of the checkpoint's."""

import re
from base64 import b64decode
from pathlib import Path

import tiktoken

from kdtree.errors import CheckpointError, ConfigError
from kdtree.text.files import read_config
from kdtree.text.tokenizer import Tokenizer

SLOTS = 256  # ids after the ranks, each an added token whether it is named or not
RUN = 25_000  # characters of a run of blanks or of others; far longer ones overflow tiktoken
PIECE = 400_000  # characters that tiktoken is given at most

# How text is cut before it is merged. Letters but Chinese ones, in lower case after any capitals
# or the reverse, with an English ending; && is the intersection of two classes.
_WORD = r"[^\r\n\p{L}\p{N}]?"
_CAPITAL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD}{_CAPITAL}*{_SMALL}+{_ENDING}",
        f"{_WORD}{_CAPITAL}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class KimiTokenizer(Tokenizer):
    """tiktoken.model's n ranks and 256 slots after them, which tokenizer_config.json names.

    A slot without a name is "<|reserved_token_ID|>", ID from n to n + 255. All of them are control
    tokens: no text turns into one unless `encode` is told so. Those that the file does not call
    special have text when decoded.
    A run of more than 25,000 blanks or other characters is encoded in pieces of that length, and so
    is text of more than 400,000 characters, as tiktoken overflows on longer ones.
    Raises CheckpointError on a broken file, ConfigError on names that do not fit it.
    """

    def __init__(self, directory: str | Path):
        path = Path(directory) / "tiktoken.model"
        ranks = _read_ranks(path)
        self._ranks = len(ranks)
        added, special = _read_slots(Path(directory), self._ranks)
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        control = {name: id for id, name in added.items()}
        super().__init__(Path(directory), added, special, control, spelled={})

    def __len__(self) -> int:
        return self._ranks + SLOTS

    def _encode_ordinary(self, text: str) -> list[int]:
        pieces = (text[i : i + PIECE] for i in range(0, len(text), PIECE))
        return [
            id
            for piece in pieces
            for short in _short_runs(piece)
            for id in self._encoding.encode_ordinary(short)
        ]

    def _ordinary_bytes(self, id: int) -> bytes:
        return self._encoding.decode_single_token_bytes(id) if 0 <= id < self._ranks else b""


def _short_runs(text: str) -> list[str]:
    """The text, cut wherever a run of blanks or of other characters has gone on for RUN of them."""
    runs = re.finditer(r"\s+|\S+", text)
    cuts = [at for run in runs for at in range(run.start() + RUN, run.end(), RUN)]
    return [text[i:k] for i, k in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Each line is a token's bytes in base64 and its rank; the ranks are 0 to n - 1."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            data, rank = line.split()
            token = b64decode(data, validate=True)
            if token in ranks:
                raise ValueError
            ranks[token] = int(rank)
        except ValueError:
            raise CheckpointError(
                f"{path} has {line[:80]!r} in line {number}, wants another token in base64, and "
                "its rank"
            ) from None
    absent = sorted(set(range(len(ranks))) - set(ranks.values()))
    if absent:
        raise CheckpointError(f"{path} has {len(ranks)} tokens, but none of rank {absent[0]}")
    bytes_absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if bytes_absent or b"" in ranks:
        raise CheckpointError(
            f"{path} wants a token for each byte and none that is empty; bytes without one: "
            f"{bytes_absent[:8]}"
        )
    return ranks


def _read_slots(directory: Path, first: int) -> tuple[dict[int, str], set[int]]:
    """Names of the slots by id, and which have no text when decoded."""
    path = directory / "tokenizer_config.json"
    tokens = read_config(directory).get("added_tokens_decoder", {})
    if not isinstance(tokens, dict):
        raise ConfigError(f"{path} has added_tokens_decoder {tokens!r}, wants an object")
    added = {id: f"<|reserved_token_{id}|>" for id in range(first, first + SLOTS)}
    special = set(added)
    for key, token in tokens.items():
        name = token.get("content") if isinstance(token, dict) else None
        if not isinstance(name, str) or not key.isdecimal() or int(key) not in added:
            raise ConfigError(
                f"{path} has added token {key}: {token!r}, wants an id from {first} to "
                f"{first + SLOTS - 1} and an object with its content"
            )
        added[int(key)] = name
        if not token.get("special", True):
            special.discard(int(key))
    if len(set(added.values())) < SLOTS:
        twice = sorted({n for n in added.values() if list(added.values()).count(n) > 1})
        raise ConfigError(f"{path} gives several added tokens the names {twice}")
    return added, special
