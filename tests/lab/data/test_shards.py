"""Prepared folders: what is written, that it is all or nothing, and that damage is noticed."""

import hashlib
import json
import os
import pickle
import resource
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from residua.errors import InputError, RunError
from residua.lab.data import Batches, PreparedData, Tokens, preparation, prepare, writer
from residua.lab.data import shards as shards_module
from residua.lab.data.corpus import Document
from residua.lab.data.shards import Shard
from residua.lab.data.sources import open_corpus
from residua.lab.data.split import split_documents
from residua.lab.records.folder import hold
from support.full_disk import room
from support.tiny_runs import contents

TEXTS = [f"Document {n}: the quick brown fox jumps over {n * n} lazy dogs. <|endoftext|> é\n" for n in range(200)]


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="session")
def prepared(source, tmp_path_factory):
    return prepare(source, tmp_path_factory.mktemp("prepared") / "data", vocab_size=400, shard_tokens=1000)


@pytest.fixture
def copy(prepared, tmp_path):
    return shutil.copytree(prepared.folder, tmp_path / "copy")


def test_the_shards_hold_the_documents_separated_by_end_of_text(source, prepared):
    expected = {"train": [], "validation": []}
    for split, document in split_documents(open_corpus(source), 0.05):
        expected[split].append(document.text)
    tokenizer = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer")
    for split, tokens in (("train", prepared.train), ("validation", prepared.validation)):
        ids = tokens.window(0, len(tokens))
        ends = np.flatnonzero(ids == prepared.eos_token_id)
        documents = np.split(ids, ends + 1)
        assert len(documents.pop()) == 0
        assert [tokenizer.decode(document[:-1]) for document in documents] == expected[split]
    assert prepared.validation_bytes == sum(len(text.encode()) for text in expected["validation"])
    assert prepared.validation_bytes > 0


def test_the_index_of_a_folder_describes_its_content(source, prepared):
    index = json.loads((prepared.folder / "index.json").read_text())
    assert (index["version"], index["dtype"], index["vocab_size"], index["eos_token_id"]) == (1, "uint16", 400, 0)
    train = index["splits"]["train"]["shards"]
    assert [shard["tokens"] for shard in train[:-1]] == [1000] * (len(train) - 1)
    assert len(train) > 3
    for shard in train:
        raw = (prepared.folder / shard["file"]).read_bytes()
        assert len(raw) == 2 * shard["tokens"]
        assert hashlib.sha256(raw).hexdigest() == shard["sha256"]
    facts = prepared.facts
    assert facts["source"] == "corpus.jsonl"
    assert facts["tokenizer"] == "bpe"
    assert facts["documents"] == len(TEXTS)
    assert facts["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert facts["tokens"] == len(prepared.train) + len(prepared.validation)
    assert facts["sha256"] == hashlib.sha256(b"".join(text.encode() + b"\0" for text in TEXTS)).hexdigest()
    assert facts["fingerprint"] == prepared.fingerprint
    json.dumps(facts)
    names = {path.name for path in prepared.folder.parent.iterdir()}
    assert names == {"data"}


def test_the_fingerprint_depends_on_tokens_and_tokenizer(source, prepared, tmp_path):
    other = prepare(source, tmp_path / "a", vocab_size=300, shard_tokens=1000)
    split = prepare(source, tmp_path / "b", vocab_size=400, shard_tokens=1000, validation_fraction=0.2)
    assert len({prepared.fingerprint, other.fingerprint, split.fingerprint}) == 3


def test_the_bpe_does_not_see_the_validation_text(tmp_path):
    texts = [f"document {n}" for n in range(300)]

    def is_held_out(text):
        split = split_documents([Document(other, 0) for other in [*texts, text]], 0.05)
        return ("validation", text) in [(side, document.text) for side, document in split]

    strange = next(filter(is_held_out, ("zyzzyva " * 1000 + "!" * n for n in range(1000))))
    vocabularies = []
    for name, content in (("without", texts), ("with", [*texts, strange])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in content))
        data = prepare(path, tmp_path / name, vocab_size=275, split="documents")
        vocabularies.append(data.tokenizer().get_vocab())
    assert len(data.validation) > 1000
    assert vocabularies[0] == vocabularies[1]


