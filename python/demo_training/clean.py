"""What of a source's page is worth learning: HTML to text, and no copies, tables or long runs.

`html_text` reads a page; `Cleaner.clean` returns the document that is kept, or None. Documents
that would teach a small model to loop are left out: copies, near copies, boilerplate that many
files share, tables, lists of numbers, machine-made text. Fetching is not known here.
"""

import hashlib
import re
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser

MAX_RUN = 8  # lines of one outline in a row that are kept
SKIP_TAGS = set("script style nav header footer form button select svg math head aside".split())
SKIP_CLASS = re.compile(
    r"(?<!with)sidebar|related|navbar|toctree|\btoc\b|contents|headerlink|footer|breadcrumb|navheader|"
    r"navfooter|\bmenu|linenos|glr-timing|glr-download|spirit-nav|innertoc|viewcode|hideme|nosearch",
    re.I,
)
BLOCK_TAGS = set(
    "p div section h1 h2 h3 h4 h5 h6 ul ol li dl dt dd pre table tr blockquote br article".split()
)
VOID_TAGS = set("br img hr input meta link col area base wbr source track param embed".split())
LICENCE = re.compile(r"copyright|licen[cs]e|all rights reserved|SPDX", re.I)
COMMON = set("the of to a in is and for that be this it as with on are by or an not if can".split())


class _Text(HTMLParser):
    """The readable text of an HTML page: paragraphs a line each, preformatted text as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skip, self.depth, self.pre = "", 0, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skip:
            self.depth += tag == self.skip
            return
        named = " ".join(v or "" for k, v in attrs if k in ("class", "id", "role"))
        if tag not in VOID_TAGS and tag not in ("html", "body", "main"):
            if tag in SKIP_TAGS or SKIP_CLASS.search(named) or named == "navigation":
                self.skip, self.depth = tag, 1
                return
        if tag in BLOCK_TAGS:
            self.parts.append("\n" if tag in ("br", "tr") else "\n\n")
        self.pre += tag == "pre"
        if tag == "li":
            self.parts.append("- ")
        elif "classifier" in named:
            self.parts.append(" : ")
        elif tag in ("td", "th"):
            self.parts.append("  ")

    def handle_endtag(self, tag: str) -> None:
        if self.skip:
            self.depth -= tag == self.skip
            if self.depth == 0:
                self.skip = ""
            return
        if tag == "pre":
            self.pre = max(0, self.pre - 1)
        if tag in BLOCK_TAGS and tag != "br":
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    text = "".join(parser.parts).replace("\xa0", " ").replace("¶", "")
    text = re.sub(r"#?[ \t]*\n", "\n", text)
    text = re.sub(r"(?m)^-\s+(- )?", "- ", re.sub(r"\n{3,} ?", "\n\n", text))
    text = re.sub(r"(?m)^(.{1,90})\n\n\1$", r"\1", text)  # a heading twice
    return re.sub(r"(?<=\n)(- [^\n]*\n)\n(?=- )", r"\1", text).strip()


class Cleaner:
    """Decides what of a document is kept, remembering every document before it."""

    def __init__(self) -> None:
        self.files: set[bytes] = set()
        self.lines: set[int] = set()
        self.paragraphs: set[int] = set()

    def clean(self, kind: str, text: str) -> str | None:
        """The document without repeated paragraphs and runs, or None if it is not worth reading."""
        text = re.sub(r"[ \t\r\f]+\n", "\n", text.expandtabs(4))
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=12).digest()
        if digest in self.files or not 300 < len(text) < 400_000:
            return None
        self.files.add(digest)
        lines = {hash(shape(x)) for x in text.split("\n") if len(x.strip()) > 25}
        seen = len(lines & self.lines)
        if lines and seen > 0.5 * len(lines):
            return None
        kept = cut_runs("\n\n".join(self.novel(kind, text))).strip("\n") + "\n"
        if len(kept) < 0.5 * len(text) or not readable(kind, kept):
            return None
        self.lines |= lines
        return kept

    def novel(self, kind: str, text: str) -> Iterator[str]:
        """Paragraphs that no document had before, licence headers left out."""
        for i, paragraph in enumerate(text.split("\n\n")):
            if i < 3 and kind == "code" and paragraph.lstrip().startswith("#"):
                if LICENCE.search(paragraph):
                    paragraph = re.sub(r"\A(\s*#[^\n]*(\n|\Z))+", "", paragraph)
            key = hash(shape(paragraph))
            if len(paragraph) >= (40 if kind == "prose" else 160):
                if key in self.paragraphs:
                    continue
                self.paragraphs.add(key)
            if paragraph.strip():
                yield paragraph


def shape(text: str) -> str:
    """What two near copies share: letters and the places of digits."""
    return re.sub(r"\d+", "0", re.sub(r"[\W_]+", " ", text.lower())).strip()


def cut_runs(text: str) -> str:
    """At most MAX_RUN lines in a row that differ only in their words and numbers."""
    kept, last, run = [], "", 0
    for line in text.split("\n"):
        outline = re.sub(r"\w+", "a", line)
        run = run + 1 if outline == last else 0
        last = outline
        if run < MAX_RUN or not line.strip():
            kept.append(line)
    return "\n".join(kept)


def readable(kind: str, text: str) -> bool:
    """No table, list of numbers, machine-made or repetitive text, and mostly English or code."""
    lines = [x for x in text.split("\n") if x.strip()]
    if len(text) < 300 or sum(not c.isascii() for c in text) > 0.01 * len(text):
        return False
    if max(map(len, lines)) > (400 if kind == "code" else 6000):
        return False
    if sum(c.isdigit() for c in text) > 0.08 * len(text):
        return False
    data = text.encode()
    if len(zlib.compress(data[:32768], 6)) < (0.17 if kind == "code" else 0.2) * len(data[:32768]):
        return False
    if kind == "prose":
        words = re.findall(r"[a-z]+", text.lower())
        common = sum(w in COMMON for w in words)
        return common > 0.2 * len(words) and len(text) / len(lines) > 30
    return len({shape(x) for x in lines}) > 0.6 * len(lines)
