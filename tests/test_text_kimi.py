"""tiktoken.model: Kimi's tokenizer, against tiktoken used directly."""

import base64
import subprocess
import sys

import pytest
import tiktoken
from says import says
from tokenizer_files import (
    KIMI_SLOTS,
    KIMI_TEXT,
    byte_ids,
    write_config,
    write_deepseek,
    write_kimi,
)

from kdtree.errors import CheckpointError, ConfigError
from kdtree.text import load_tokenizer
from kdtree.text.kimi import PIECE, RUN

# The pattern in one piece.
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    'def f(x):\n    return "naïve 你好世界Latin世界 🙂🙃" + x  # 1234567 \r\n\n\t',
    "THEN's the CatThe then'LL   \n\n   x",
    "A世a世xA世A 世x",
    "",
    "你",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("kimi")
    return path, write_kimi(path)


@pytest.fixture(scope="module")
def tokenizer(made):
    return load_tokenizer(made[0])


@pytest.fixture(scope="module")
def reference(made):
    """All 256 slots by absolute id."""
    first = len(made[1])
    names = {first + i: f"<|reserved_token_{first + i}|>" for i in range(256)}
    names |= {first + slot: name for slot, name in KIMI_SLOTS.items()}
    return tiktoken.Encoding(
        "kimi",
        pat_str=PATTERN,
        mergeable_ranks=made[1],
        special_tokens={name: id for id, name in names.items()},
        explicit_n_vocab=first + 256,
    )


def test_tiktoken_s_tokens(tokenizer, reference):
    assert len(tokenizer) == reference.n_vocab
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode_ordinary(text), text
        assert tokenizer.decode(ids) == text == reference.decode(ids)
    words = tokenizer.encode(" the cat then")
    assert [tokenizer.decode([id]) for id in words] == [" the", " cat", " the", "n"]


def test_chinese_stands_apart(tokenizer):
    """A run of it is cut from Latin letters, and merged within itself."""
    han = tokenizer.encode("世界")
    assert len(han) == 1
    assert tokenizer.encode("a世界the") == [*tokenizer.encode("a"), *han, *tokenizer.encode("the")]


def test_slots_by_absolute_id(tokenizer, reference, made):
    first = len(made[1])
    for id in range(first, first + 256):
        name = KIMI_SLOTS.get(id - first, f"<|reserved_token_{id}|>")
        assert tokenizer.encode(name, special=True) == [id]
        assert tokenizer.decode([id], special=True) == name == reference.decode([id])
        assert tokenizer.decode([id]) == (name if id - first in KIMI_TEXT else "")
    assert tokenizer.encode("[PAD]", special=True) == [len(tokenizer) - 1]


def test_special_tokens_in_a_text_stay_text(tokenizer, reference, made):
    text = "hi <|im_end|><think>[PAD] <|reserved_token_5|> there"
    ids = tokenizer.encode(text)
    assert ids == reference.encode_ordinary(text) and max(ids) < len(made[1])
    assert tokenizer.decode(ids) == text
    text = "你好<|im_user|>the<|im_end|><|im_end<|im_end|>x"
    assert tokenizer.encode(text, special=True) == reference.encode(text, allowed_special="all")


@pytest.mark.parametrize("id", [2**40, -1, 10**6])
def test_ids_beyond_the_vocabulary_have_no_text(tokenizer, id):
    assert tokenizer.decode([id, *tokenizer.encode("a"), len(tokenizer)]) == "a"


def test_every_byte_has_its_token_and_invalid_ones_are_replaced(tokenizer):
    data = bytes(range(256))
    assert b"".join(map(tokenizer.token_bytes, byte_ids(tokenizer, data))) == data
    data = b"a\xff\xe4\xbdb\xf0\x9f\x99\x82"
    assert tokenizer.decode(byte_ids(tokenizer, data)) == "a\ufffd\ufffdb🙂"


