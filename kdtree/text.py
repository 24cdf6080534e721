"""Between text and tokens: the tokenizer, text as its tokens arrive, and stop strings.

Knows byte-level BPE as Hugging Face stores it (tokenizer.json); what the tokens mean to a model
(end of sequence, chat turns) is not known here. Everything that decodes works token by token, so
that a text can end anywhere inside a run of tokens that one round accepts.
"""

import codecs
import json
import re
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from kdtree.errors import CheckpointError, ConfigError


class Tokenizer:
    """Byte-level BPE of a model directory: tokenizer.json and, if any, tokenizer_config.json.

    Raises CheckpointError where a file is missing or broken, ConfigError where the tokenizer is of
    another kind.
    """

    def __init__(self, directory: str | Path):
        path = Path(directory) / "tokenizer.json"
        if not _is_byte_level(_read_json(path).get("decoder") or {}):
            raise ConfigError(f"{path} has another decoder than ByteLevel, the supported one")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer.encode_special_tokens = True  # in text they are text: see encode
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self._special = {token.content: id for id, token in added.items() if token.special}
        names = sorted(self._special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names))) if names else None
        self._bos = self._read_bos(Path(directory) / "tokenizer_config.json")

    def __len__(self) -> int:
        """Tokens of the vocabulary, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The text's tokens, after the beginning-of-sequence token if the model's files ask for it.

        special: take special tokens that are spelled out in the text as such. Text from outside is
        encoded without, so that "<|im_end|>" in a user's text ends no turn.
        Raises TypeError on what is no string, ValueError on one that is no valid Unicode.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, wants a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode at character {error.start}") from None
        ids = [] if self._bos is None else [self._bos]
        start = 0
        for match in self._split.finditer(text) if special and self._split else ():
            ids += self._encode_plain(text[start : match.start()])
            ids.append(self._special[match.group()])
            start = match.end()
        return ids + self._encode_plain(text[start:])

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of the tokens; invalid UTF-8 becomes U+FFFD. special: as in token_bytes."""
        data = b"".join(self.token_bytes(id, special) for id in ids)
        return data.decode(errors="replace")

    def token_bytes(self, id: int, special: bool = False) -> bytes:
        """The bytes of one token; none for an id beyond the vocabulary.

        special: the text of a special token, which else has no bytes
        """
        content = self._added.get(id)
        if content is not None:
            return content.encode() if special or content not in self._special else b""
        token = self._tokenizer.id_to_token(id) if 0 <= id < 2**32 else None
        if token is None:
            return b""
        if not _BYTES.keys() >= set(token):
            return token.encode()  # spelled out in the vocabulary, not in byte letters
        return bytes(_BYTES[letter] for letter in token)

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def _read_bos(self, path: Path) -> int | None:
        config = _read_json(path) if path.is_file() else {}
        if not config.get("add_bos_token"):
            return None
        bos = config.get("bos_token")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        id = self._tokenizer.token_to_id(bos) if isinstance(bos, str) else None
        if id is None:
            raise ConfigError(f"{path} has bos_token {bos!r}, which is no token of the vocabulary")
        return id


class Detokenizer:
    """Text of tokens that come one at a time: what is fed and flushed adds up to `decode` of all.

    A character that is still incomplete, at most 3 bytes, is held back; bytes that can begin no
    character become U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """U+FFFD if the text ends inside a character."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Releases text until a stop string is complete; `stop` is that string, None before.

    The first to be complete ends the text, the longest of several that end together: so the text
    does not depend on the pieces that it is fed in. What may yet become a stop string is held back.
    """

    def __init__(self, stop: tuple[str, ...]):
        if not all(stop):
            raise ValueError("stop holds an empty string, which would stop everywhere")
        self.stop: str | None = None
        self._stops = stop
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certain by now; nothing once a stop string was met."""
        if self.stop is not None:
            return ""
        text = self._held + text
        starts = [(text.find(stop), stop) for stop in self._stops]
        met = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if met:
            _, end, self.stop = min(met)
        else:
            end = len(text) - self._open(text)
        self._held = "" if met else text[end:]
        return text[:end]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        text, self._held = self._held, ""
        return text

    def _open(self, text: str) -> int:
        """Length of the longest end of text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters: printable Latin-1 is itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and any(map(_is_byte_level, parts))
    return decoder.get("type") == "ByteLevel"


def _read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, wants an object")
    return data
