"""Byte-level BPE as Hugging Face stores it: tokenizer.json, read by the library tokenizers."""

import json
from pathlib import Path

import tokenizers

from kdtree.errors import CheckpointError, ConfigError
from kdtree.files import read_object
from kdtree.text.tokenizer import Tokenizer


class ByteLevelTokenizer(Tokenizer):
    """A model directory's tokenizer.json: DeepSeek's, for one.

    Control tokens are the special ones and those other added tokens that are no words: longer than
    a character and with a sign in them, as DeepSeek's turns "<｜User｜>", which its file does not
    call special. Those that are not special are tokens in any text, as with transformers, but in
    the messages of a chat.
    Raises CheckpointError where a file cannot be read, ConfigError where it is of another kind.
    """

    def __init__(self, directory: str | Path):
        path = Path(directory) / "tokenizer.json"
        data = read_object(path, CheckpointError)
        if not _is_byte_level(data.get("decoder") or {}):
            raise ConfigError(f"{path} has another decoder than ByteLevel, the supported one")
        try:
            added = _set_special(data)
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
        except Exception as error:  # the library raises no narrower class
            raise CheckpointError(f"{path} is not a tokenizer: {error!r}") from error
        self._tokenizer.encode_special_tokens = True  # control tokens are found by their names
        names = {
            id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        control = {name: id for id, name in names.items() if name in added}
        special = {control[name] for name in control if added[name]}
        spelled = {name: id for name, id in control.items() if id not in special}
        super().__init__(Path(directory), names, special, control, spelled)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def _encode_ordinary(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids if text else []

    def _id_of(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def _ordinary_bytes(self, id: int) -> bytes:
        token = self._tokenizer.id_to_token(id) if 0 <= id < 2**32 else None
        if token is None:
            return b""
        if not _BYTES.keys() >= set(token):
            return token.encode()  # spelled out in the vocabulary, not in byte letters
        return bytes(_BYTES[letter] for letter in token)


def _set_special(data: dict) -> dict[str, bool]:
    """Makes all control tokens special in a tokenizer.json; returns which were, by name."""
    control = {}
    for token in data.get("added_tokens") or ():
        name, special = token["content"], bool(token.get("special"))
        if special or _is_markup(name):
            control[name], token["special"] = special, True
    return control


def _is_markup(name: str) -> bool:
    return len(name) > 1 and not all(c.isalnum() or c.isspace() for c in name)


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and any(map(_is_byte_level, parts))
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters: printable Latin-1 is itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
