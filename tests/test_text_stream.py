"""Text as tokens arrive, with both kinds of tokenizers, and stop strings."""

import pytest
import torch
from tokenizer_files import byte_ids, write_deepseek, write_kimi

from kdtree.text import Detokenizer, StopStrings, load_tokenizer

TEXT = 'def f(x):\n    return "naïve 你好 🙂🙃" + x\n'
EMOJI = "🙂"  # 4 bytes


@pytest.fixture(scope="module", params=[write_deepseek, write_kimi])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    request.param(path)
    return load_tokenizer(path)


def pieces(tokenizer, ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(id) for id in ids), detokenizer.flush()]


def stopped(stop: tuple[str, ...], *texts: str) -> tuple[list[str], str | None]:
    stops = StopStrings(stop)
    return [*(stops.feed(text) for text in texts), stops.flush()], stops.stop


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
    special = len(tokenizer) - 1
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