def test_tokenizing_documents_in_groups_changes_no_token(source, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ENCODE_TEXT", 100)
    assert prepare(source, tmp_path / "a", vocab_size=400, shard_tokens=1000).fingerprint == prepared.fingerprint


def test_a_large_text_trains_the_bpe_on_a_part(source, tmp_path, monkeypatch):
    seen = []
    train_bpe = preparation.train_bpe
    monkeypatch.setattr(
        preparation, "train_bpe", lambda texts, size: train_bpe((seen.append(t) or t for t in texts), size)
    )
    monkeypatch.setattr(preparation, "BPE_TEXT", source.stat().st_size // 4)
    prepare(source, tmp_path / "a", vocab_size=300)
    assert 40 < len(seen) < 60
    assert seen[-1] in TEXTS[-20:]


@pytest.mark.slow
def test_a_vocabulary_beyond_uint16_gets_uint32(tmp_path):
    words = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path / "own")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"w{69_000 + n} w{n}"}) + "\n" for n in range(100)))
    data = prepare(tmp_path / "a.jsonl", tmp_path / "data", tokenizer=str(tmp_path / "own"), shard_tokens=50)
    assert (data.vocab_size, data.eos_token_id, data.facts["tokenizer"]) == (70_001, 70_000, "own")
    assert (data.folder / "train-00000.bin").stat().st_size == 4 * 50
    ids = data.train.window(0, len(data.train))
    assert ids.max() == 70_000
    inputs, labels = Batches(data.train, 3, 60, seed=0).at(1)
    for row, following in zip(inputs, labels):
        start = next(s for s in range(len(ids) - 60) if np.array_equal(ids[s : s + 60], row.numpy()))
        assert torch.equal(following, torch.from_numpy(ids[start + 1 : start + 61]))


def test_a_vocabulary_smaller_than_requested_gives_a_warning(source, tmp_path):
    with pytest.warns(UserWarning, match=r"has \d+ entries, not 60000"):
        data = prepare(source, tmp_path / "a", vocab_size=60_000)
    assert data.vocab_size == data.facts["vocab_size"] == len(data.tokenizer()) < 2000


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_windows_may_span_shards(tmp_path_factory, lengths, data):
    folder = tmp_path_factory.mktemp("tokens")
    ids = np.arange(sum(lengths), dtype="<u2")
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    for number, part in enumerate(parts):
        part.tofile(folder / str(number))
    tokens = Tokens(folder, [Shard(str(n), length, "") for n, length in enumerate(lengths)], ids.dtype)
    start = data.draw(st.integers(0, len(ids)))
    length = data.draw(st.integers(0, len(ids) - start))
    window = tokens.window(start, length)
    assert window.dtype == np.int64
    assert window.tolist() == ids[start : start + length].tolist()
    with pytest.raises(IndexError):
        tokens.window(start, len(ids) - start + 1)
    with pytest.raises(IndexError):
        tokens.window(-1, 1)


def test_few_shards_are_open_at_a_time(prepared, monkeypatch):
    monkeypatch.setattr(shards_module, "MAPPED_SHARDS", 2)
    tokens = PreparedData.open(prepared.folder).train
    assert np.array_equal(tokens.window(0, len(tokens)), prepared.train.window(0, len(prepared.train)))
    assert len(tokens._mapped) == 2


def test_pickled_tokens_contain_no_data(prepared):
    prepared.train.window(0, 3000)
    sent = pickle.dumps(prepared.train)
    assert len(sent) < 5000
    assert np.array_equal(pickle.loads(sent).window(500, 1000), prepared.train.window(500, 1000))


def edit_index(folder, **changes):
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(folder):
    os.truncate(folder / "train-00001.bin", 1001)


def edit_token(folder, name="train-00001.bin", token=7):
    ids = np.fromfile(folder / name, "<u2")
    ids[5] = token
    ids.tofile(folder / name)


