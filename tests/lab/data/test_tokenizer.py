"""Tokenizers: exact round trips, reproducible training, and no special tokens out of text."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from residua.errors import InputError
from residua.lab.data import prepare
from residua.lab.data.encode import Encoder, lost_bytes
from residua.lab.data.model_text import open_text
from residua.lab.data.tokenizer import (
    END_OF_TEXT,
    byte_tokenizer,
    load_tokenizer,
    same_tokens,
    save_tokenizer,
    train_bpe,
    vocabulary,
    without_additions,
)
from support.tiny_runs import beginning


def text_encoder(tokenizer):
    """A function from texts to the ids that a preparation writes for them, without the end of text."""
    encoder = Encoder(tokenizer, np.dtype("<u4"))

    def encode(texts):
        documents = [encoded.ids for encoded in encoder([text.encode() for text in texts])]
        assert all(document[-1] == tokenizer.eos_token_id for document in documents)
        return [document[:-1].tolist() for document in documents]

    return encode


TEXTS = [f"The quick brown fox number {n} jumps over the lazy dog's {n % 7} backs.\n" for n in range(300)]


@pytest.fixture(scope="module", params=["bpe", "byte"])
def tokenizer(request):
    return train_bpe(TEXTS, 400) if request.param == "bpe" else byte_tokenizer()


@pytest.mark.slow
@given(text=st.text())
def test_every_text_is_decoded_unchanged(tokenizer, text):
    (ids,) = text_encoder(tokenizer)([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


@pytest.mark.parametrize(
    "text", ["a  b", " .", "don 't , no", "\r\n\t\0", "é e\u0301 \u202e 🏳️‍🌈", END_OF_TEXT * 2, "x<|endoftext|>y"]
)
def test_a_saved_tokenizer_decodes_difficult_texts_unchanged(tokenizer, tmp_path, text):
    save_tokenizer(tokenizer, tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    (ids,) = text_encoder(tokenizer)([text])
    assert text_encoder(loaded)([text]) == [ids]
    assert loaded.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_autotokenizer_loads_all_settings(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "saved")
    for loaded in (AutoTokenizer.from_pretrained(tmp_path / "saved"), load_tokenizer(tmp_path / "saved")):
        assert loaded.eos_token == loaded.pad_token == END_OF_TEXT
        assert loaded.eos_token_id == loaded.pad_token_id == tokenizer.eos_token_id
        assert loaded.padding_side == "left"
        assert len(loaded) == len(tokenizer) == vocabulary(loaded)
        assert loaded("fox").input_ids == tokenizer("fox").input_ids
        padded = loaded(["fox", "the lazy fox"], padding=True)
        assert padded.input_ids[0][0] == loaded.pad_token_id
        assert padded.attention_mask[0][0] == 0


def test_a_prompt_may_contain_the_end_of_text(tokenizer):
    assert tokenizer.eos_token_id in tokenizer(f"one{END_OF_TEXT}").input_ids


def test_bytes_are_their_own_ids():
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(0x250))) + "🙂"
    assert text_encoder(tokenizer)([text]) == [list(text.encode())]
    assert (len(tokenizer), tokenizer.eos_token_id) == (257, 256)


def test_bpe_has_the_requested_size_and_is_reproducible():
    one, two = (train_bpe(iter(TEXTS), 300) for _ in range(2))
    assert len(one) == one.vocab_size == 300
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    assert len(text_encoder(one)([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def test_an_error_while_reading_the_training_text_is_raised_unchanged():
    def failing():
        yield from TEXTS
        raise InputError("a.jsonl:7: broken")

    with pytest.raises(InputError, match=r"a\.jsonl:7: broken"):
        train_bpe(failing(), 400)


def test_a_users_tokenizer_is_used_with_its_end_of_text(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "fox": 1, "</s>": 70_000}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (70_000, 70_000, "left")
    assert vocabulary(loaded) == 70_001
    assert text_encoder(loaded)(["fox", "cat"]) == [[1], [0]]


def test_what_a_users_tokenizer_adds_to_a_text_is_no_part_of_training_from_scratch():
    theirs = beginning(byte_tokenizer())
    assert theirs("ab").input_ids == [256, *b"ab"]
    ours = without_additions(theirs)
    assert ours("ab").input_ids == list(b"ab") == text_encoder(theirs)(["ab"])[0]
    assert same_tokens(ours, theirs)
    assert not same_tokens(ours, train_bpe(TEXTS, 300))


def test_truncation_by_a_users_tokenizer_does_not_cut_the_data(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=5)
    assert text_encoder(tokenizer)(["abcdef", "a"]) == [list(b"abcdef"), list(b"a")]


def test_unusable_tokenizers_of_users_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"must be bpe, byte or .*, got .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    for eos_token in (None, ""):
        bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})), eos_token=eos_token)
        bare.save_pretrained(tmp_path / "no_eos")
        with pytest.raises(InputError, match="no eos_token"):
            load_tokenizer(tmp_path / "no_eos")
    (tmp_path / "broken").mkdir()
    for content in ("{", "{}", "[]", '{"model": {"type": "Unknown"}}', "null"):
        (tmp_path / "broken" / "tokenizer.json").write_text(content)
        with pytest.raises(InputError, match=r"must be bpe, byte or .*, got .*broken") as error:
            load_tokenizer(tmp_path / "broken")
        assert "\n" not in str(error.value)


def test_a_folder_with_vocabulary_and_merges_is_accepted(tmp_path):
    ByteLevelBPETokenizer().save_model(str(tmp_path))
    vocab = {character: number for number, character in enumerate(["<|endoftext|>", *ByteLevel.alphabet()])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"})
    )
    assert text_encoder(load_tokenizer(tmp_path))(["ab"]) == [[vocab["a"], vocab["b"]]]


def test_the_share_that_a_tokenizer_loses_is_measured(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[EOS]": 1, "the": 2, "fox": 3}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = Lowercase(), WhitespaceSplit()
    lossy = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]")
    save_tokenizer(lossy, tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ["The fox", "the wolf"] * 50))
    data = prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))
    assert data.facts["lost_share"] == pytest.approx((1 + 5) / 15)  # T, and " wolf"
    for place in (data.folder, tmp_path / "a.jsonl"):
        assert open_text(place, data.tokenizer(), tmp_path).bytes is None, "the loss in bits per byte would be too low"
    assert prepare(tmp_path / "a.jsonl", tmp_path / "byte", tokenizer="byte").facts["lost_share"] == 0


@pytest.mark.parametrize(
    ("text", "decoded", "lost"),
    [("a b", " a b", 0), ("Ab", "ab", 1), ("é", "e", 2), ("ab", "ba", 1), ("a\nb", "a b", 1)],
)
def test_bytes_lost_by_decoding_are_counted(text, decoded, lost):
    assert lost_bytes(text, decoded) == lost


def test_a_sentencepiece_model_names_the_missing_package(tmp_path, monkeypatch, capfd):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr("residua.lab.data.tokenizer.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"tokenizer\.model needs: pip install sentencepiece") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""
