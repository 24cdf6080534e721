import json

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from kdtree.errors import CheckpointError, ConfigError
from kdtree.text import Detokenizer, StopStrings, Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_end|>", *(f"<|reserved_token_{i}|>" for i in range(5)), "[PAD]"]
TEXT = 'def f(x):\n    return "naïve 你好 🙂🙃" + x\n'
EMOJI = "🙂"  # 4 bytes


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A byte-level BPE whose letters beyond ASCII stay single bytes; its specials come last."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat then the thing, in the return of the def"] * 9, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens(["</think>"])  # added, not special: it is text
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory)


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """The single-byte token of each byte."""
    singles = {tokenizer.token_bytes(id): id for id in range(len(tokenizer))}
    return [singles[bytes([byte])] for byte in data]


def pieces(tokenizer, ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(id) for id in ids), detokenizer.flush()]


def stopped(stop: tuple[str, ...], *texts: str) -> tuple[list[str], str | None]:
    stops = StopStrings(stop)
    return [*(stops.feed(text) for text in texts), stops.flush()], stops.stop


def test_text_survives_the_tokens(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert len(ids) < len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXT.encode()
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_every_byte_has_its_token(tokenizer):
    data = bytes(range(256))
    assert b"".join(map(tokenizer.token_bytes, byte_ids(tokenizer, data))) == data


def test_special_tokens_in_a_text_stay_text(tokenizer):
    text = "hi <|im_end|><|reserved_token_4|> there"
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer._special.values())
    assert tokenizer.decode(ids) == text


def test_special_tokens_where_they_are_wanted(tokenizer):
    first = len(tokenizer) - 1 - len(SPECIALS)
    for i, name in enumerate(SPECIALS):
        assert tokenizer.encode(name, special=True) == [first + i]
        assert tokenizer.decode([first + i], special=True) == name
        assert tokenizer.token_bytes(first + i) == b""
    ids = tokenizer.encode("你好<|im_end|>the", special=True)
    assert ids == tokenizer.encode("你好") + [first + 1] + tokenizer.encode("the")


def test_added_tokens_that_are_not_special_are_text(tokenizer):
    last = len(tokenizer) - 1
    assert tokenizer.encode("</think>") == [last]
    assert tokenizer.decode([last]) == "</think>"


