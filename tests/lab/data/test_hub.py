"""Data sets and tokenizers of the hub, with the hub replaced by local files; and what is said where it fails."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

from residua.commands.cli import main
from residua.errors import InputError, RunError
from residua.lab.data import PreparedData, byte_tokenizer, load_tokenizer, preparation, prepare, writer
from residua.lab.data.hub import open_hub
from residua.lab.data.sources import open_corpus
from residua.lab.data.tokenizer import save_tokenizer
from support.tiny_runs import contents

TEXTS = [f"Row {number} of the set: {'déjà vu ' * (number % 17)}" for number in range(400)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeStream:
    """What the library `datasets` streams: rows in order."""

    column_names = ["id", "text", "number", "meta"]

    def __init__(self, fails_at=None):
        self.position, self.fails_at = 0, fails_at

    def select_columns(self, names):
        self.selected = names
        return self

    def __iter__(self):
        while self.position < len(TEXTS):
            if self.position == self.fails_at:
                raise ConnectionError("the connection was reset\nby a peer")
            self.position += 1
            row = {"text": TEXTS[self.position - 1], "number": self.position}
            row["meta"] = {"said": row["text"]} if self.position > 1 else {}
            yield {name: row[name] for name in self.selected}


@pytest.fixture
def hub(monkeypatch):
    """A hub with every data set; `calls` are those of load_dataset, `fails_at` the row where the connection breaks."""
    fake = SimpleNamespace(calls=[], fails_at=None)

    def load_dataset(name, config, **settings):
        fake.calls.append((name, config, settings))
        return FakeStream(fake.fails_at)

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    answer = SimpleNamespace(sha=COMMIT)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, revision=None: answer)
    return fake


@pytest.mark.parametrize(
    ("source", "sample", "expected"),
    [
        ("fineweb-edu", None, ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")),
        ("fineweb-edu", "100BT", ("HuggingFaceFW/fineweb-edu", "sample-100BT", "train")),
        ("hf:a/b", None, ("a/b", None, "train")),
        ("hf:a/b/c", None, ("a/b", "c", "train")),
        ("hf:a/b@v1/c:validation[:10%]", None, ("a/b", "c", "validation[:10%]")),
    ],
)
def test_sources_are_recognised_by_name(hub, source, sample, expected):
    corpus = open_corpus(source, sample=sample)
    assert [document.text for document in corpus] == TEXTS
    ((name, config, settings),) = hub.calls
    assert (name, config, settings["split"]) == expected
    assert settings["streaming"] is True
    assert settings["revision"] == corpus.facts["revision"] == COMMIT


def test_a_text_inside_another_column_is_read(hub):
    """The first row has no such text."""
    assert [document.text for document in open_corpus("hf:a/b", text_column="meta.said")] == TEXTS[1:]


def test_a_broken_connection_loses_nothing(hub, monkeypatch, tmp_path, capsys):
    for name, value in {"SAVE_TEXT": 3000, "ENCODE_TEXT": 500, "WRITE_TOKENS": 500}.items():
        monkeypatch.setattr(writer, name, value)
    settings = {"tokenizer": "byte", "shard_tokens": 4000}
    whole = prepare("hf:a/b", tmp_path / "whole", **settings)
    assert whole.facts["dataset"] == "a/b"
    for fails_at in (150, 290):
        hub.fails_at = fails_at
        with pytest.raises(RunError, match=r"hf:a/b: .*the connection was reset"):
            prepare("hf:a/b", tmp_path / "out", **settings)
        assert "tokens are kept" in capsys.readouterr().err
    hub.fails_at = None
    prepare("hf:a/b", tmp_path / "out", **settings)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_fineweb_edu_holds_out_a_tenth_of_a_billion_tokens(hub, tmp_path):
    data = prepare("fineweb-edu", tmp_path / "out", tokenizer="byte", sample="100BT")
    assert data.facts["validation_fraction"] == 0.001
    assert [open_corpus("fineweb-edu", sample=name).validation_fraction for name in ("10BT", "350BT")] == [
        0.01,
        1 / 3500,
    ]


def test_a_bpe_is_trained_on_the_first_rows_of_the_hub(hub, tmp_path, monkeypatch):
    seen = []
    train_bpe = preparation.train_bpe
    monkeypatch.setattr(
        preparation, "train_bpe", lambda texts, size: train_bpe((seen.append(t) or t for t in texts), size)
    )
    monkeypatch.setattr(preparation, "BPE_TEXT", 5000)
    prepare("hf:a/b", tmp_path / "out", vocab_size=270)
    assert 5000 <= sum(len(text.encode()) for text in seen) < 5300


@pytest.mark.parametrize(
    ("source", "settings", "expected"),
    [
        ("hf:a", {}, r"must be hf:OWNER/NAME\[@REVISION\]\[/CONFIG\]\[:SPLIT\], got hf:a"),
        ("fineweb-edu", {"sample": "1BT"}, "sample must be one of 10BT, 100BT, 350BT, got '1BT'"),
        ("hf:a/b", {"sample": "10BT"}, "sample must be left out with hf:a/b, got '10BT'"),
        ("hf:a/b", {"text_column": "content"}, "must have a column .content., got columns id, text, number, meta"),
        ("hf:a/b", {"text_column": "number"}, "column .number. must hold strings, got int"),
    ],
)
def test_unreadable_data_sets_of_the_hub_are_refused(hub, tmp_path, source, settings, expected):
    with pytest.raises(InputError, match=expected):
        prepare(source, tmp_path / "out", tokenizer="byte", **settings)
    assert list(tmp_path.iterdir()) == []


def test_text_of_the_hub_that_is_not_unicode_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", [*TEXTS[:7], "half a pair: \ud800"])
    with pytest.raises(InputError, match=r"hf:a/b: column .text. must be UTF-8"):
        prepare("hf:a/b", tmp_path / "out", tokenizer="byte")
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_does_not_answer_gives_a_one_line_error_and_status_1(hub, tmp_path, monkeypatch, capsys):
    offline = OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled.\nMore.")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", Mock(side_effect=offline))
    argv = ["prepare", "--source", "fineweb-edu", "--tokenizer", "byte", "--out", str(tmp_path / "out")]
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("residua: HuggingFaceFW/fineweb-edu: the hub cannot be read: Cannot reach the hub")


def test_a_name_that_is_invalid_on_the_hub_is_an_input_error(hub, monkeypatch):
    invalid = HFValidationError("Repo id must be in the form namespace/name")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", Mock(side_effect=invalid))
    with pytest.raises(InputError, match=r"a--/b: .*namespace/name"):
        open_hub("hf:a--/b", text_column="text", sample=None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt2", ("openai-community/gpt2", None)), ("hf:a/b", ("a/b", None)), ("hf:a/b@c", ("a/b", "c"))],
)
def test_a_tokenizer_of_the_hub_is_loaded(tmp_path, monkeypatch, name, expected):
    save_tokenizer(byte_tokenizer(), tmp_path / "cached")
    download = Mock(return_value=str(tmp_path / "cached"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_tokenizer(name).eos_token_id == 256
    ((repository,), options) = download.call_args
    assert (repository, options["revision"]) == expected
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    data = prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=name)
    assert data.facts["tokenizer"] == name
    assert PreparedData.open(tmp_path / "out").tokenizer().eos_token_id == 256


def test_a_tokenizer_that_cannot_be_downloaded_is_a_run_error(tmp_path, monkeypatch):
    unreachable = ConnectionError("no route to the hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=unreachable))
    with pytest.raises(RunError, match=r"tokenizer gpt2: .*no route to the hub"):
        load_tokenizer("gpt2")


@pytest.fixture
def real_datasets(monkeypatch, tmp_path):
    """The library `datasets` itself, which finds the data set in a local folder of parquet files."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for number in range(3):
        rows = {"id": range(100), "text": TEXTS[100 * number : 100 * number + 100]}
        pq.write_table(pa.table(rows), tmp_path / "set" / f"part-{number}.parquet", row_group_size=30)
    load_dataset = datasets.load_dataset

    def local(name, config, *, split, revision, streaming):
        return load_dataset(str(tmp_path / "set"), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha=COMMIT))


def test_the_datasets_library_gives_the_rows_in_order_each_time(real_datasets):
    corpus = open_corpus("hf:a/b")
    for _ in range(2):
        assert [document.text for document in corpus] == TEXTS[:300]


def test_a_split_that_the_datasets_library_does_not_know_is_an_input_error(real_datasets):
    with pytest.raises(InputError, match="hf:a/b:nowhere: Bad split"):
        list(open_corpus("hf:a/b:nowhere"))
