"""What every tokenizer does: special tokens in a text, the beginning of a sequence, decoding."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from kdtree.errors import ConfigError
from kdtree.text.files import named_tokens, read_config


class ControlTokens:
    """Tokens that stand for no text of their own: turns, the end of a sequence, tool calls.

    ids: of each by its name
    """

    def __init__(self, ids: dict[str, int]):
        if "" in ids:
            raise ConfigError(f"the tokenizer gives token {ids['']} an empty name")
        self.ids = ids
        self._lengths: dict[str, list[int]] = {}  # by first character, the longest first
        for name in sorted(ids, key=len, reverse=True):
            lengths = self._lengths.setdefault(name[0], [])
            if len(name) not in lengths:
                lengths.append(len(name))

    @property
    def signs(self) -> set[str]:
        """A character of each name: the first that is no letter or digit, if it has any."""
        return {next((c for c in name if not c.isalnum()), name[0]) for name in self.ids}

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Start, end and id of each name in the text: the leftmost, of several there the longest"""
        starts = sorted(start for first in self._lengths for start in _all(first, text))
        done = 0
        for start in starts:
            if start < done:
                continue
            for length in self._lengths[text[start]]:
                id = self.ids.get(text[start : start + length])
                if id is not None:
                    done = start + length
                    yield start, done, id
                    break


class Tokenizer(ABC):
    """A byte-level BPE and the tokens added to it.

    directory: of tokenizer_config.json, if any
    added: names of the added tokens by id; special: those of them that have no text when decoded
    control: ids by name of the added tokens that a user's words must not turn into
    spelled: ids by name of those that `encode` takes as such wherever a text spells them
    """

    def __init__(
        self,
        directory: Path,
        added: dict[int, str],
        special: set[int],
        control: dict[str, int],
        spelled: dict[str, int],
    ):
        self.control = ControlTokens(control)
        self._spelled = ControlTokens(spelled)
        self._added, self._special = added, special
        self._bos = self._read_bos(directory)

    @abstractmethod
    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones included."""

    @abstractmethod
    def _encode_ordinary(self, text: str) -> list[int]:
        """The text's tokens, none of them a control token."""

    @abstractmethod
    def _ordinary_bytes(self, id: int) -> bytes:
        """The bytes of a token that was not added; none for an id beyond the vocabulary."""

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The text's tokens, after the beginning-of-sequence token if the model's files ask for it.

        special: take control tokens that are spelled out in the text as such. Text from outside is
        encoded without, so that "<|im_end|>" in a user's text ends no turn.
        Raises TypeError on what is no string, ValueError on one that is no valid Unicode.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, wants a string")
        return self._bos + self.encode_marked(text, {}, self.control if special else self._spelled)

    def encode_marked(
        self, text: str, marks: dict[str, str], names: ControlTokens | None = None
    ) -> list[int]:
        """The text's tokens, control tokens included: of all names, or those given.

        marks: characters that stand for others, with which they spell no name
        Raises ValueError on a text that is no valid Unicode.
        """
        _check_unicode(text)
        names, table = names or self.control, str.maketrans(marks)
        ids, done = [], 0
        for start, end, id in names.find(text):
            ids += self._encode_ordinary(text[done:start].translate(table))
            ids.append(id)
            done = end
        return ids + self._encode_ordinary(text[done:].translate(table))

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of the tokens; invalid UTF-8 becomes U+FFFD. special: as in token_bytes."""
        data = b"".join(self.token_bytes(id, special) for id in ids)
        return data.decode(errors="replace")

    def token_bytes(self, id: int, special: bool = False) -> bytes:
        """The bytes of one token; none for an id beyond the vocabulary.

        special: the name of a special token, which else has no bytes
        """
        name = self._added.get(id)
        if name is None:
            return self._ordinary_bytes(id)
        return name.encode() if special or id not in self._special else b""

    def _id_of(self, name: str) -> int | None:
        """Of an added token."""
        return next((id for id, added in self._added.items() if added == name), None)

    def _read_bos(self, directory: Path) -> list[int]:
        config = read_config(directory)
        if not config.get("add_bos_token"):
            return []
        bos = named_tokens(config).get("bos_token")
        id = self._id_of(bos) if bos is not None else None
        if id is None:
            raise ConfigError(
                f"{directory / 'tokenizer_config.json'} has bos_token {bos!r}, which is no token "
                "of the vocabulary"
            )
        return [id]


def _all(character: str, text: str) -> Iterator[int]:
    at = text.find(character)
    while at >= 0:
        yield at
        at = text.find(character, at + 1)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode at character {error.start}") from None
