"""tokenizer.json: byte-level BPE of DeepSeek's shape, and DeepSeek's own where it is installed."""

import json
import shutil

import pytest
import tokenizers
from says import says
from tokenizer_files import (
    DEEPSEEK_OTHERS,
    DEEPSEEK_SPECIAL,
    byte_ids,
    published_deepseek,
    write_config,
    write_deepseek,
)

from kdtree.errors import CheckpointError, ConfigError
from kdtree.text import load_tokenizer

TEXT = 'def f(x):\n    return "naïve 你好ひらがな 🙂🙃" + x  # 12345  \r\n\n\t'
CONTROL = "hi <｜end▁of▁sentence｜> there<｜User｜>what <think> 你好</think>the"
ORDINARY = [TEXT, "", " ", "a" * 3000, "\n" * 200, "12345678 90", "İstanbul e\u0301 \u200b|<|"]


@pytest.fixture(scope="module", params=["built", "published"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek")
    if request.param == "built":
        write_deepseek(path)
        return path
    published = published_deepseek()
    if published is None:
        pytest.skip("the package litellm, which carries DeepSeek's tokenizer, is not installed")
    shutil.copy(published, path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def library(directory):
    """The same file, read by the library alone."""
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_the_library_s_tokens(tokenizer, library):
    for special in (False, True):
        library.encode_special_tokens = not special
        for text in (*ORDINARY, CONTROL, CONTROL * 3):
            want = library.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special) == want, text


def test_text_survives_the_tokens(tokenizer):
    for text in (*ORDINARY, CONTROL):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert len(tokenizer.encode("a  the return\n")) < len("a  the return\n")


def test_size_and_places_of_the_added_tokens(tokenizer, directory):
    """All are there, by the ids that the file gives them."""
    file = json.loads((directory / "tokenizer.json").read_text())
    assert len(tokenizer) == 1 + max(token["id"] for token in file["added_tokens"])
    if len(tokenizer) > 1000:
        assert len(tokenizer) == 129_280 and tokenizer.encode("<｜User｜>") == [128_803]
    for token in file["added_tokens"]:
        name, id = token["content"], token["id"]
        assert tokenizer.encode(name, special=True) == [id]
        assert tokenizer.decode([id], special=True) == name
        assert tokenizer.decode([id]) == ("" if token["special"] else name)


def test_every_byte_has_its_token(tokenizer):
    data = bytes(range(256))
    assert b"".join(map(tokenizer.token_bytes, byte_ids(tokenizer, data))) == data


def test_special_tokens_in_a_text_stay_text(tokenizer):
    for name in DEEPSEEK_SPECIAL:
        ids = tokenizer.encode(f"hi {name}{name}", special=False)
        assert len(ids) > 4 and not set(ids) & set(tokenizer.encode(name, special=True))


def test_other_added_tokens_are_tokens_in_text_but_not_in_messages(tokenizer):
    for name in DEEPSEEK_OTHERS:
        (id,) = tokenizer.encode(name)
        ids = tokenizer.encode_marked("\ue000" + name[1:], {"\ue000": name[0]})
        assert id not in ids and tokenizer.decode(ids) == name


@pytest.mark.parametrize("id", [10**6, 2**40, -1])
def test_ids_beyond_the_vocabulary_have_no_text(tokenizer, id):
    assert tokenizer.token_bytes(id) == b""
    assert tokenizer.decode([id, *tokenizer.encode("a"), id]) == "a"


@pytest.mark.parametrize("length", [300_000])
@pytest.mark.parametrize("text", ["a", " ", "\n", "!"])
def test_long_runs(tokenizer, text, length):
    assert tokenizer.decode(tokenizer.encode(text * length)) == text * length


@pytest.fixture
def built(tmp_path):
    write_deepseek(tmp_path)
    return tmp_path


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("name", [DEEPSEEK_SPECIAL[0], {"content": DEEPSEEK_SPECIAL[0]}])
def test_beginning_of_sequence_is_the_configs_choice(built, add, name):
    plain = load_tokenizer(built).encode("the")
    write_config(built, {"add_bos_token": add, "bos_token": name})
    tokenizer = load_tokenizer(built)
    first = tokenizer.encode(DEEPSEEK_SPECIAL[0], special=True)[-1:]
    assert tokenizer.encode("the") == first * add + plain
    assert tokenizer.encode_marked("the", {}) == plain


def test_words_and_blanks_that_were_added_are_words(tmp_path):
    """Only what looks like markup, or is called special, is a control token."""
    write_deepseek(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["kitchen", "    ", "ü", "†", "[x]"])
    tokenizer.save(str(path))
    got, text = load_tokenizer(tmp_path), "a kitchen    ü†[x]"
    assert got.encode_marked(text, {}) == tokenizer.encode(text).ids
    names = got.control.ids.keys()
    assert "[x]" in names and not names & {"kitchen", "    ", "ü", "†"}


def test_the_leftmost_name_then_the_longest(tmp_path):
    write_deepseek(tmp_path)
    path = tmp_path / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    library.add_special_tokens(["<a>", "<a><b>", "b>c", "<b>"])
    library.save(str(path))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("x<a><b>c", "<a><a>b>c", "<b>c<a", "<<a>><b>", "b>b>cc"):
        assert tokenizer.encode(text, special=True) == library.encode(text).ids, text


def test_rejects_what_is_no_text(tokenizer):
    with says(TypeError, "text is a bytes, wants a string"):
        tokenizer.encode(b"x")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_marked(text, {})):
        with says(ValueError, "not valid Unicode at character 1"):
            encode("a\ud800")


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("{", CheckpointError, "cannot be read"),
        ("[1]", CheckpointError, "holds a list, wants an object"),
        ("[" * 100_000, CheckpointError, "cannot be read"),
        ('{"decoder": {"type": "ByteLevel"}}', CheckpointError, "is not a tokenizer"),
        (
            '{"decoder": {"type": "ByteLevel"}, "added_tokens": [3]}',
            CheckpointError,
            "is not a tokenizer",
        ),
        ('{"decoder": {"type": "Metaspace"}}', ConfigError, "another decoder than ByteLevel"),
        ('{"decoder": null}', ConfigError, "another decoder than ByteLevel"),
    ],
)
def test_rejects_broken_and_other_files(tmp_path, text, error, message):
    (tmp_path / "tokenizer.json").write_text(text)
    with says(error, "tokenizer.json", message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, "bos_token '<s>'"),
        ({"add_bos_token": True}, "bos_token None"),
        ({"add_bos_token": True, "bos_token": 3}, "bos_token 3, wants a string"),
    ],
)
def test_rejects_a_beginning_that_is_no_token(built, config, message):
    write_config(built, config)
    with says(ConfigError, "tokenizer_config.json", message):
        load_tokenizer(built)


def test_no_file_is_no_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
