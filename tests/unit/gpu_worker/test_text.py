"""What leaves is the text of the tokens, never half a character, never any part of a stop string."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gpu_worker.logprobs import TokenTexts
from gpu_worker.text import TextStream
from tests.unit.gpu_worker.tokenizers import byte_level, sentencepiece_like

SAMPLES = [
    "I am testing",
    "  two leading spaces,  double  inside, trailing  ",
    "def f():\n    return 1\n",
    "emoji 🫠🥹 and 龜 and é and e\u0301",
    "你好，世界 مرحبا",
    "👩‍👩‍👧‍👦 family",
]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return byte_level() if request.param == "byte_level" else sentencepiece_like()


def pieces_of(tokenizer: Any, ids: list[int], **options: Any) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [*(stream.push(token) for token in ids), stream.finish()]


def decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("text", SAMPLES)
def test_c36_pieces_are_the_full_text_byte_for_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == decode(tokenizer, ids)


@pytest.mark.parametrize("text", ["🫠", "🥹", "龜", "a🫠b"])
def test_c34_no_piece_holds_half_a_character(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 1
    pieces = pieces_of(tokenizer, ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces).strip() == text


def test_bytes_that_are_no_text_come_out_as_the_full_decode_has_them() -> None:
    tokenizer = byte_level()
    half = tokenizer.encode("🫠", add_special_tokens=False)[:2]
    ids = [*half, *tokenizer.encode("ok", add_special_tokens=False)]
    assert "".join(pieces_of(tokenizer, ids)) == decode(tokenizer, ids)
    assert "".join(pieces_of(tokenizer, half)) == decode(tokenizer, half)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40), st.integers(0, 2**32))
def test_any_text_in_any_tokens_comes_out_whole(text: str, seed: int) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    random.Random(seed).shuffle(ids)
    assert "".join(pieces_of(tokenizer, ids)) == decode(tokenizer, ids)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([b"\xff", b"\x80", b"\xf0\x9f", b"\xe9", b"a", "🫠".encode(), "龜".encode()]))
)
def test_any_bytes_come_out_as_the_full_decode_has_them(parts: list[bytes]) -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    of_byte = {bytes(texts[id][1]): id for id in range(len(tokenizer)) if len(texts[id][1]) == 1}
    ids = [of_byte[bytes([byte])] for byte in b"".join(parts)]
    assert "".join(pieces_of(tokenizer, ids)) == decode(tokenizer, ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([b"\xff", b"\xe9", "🫠".encode(), "龜".encode(), "a"]), max_size=30))
def test_byte_tokens_never_garble_the_characters_around_them(parts: list[bytes | str]) -> None:
    tokenizer = sentencepiece_like()
    ids: list[int] = []
    for part in parts:
        letters = [part] if isinstance(part, str) else [f"<0x{byte:02X}>" for byte in part]
        ids += tokenizer.convert_tokens_to_ids(letters)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces).count("a") == parts.count("a")
    if not {b"\xff", b"\xe9"} & set(parts):
        assert "".join(pieces) == decode(tokenizer, ids)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_invalid_byte_token_leaves_the_character_before_it() -> None:
    tokenizer = sentencepiece_like()
    spelled = [f"<0x{byte:02X}>" for byte in "🫠".encode()] + ["<0xFF>", "a"]
    ids = tokenizer.convert_tokens_to_ids(spelled)
    assert "".join(pieces_of(tokenizer, ids)) == "🫠\N{REPLACEMENT CHARACTER}a"


@pytest.mark.parametrize("stop", ["DEFGHIJ", "F", "EF", "DEFGHIJKLMN"])
def test_c37_stop_string_across_tokens(tokenizer: Any, stop: str) -> None:
    ids = tokenizer.encode("ABCDEFGHIJKLMNOP", add_special_tokens=False)
    stream = TextStream(tokenizer, [stop])
    pieces = [stream.push(token) for token in ids]
    assert stream.stop_hit == stop
    assert "".join(pieces) + stream.finish() == "ABCDEFGHIJKLMNOP".partition(stop)[0]


@settings(max_examples=200, deadline=None)
@given(st.text("ab", min_size=1, max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_nothing_of_a_stop_string_ever_leaves(text: str, stops: list[str]) -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, stops)
    said = "".join(stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False))
    said += stream.finish()
    if stream.stop_hit is None:
        assert said == text and not any(stop in text for stop in stops)
    else:
        assert text.startswith(said + stream.stop_hit)
        assert not any(stop in said for stop in stops)


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab", min_size=1, max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.randoms(),
)
def test_the_stop_string_that_is_complete_first_counts_in_whatever_tokens(
    text: str, stops: list[str], chance: random.Random
) -> None:
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    tokenizer = byte_level()
    ids: list[int] = []
    for word in text_cut(text, chance):
        ids += tokenizer.encode(word, add_special_tokens=False)
    stream = TextStream(tokenizer, stops)
    said = "".join(stream.push(token) for token in ids) + stream.finish()
    if not ends:
        assert stream.stop_hit is None and said == text
    else:
        end, _, first = min(ends)
        assert stream.stop_hit == first and said == text[: end - len(first)]


def text_cut(text: str, chance: random.Random) -> list[str]:
    words = []
    while text:
        size = chance.randint(1, 6)
        words.append(text[:size])
        text = text[size:]
    return words


def test_long_stop_strings_that_nearly_match_cost_little() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a" * 4000, add_special_tokens=False)
    stops = ["a" * (1000 - number) + "b" for number in range(16)]
    stream = TextStream(tokenizer, stops)
    start = time.process_time()
    said = "".join(stream.push(token) for token in ids) + stream.finish()
    assert said == "a" * 4000 and stream.stop_hit is None
    assert time.process_time() - start < 3  # some 0.1 s; seconds when each token looks at all that is held


def test_a_stop_string_may_stay_in_the_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("one. two. three.", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, stop=["."], include_stop=True)) == "one."


def test_what_only_might_have_become_a_stop_string_leaves_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("end STO", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, stop=["STOP"])) == "end STO"


def test_context_keeps_the_first_space() -> None:
    tokenizer = sentencepiece_like()
    before = tokenizer.encode("I am", add_special_tokens=False)
    ids = tokenizer.encode("I am testing", add_special_tokens=False)[len(before) :]
    assert "".join(pieces_of(tokenizer, ids, context=before)) == " testing"


def test_special_tokens_have_no_text_unless_asked_for() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("hi", add_special_tokens=False), tokenizer.convert_tokens_to_ids("<|end|>")]
    assert "".join(pieces_of(tokenizer, ids)) == "hi"
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=False)) == "hi<|end|>"


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_replayed_stream_goes_on_with_the_same_text(tokenizer: Any, cut: int) -> None:
    ids = tokenizer.encode("stop 🫠 at STO or 龜 STOP never", add_special_tokens=False)
    whole = "".join(pieces_of(tokenizer, ids, stop=["STOP"]))
    first = TextStream(tokenizer, ["STOP"])
    delivered = "".join(first.push(token) for token in ids[:cut])
    again = TextStream(tokenizer, ["STOP"])
    replayed = "".join(again.push(token) for token in ids[:cut])
    rest = "".join(again.push(token) for token in ids[cut:]) + again.finish()
    assert replayed == delivered and delivered + rest == whole


def test_the_window_stays_small_however_long_the_output() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    for token in tokenizer.encode("word " * 2000, add_special_tokens=False):
        stream.push(token)
        assert len(stream._window) <= 4  # tokens


def test_a_word_level_tokenizer_works_too() -> None:
    vocab = {"hello": 0, "world": 1, "[UNK]": 2}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    assert "".join(pieces_of(tokenizer, [0, 1, 0])) == "hello world hello"