def large_token(folder):
    edit_token(folder, "validation-00000.bin", 400)


def edit_tokenizer(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncate, r"train-00001\.bin must have 2000 bytes, got 1001"),
        (lambda f: (f / "train-00002.bin").unlink(), r"train-00002\.bin must have \d+ bytes, got None"),
        (edit_token, r"train-00001\.bin .*sha256"),
        (large_token, r"validation-00000\.bin .*sha256"),
        (edit_tokenizer, "tokenizer/ "),
        (lambda f: shutil.rmtree(f / "tokenizer"), "tokenizer/ "),
        (lambda f: (f / "index.json").unlink(), "must hold prepared data"),
        (lambda f: (f / "index.json").write_text('{"format":'), "must be JSON"),
        (lambda f: (f / "index.json").write_bytes(b"\xff\xfe\x00"), "cannot be read as JSON: bytes that are not UTF-8"),
        (lambda f: (f / "index.json").write_text("[]"), "must hold prepared data"),
        (lambda f: edit_index(f, version=2), "an index.json of format 1"),
    ],
)
def test_damage_is_noticed_on_opening(copy, damage, expected):
    damage(copy)
    with pytest.raises(InputError, match=expected) as error:
        PreparedData.open(copy)
    assert "\n" not in str(error.value)


def test_large_data_is_verified_on_request(copy, monkeypatch):
    monkeypatch.setattr(shards_module, "VERIFY_ON_OPEN", 1000)
    edit_token(copy)
    data = PreparedData.open(copy)
    with pytest.raises(InputError, match="sha256"):
        data.verify()


def test_out_must_be_new_or_empty(source, tmp_path):
    (tmp_path / "empty").mkdir()
    prepare(source, tmp_path / "empty", tokenizer="byte")
    before = contents(tmp_path / "empty")
    with pytest.raises(InputError, match=r"must be .*, got .*empty"):
        prepare(source, tmp_path / "empty", tokenizer="byte")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"must be .*, got .*file"):
        prepare(source, tmp_path / "file", tokenizer="byte")
    with pytest.raises(InputError, match=r"must be .*, got .*below, which is below the file .*file;"):
        prepare(source, tmp_path / "file" / "below", tokenizer="byte")
    assert contents(tmp_path / "empty") == before


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        ("", {}, "must hold documents"),
        (" \n\n ", {}, "must hold documents"),
        ("One short text.", {}, r"its 1 document\(s\) leave nothing for"),
        ("One short text.", {"vocab_size": 256}, "vocab_size must be 257 .* got 256"),
        ("One short text.", {"vocab_size": 10**9}, "vocab_size must be 257 .* to 1,000,000, got 1000000000"),
        ("One short text.", {"validation_fraction": 0.0}, "validation_fraction must be a number between 0 and 1"),
        ("One short text.", {"validation_fraction": 1.5}, "validation_fraction must be a number between 0 and 1"),
        ("One short text.", {"shard_tokens": 0}, "shard_tokens must be at least 1"),
        ("One short text.", {"tokenizer": "gpt5"}, "must be bpe, byte or a folder with tokenizer.json, got gpt5"),
        ("One short\0text.", {}, "binary"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_unusable_text_is_refused_and_leaves_no_folder(tmp_path, content, arguments, expected):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(content)
    with pytest.raises(InputError, match=expected):
        prepare(tmp_path / "in", tmp_path / "out", **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_write_that_fails_half_way_leaves_no_folder(source, tmp_path):
    with room(15_000), pytest.raises(RunError, match="File too large"):
        prepare(source, tmp_path / "out", tokenizer="byte")
    assert list(tmp_path.iterdir()) == []
    prepare(source, tmp_path / "out", tokenizer="byte")


def test_a_second_preparation_at_the_same_time_is_refused_and_changes_nothing(source, tmp_path):
    first = tmp_path / ".out.preparing"
    with hold(first):
        (first / "train-00000.bin").write_bytes(b"first")
        with pytest.raises(InputError, match=r"\.out\.preparing: another process"):
            prepare(source, tmp_path / "out", tokenizer="byte")
        assert (first / "train-00000.bin").read_bytes() == b"first"
    prepare(source, tmp_path / "out", tokenizer="byte")


def test_a_link_in_place_of_an_unfinished_preparation_is_not_followed(source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.preparing").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="must not be a link"):
        prepare(source, tmp_path / "out", tokenizer="byte")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.nightly
def test_stdlib_is_prepared_into_a_usable_corpus(tmp_path):
    data = prepare("stdlib", tmp_path / "out", vocab_size=1024)
    assert data.vocab_size == 1024
    assert 500_000 < len(data.train) < 1_200_000
    assert 0.03 < data.validation_bytes / data.facts["bytes"] < 0.08
    assert data.facts["source"] == "stdlib"
    assert data.facts["python"].startswith("CPython 3.")
    text = data.tokenizer().decode(data.validation.window(0, len(data.validation)))
    ends = text.count("<|endoftext|>") * len("<|endoftext|>")
    assert len(text.encode()) - ends == data.validation_bytes


def forged(copy, **changes):
    path = copy / "index.json"
    index = json.loads(path.read_text())
    for name, value in changes.items():
        *keys, last = name.split("__")
        part = index
        for key in keys:
            part = part[int(key) if key.isdigit() else key]
        part[last] = value
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {f"splits__validation__{name}": value}
            for name in ("bytes", "documents", "tokens")
            for value in (-1, 0, "1", 10**400)
        ),
        *({"splits__train__tokens": 7}, {"splits__train__shards": []}, {"splits__train__shards__0__tokens": 0}),
        *({"splits__train__shards__0__tokens": True}, {"splits__train__shards__0__sha256": 3}, {"facts": [1]}),
        *({"vocab_size": value} for value in (0, -1, "300", 2.5)),
        *({"eos_token_id": value} for value in (-1, 400, 10**12, None)),
        *({"splits__train__shards__0__file": name} for name in ("../data/train-00000.bin", "/dev/zero", "", 3)),
    ],
    ids=str,
)
def test_a_forged_index_is_refused(changes, copy):
    forged(copy, **changes)
    with pytest.raises(InputError, match=r"index\.json|in this folder"):
        PreparedData.open(copy)


