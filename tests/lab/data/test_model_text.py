"""A text in the tokens of a model, and whether it is the text that the model was trained on."""

from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from residua.errors import InputError
from residua.lab.data import byte_tokenizer, prepare
from residua.lab.data.model_text import open_text

LINES = [f"Line {number} of a long text with {number * number} things.\n" for number in range(400)]


@pytest.fixture
def place(tmp_path):
    """Two files, the second of which is one long document."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(LINES[:20]))
    (folder / "b.txt").write_text("".join(LINES[20:]))
    return folder


WAYS = {
    "by default": {},
    "a document that is cut": {"split": "share", "longest_document": 0},
    "short documents": {"longest_document": 300},
    "each document by its key": {"split": "documents", "longest_document": 500},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_raw_text_is_recognised_however_it_was_cut_and_split(way, place, tmp_path):
    data = prepare(place, tmp_path / "data", tokenizer="byte", progress=False, **WAYS[way])
    tokenizer, folder = data.tokenizer(), data.folder / "tokenizer"
    text = open_text(place, tokenizer, folder, trained_on=data.facts)
    assert text.own is True
    assert text.bytes == data.facts["bytes"] == len("".join(LINES))
    assert open_text(place, tokenizer, folder).own is False
    held_out = open_text(data.folder, tokenizer, folder, trained_on=data.facts)
    assert (held_out.own, len(held_out.tokens)) == (True, data.facts["validation_tokens"])
    (place / "b.txt").write_text("".join(reversed(LINES[20:])))  # as many bytes
    assert open_text(place, tokenizer, folder, trained_on=data.facts).own is False


def test_prepared_data_that_is_cut_differently_is_not_reported_as_another_text(place, tmp_path):
    one, other = (
        prepare(place, tmp_path / str(size), tokenizer="byte", progress=False, longest_document=size)
        for size in (300, 500)
    )
    text = open_text(other.folder, one.tokenizer(), one.folder, trained_on=one.facts)
    assert text.own is None
    (place / "a.txt").write_text("another text\n")
    third = prepare(place, tmp_path / "third", tokenizer="byte", progress=False)
    assert open_text(third.folder, one.tokenizer(), one.folder, trained_on=one.facts).own is False


def test_a_tokenizer_without_an_end_of_text_is_refused(place, tmp_path):
    for eos_token in (None, ""):
        bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=eos_token)
        with pytest.raises(InputError, match=r"must have a fast tokenizer with an eos_token .*, got no eos_token"):
            open_text(place, bare, tmp_path)
    with pytest.raises(InputError, match=r"got no tokenizer\.json"):
        open_text(place, SimpleNamespace(eos_token="</s>", eos_token_id=2), tmp_path)


def test_text_column_names_the_key_of_the_text_in_a_row(place, tmp_path):
    data = prepare(place, tmp_path / "data", tokenizer="byte", progress=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"meta": {"said": "eight by"}}\n')
    text = open_text(rows, data.tokenizer(), data.folder, text_column="meta.said")
    assert (text.bytes, len(text.tokens)) == (8, 9)
    with pytest.raises(InputError, match="--text-column"):
        open_text(rows, data.tokenizer(), data.folder)
    with pytest.raises(InputError, match=r"--text-column must .*meta"):
        open_text(data.folder, data.tokenizer(), data.folder, text_column="meta")
