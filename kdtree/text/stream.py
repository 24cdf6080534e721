"""Text as its tokens arrive, and the strings that stop it."""

import codecs

from kdtree.text.tokenizer import Tokenizer


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