@pytest.mark.parametrize("changes", [{"vocab_size": 401}, {"eos_token_id": 3}], ids=str)
def test_a_vocabulary_that_differs_from_the_tokenizer_is_refused(changes, copy):
    forged(copy, **changes)
    with pytest.raises(InputError, match="vocab_size and eos_token_id must be"):
        PreparedData.open(copy).tokenizer()


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read(copy):
    path = copy / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")
    forged(copy, splits__train__shards__0__sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    tokens = PreparedData.open(copy).train
    tokens.window(0, 999)
    with pytest.raises(InputError, match=r"tokens below 400, .* got 65535"):
        tokens.window(0, 1000)


def test_a_forged_progress_file_is_refused(source, tmp_path):
    """A link in place of a shard would be truncated to its length."""
    stage = tmp_path / ".out.preparing"
    for content in ("[]", "{}", '{"plan": 3, "splits": {}}', '{"plan": {}, "splits": {"train": 1}}'):
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        (stage / "progress.json").write_text(content)
        with pytest.raises(InputError, match=r"progress\.json must be"):
            prepare(source, tmp_path / "out", vocab_size=400)


def test_many_shards_need_few_open_files(source, tmp_path, monkeypatch):
    data = prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    whole = [data.train.window(start, 100) for start in range(0, len(data.train) - 100, 100)]
    assert len(whole) > 40
    assert len(data.train._mapped) == 8


def test_data_that_were_opened_by_a_relative_path_stay_open_in_another_working_directory(prepared, monkeypatch):
    monkeypatch.chdir(prepared.folder.parent)
    data = PreparedData.open(prepared.folder.name)
    monkeypatch.chdir("/")
    assert torch.equal(torch.as_tensor(data.train.window(0, 8)), torch.as_tensor(prepared.train.window(0, 8)))