@pytest.mark.parametrize("id", [10**6, 2**40, -1])
def test_ids_beyond_the_vocabulary_have_no_text(tokenizer, id):
    assert tokenizer.token_bytes(id) == b""
    assert tokenizer.decode([id, *tokenizer.encode("a"), id]) == "a"


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("name", ["<|endoftext|>", {"content": "<|endoftext|>"}])
def test_beginning_of_sequence_is_the_configs_choice(directory, tmp_path, add, name):
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    config = {"add_bos_token": add, "bos_token": name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    plain = Tokenizer(directory).encode("the")
    assert tokenizer.encode("the") == [tokenizer._special["<|endoftext|>"]] * add + plain


def test_rejects_what_is_no_text(tokenizer):
    with pytest.raises(TypeError, match="text is a bytes, wants a string"):
        tokenizer.encode(b"x")
    with pytest.raises(ValueError, match="not valid Unicode at character 1"):
        tokenizer.encode("a\ud800")


def test_rejects_broken_and_other_files(directory, tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        Tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for text, error, message in (
        ("{", CheckpointError, "cannot be read"),
        ("[1]", CheckpointError, "holds a list, wants an object"),
        ('{"decoder": {"type": "ByteLevel"}}', CheckpointError, "is not a tokenizer"),
        ('{"decoder": {"type": "Metaspace"}}', ConfigError, "another decoder than ByteLevel"),
        ('{"decoder": null}', ConfigError, "another decoder than ByteLevel"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=message):
            Tokenizer(tmp_path)
    path.write_text((directory / "tokenizer.json").read_text())
    config = {"add_bos_token": True, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="bos_token '<s>'"):
        Tokenizer(tmp_path)


def test_a_split_character_is_held_back_until_it_is_whole(tokenizer):
    ids = byte_ids(tokenizer, EMOJI.encode())
    assert pieces(tokenizer, ids) == ["", "", "", EMOJI, ""]
    assert pieces(tokenizer, byte_ids(tokenizer, "你".encode())) == ["", "", "你", ""]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_text_cut_inside_a_character_ends_with_a_replacement(tokenizer, kept):
    ids = byte_ids(tokenizer, b"a" + EMOJI.encode()[:kept])
    assert pieces(tokenizer, ids) == ["a", *[""] * kept, "\ufffd"]


def test_only_invalid_bytes_are_replaced(tokenizer):
    data = b"a\xff" + EMOJI.encode()[:2] + b"b" + EMOJI.encode()
    got = pieces(tokenizer, byte_ids(tokenizer, data))
    assert got == ["a", "\ufffd", "", "", "\ufffdb", "", "", "", EMOJI, ""]


@pytest.mark.parametrize("data", [b"\xe4\xbd", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80", b"\x80"])
def test_the_pieces_add_up_to_the_whole(tokenizer, data):
    for text in (TEXT.encode() + data, data + TEXT.encode(), TEXT.encode()[:-20] + data * 2):
        ids = byte_ids(tokenizer, text)
        assert (
            "".join(pieces(tokenizer, ids))
            == tokenizer.decode(ids)
            == text.decode(errors="replace")
        )


def test_special_tokens_do_not_split_a_character(tokenizer):
    a, b, *rest = byte_ids(tokenizer, EMOJI.encode())
    special = len(tokenizer) - 2
    assert "".join(pieces(tokenizer, [a, special, b, *rest])) == EMOJI


def test_without_stop_strings_text_passes_through():
    assert stopped((), "ab", "", "c") == (["ab", "", "c", ""], None)


def test_a_stop_string_in_one_piece():
    assert stopped(("AB",), "xAByAB", "z") == (["x", "", ""], "AB")


def test_a_stop_string_across_pieces():
    assert stopped(("</s>",), "x<", "/", "s", ">y") == (["x", "", "", "", ""], "</s>")


def test_a_prefix_is_held_back_and_released():
    assert stopped(("</think>",), "a</th", "ing>") == (["a", "</thing>", ""], None)
    assert stopped(("</think>",), "a</th") == (["a", "</th"], None)


def test_held_text_may_begin_the_stop_string_later():
    assert stopped(("aab",), "a", "a", "a", "b") == (["", "", "a", "", ""], "aab")
    assert stopped(("abac",), "aba", "bac") == (["", "ab", ""], "abac")


def test_the_first_to_be_complete_ends_the_text():
    assert stopped(("bcd", "c"), "abcd")[1] == "c"
    assert stopped(("d", "bcd"), "abcd") == (["a", ""], "bcd")  # together: the longest
    assert stopped(("cd", "ab"), "xabcd") == (["x", ""], "ab")


def test_the_text_does_not_depend_on_the_pieces(rng):
    stop = ("aba", "bb", "cab", "abcab")
    for letters in torch.randint(3, (300, 12), generator=rng).tolist():
        text = "".join("abc"[i] for i in letters)
        whole, one_by_one = stopped(stop, text), stopped(stop, *text)
        assert ("".join(whole[0]), whole[1]) == ("".join(one_by_one[0]), one_by_one[1])
        if whole[1] is None:
            assert "".join(whole[0]) == text and not any(s in text for s in stop)
        else:
            assert text.startswith("".join(whole[0]) + whole[1])


def test_an_accepted_run_ends_where_its_stop_string_does(tokenizer):
    """As an engine does it: token by token, and nothing after the stop counts."""
    ids = tokenizer.encode("ab AB and then much more of the text")
    detokenizer, stops = Detokenizer(tokenizer), StopStrings(("AB",))
    text, kept = "", []
    for id in ids:
        kept.append(id)
        text += stops.feed(detokenizer.feed(id))
        if stops.stop:
            break
    assert text == "ab " and tokenizer.decode(kept) == "ab AB"


def test_rejects_empty_stop_strings():
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(("a", ""))
