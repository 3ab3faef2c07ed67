"""Keys: a canonical text that is readable, reversible and unique."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookup_buffer.errors import InvalidKey
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey

ANY_TEXT = st.text(st.characters(), max_size=40)  # lone surrogates included
PIECE = ANY_TEXT.filter(bool)
TRICKY = st.text("%#@aA2é\x00\x7f ", max_size=12)
KEYS = st.builds(
    TensorKey,
    PIECE | TRICKY.filter(bool),
    st.none() | PIECE | TRICKY.filter(bool),
    ANY_TEXT | TRICKY,
)


def test_a_plain_key_is_its_hash() -> None:
    key = TensorKey("0123abcd")
    assert key.text == str(key) == "0123abcd"
    assert key.is_shared


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (TensorKey("h", "r"), "h@r"),
        (TensorKey("h", None, "layer.3"), "h#layer.3"),
        (TensorKey("h", "r", "p"), "h#p@r"),
        (TensorKey("a%b#c@d"), "a%25b%23c%40d"),
        (TensorKey("h", "é\n"), "h@%C3%A9%0A"),
        (TensorKey("with space"), "with space"),
    ],
)
def test_the_text_of_a_key(key: TensorKey, text: str) -> None:
    assert key.text == text
    assert TensorKey.parse(text) == key


def test_a_hand_off_is_not_the_shared_key() -> None:
    assert TensorKey("h", "r") != TensorKey("h")
    assert not TensorKey("h", "r").is_shared
    assert hash(TensorKey("h", "r")) == hash(TensorKey("h", "r"))


@given(KEYS)
def test_every_key_comes_back_from_its_text(key: TensorKey) -> None:
    assert TensorKey.parse(key.text) == key
    assert key.text.isascii()
    assert key.text.isprintable()


@given(KEYS, KEYS)
def test_different_keys_have_different_texts(one: TensorKey, other: TensorKey) -> None:
    assert (one.text == other.text) == (one == other)


@given(st.text(max_size=30) | st.text("%#@aA2F C3", max_size=12))
def test_a_text_is_canonical_or_refused(text: str) -> None:
    try:
        key = TensorKey.parse(text)
    except InvalidKey:
        return
    assert key.text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@r",
        "#p",
        "h@",
        "h#",
        "h#@r",
        "h@r#p",
        "h@r@s",
        "%",
        "%2",
        "%zz",
        "%c3%a9",
        "%41",
        "%FF",
        "é",
    ],
)
def test_texts_that_are_no_key(text: str) -> None:
    with pytest.raises(InvalidKey):
        TensorKey.parse(text)


@pytest.mark.parametrize(
    "pieces", [("",), ("h", ""), (1,), ("h", 2), ("h", None, 3), (b"h",), ("h" * 4097,)]
)
def test_pieces_that_form_no_key(pieces: tuple[object, ...]) -> None:
    with pytest.raises(InvalidKey):
        TensorKey(*pieces)  # type: ignore[arg-type]


def test_the_longest_key_and_the_next() -> None:
    assert TensorKey.parse("x" * MAX_KEY_CHARACTERS).mm_hash == "x" * MAX_KEY_CHARACTERS
    with pytest.raises(InvalidKey):
        TensorKey("é" * (MAX_KEY_CHARACTERS // 6 + 1))
    with pytest.raises(InvalidKey):
        TensorKey.parse("x" * (MAX_KEY_CHARACTERS + 1))


def test_a_key_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorKey("h").mm_hash = "other"  # type: ignore[misc]