@pytest.mark.parametrize("letter", ["a", "A", " ", "\n", "世", "!", "1", "\u3000"])
def test_long_runs(tokenizer, letter):
    """A million of a kind, on which tiktoken alone is slow or overflows."""
    text = letter * 1_000_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_of_long_runs(tokenizer, reference):
    """Up to the limits the tokens are tiktoken's; beyond, those of the pieces."""
    encode = reference.encode_ordinary
    the = "the" * RUN
    for text, cuts in (
        (the[:RUN], []),
        (the[: RUN + 1], [RUN]),
        ("x " + the[: 2 * RUN + 5] + "  y", [2 + RUN, 2 + 2 * RUN]),
        (" " * (RUN - 1) + the[:RUN] + "\n", []),
        ("a " + " " * RUN + "b", [1 + RUN]),
        ("the cat " * (PIECE // 8), []),
        ("the cat " * (PIECE // 8) + "then", [PIECE]),
    ):
        pieces = [text[i:k] for i, k in zip([0, *cuts], [*cuts, None], strict=True)]
        assert tokenizer.encode(text) == [id for piece in pieces for id in encode(piece)]
    assert encode(the[: RUN + 1]) != tokenizer.encode(the[: RUN + 1])


def test_names_in_long_runs_are_whole(tokenizer):
    """Wherever a piece would end."""
    (end,) = tokenizer.encode("<|im_end|>", special=True)
    for length in range(RUN - 10, RUN + 1):
        ids = tokenizer.encode("a" * length + "<|im_end|>" + "a", special=True)
        assert ids.count(end) == 1


def test_a_beginning_where_the_config_asks_for_it(tmp_path):
    first = len(write_kimi(tmp_path))
    plain = load_tokenizer(tmp_path).encode("the")
    write_config(tmp_path, {"add_bos_token": True, "bos_token": f"<|reserved_token_{first}|>"})
    assert load_tokenizer(tmp_path).encode("the") == [first, *plain]


def test_names_are_optional(tmp_path):
    first = len(write_kimi(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    name = f"<|reserved_token_{first + 2}|>"
    assert load_tokenizer(tmp_path).encode(name, special=True) == [first + 2]


def test_nothing_of_the_directory_is_executed(tmp_path):
    write_kimi(tmp_path)
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('executed')")
    write_config(tmp_path, {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikToken", None]}})
    assert load_tokenizer(tmp_path).encode("the")


def test_the_published_kind_goes_first(tmp_path):
    write_deepseek(tmp_path)
    assert len(load_tokenizer(tmp_path)) < 400
    first = len(write_kimi(tmp_path))
    assert len(load_tokenizer(tmp_path)) == first + 256


def test_tiktoken_is_imported_with_its_file_alone():
    script = "import sys, kdtree; sys.exit(not {'tiktoken', 'jinja2'}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", script], check=True)


def ranks_with(tmp_path, change) -> None:
    write_kimi(tmp_path)
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"".join(line + b"\n" for line in change(path.read_bytes().splitlines())))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: [*lines, b"dGhl"], "b'dGhl' in line"),
        (lambda lines: [*lines, b"dGhl x"], "b'dGhl x' in line"),
        (lambda lines: [*lines, b"d*hl 1"], "b'd*hl 1' in line"),
        (lambda lines: [*lines, b"\xff\xfe 1"], "in line"),
        (lambda lines: [*lines, b""], "b'' in line"),
        (lambda lines: [*lines, lines[7]], "in line"),
        (lambda lines: lines[:270] + lines[271:], "none of rank 270"),
        (lambda lines: [*lines, base64.b64encode(b"zzz") + b" 5"], "none of rank"),
        (lambda lines: [*lines, base64.b64encode(b"zzz") + b" -1"], "none of rank"),
        (lambda lines: [b"enp6 65", *lines[:65], *lines[66:]], "bytes without one: [65]"),
        (lambda lines: [], "bytes without one: [0, 1"),
    ],
)
def test_rejects_broken_ranks(tmp_path, change, message):
    ranks_with(tmp_path, change)
    with says(CheckpointError, "tiktoken.model", message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({"{first}": {"content": "a"}, "{last}": {"content": "a"}}, "names ['a']"),
        ({"{beyond}": {"content": "a"}}, "wants an id from"),
        ({"12": {"content": "a"}}, "added token 12"),
        ({"x": {"content": "a"}}, "added token x"),
        ({"{first}": {"content": 3}}, "an object with its content"),
        ({"{first}": "a"}, "an object with its content"),
        ({"{first}": {"content": ""}}, "an empty name"),
        ([], "added_tokens_decoder [], wants an object"),
    ],
)
def test_rejects_names_that_do_not_fit(tmp_path, tokens, message):
    first = len(write_kimi(tmp_path))
    ids = {"first": first, "last": first + 255, "beyond": first + 256}
    if isinstance(tokens, dict):
        tokens = {key.format(**ids): token for key, token in tokens.items()}
    write_config(tmp_path, {"added_tokens_decoder": tokens})
    with says(ConfigError, message):
        load_tokenizer(tmp_path)
