"""Prepare shard by shard: a kill or a full disk loses at most a shard, and does not change the result."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from residua.commands.cli import main
from residua.errors import InputError, RunError
from residua.lab.data import PreparedData, open_corpus, prepare, writer
from residua.lab.data.encode import Encoder
from residua.lab.data.tokenizer import byte_tokenizer
from residua.lab.data.writer import ShardWriter, Staging
from residua.lab.records import progress as runs_progress
from support.tiny_runs import contents

SMALL = {"SAVE_TEXT": 12_000, "ENCODE_TEXT": 2_000, "WRITE_TOKENS": 200}
SETTINGS = {
    "fraction": {"tokenizer": "byte", "shard_tokens": 9_000},
    "bpe": {"vocab_size": 300, "shard_tokens": 5_000},
}


def texts(count, seed=0):
    choose = random.Random(seed)
    words = ["the", "fox", "déjà", "<|endoftext|>", "residual", "\n\n", "1,024", "of", "a"]
    return [" ".join(choose.choices(words, k=choose.randrange(1, 120))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of every kind, with blank documents, copies, and row groups that do not fit the shards."""
    folder = tmp_path_factory.mktemp("source") / "texts"
    folder.mkdir()
    found = texts(700)
    rows = [*found[:150], None, " \n", *found[150:300], found[3], found[200]]
    pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), folder / "a.parquet", row_group_size=37)
    lines = [json.dumps({"text": text}) for text in found[300:600]]
    (folder / "b.jsonl").write_text("\n".join([*lines[:100], "", *lines[100:]]))
    (folder / "c.txt").write_text("\n\n".join(found[600:]))
    return folder


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(writer, name, value)


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """The content of a folder prepared without a break, for each of SETTINGS."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(writer, name, value)
        for name, settings in SETTINGS.items():
            found[name] = contents(prepare(folder, tmp_path_factory.mktemp(name) / "out", **settings).folder)
    return found


def staging(out):
    return out.with_name(f".{out.name}.preparing")


def test_ctrl_c_gives_a_one_line_message_and_loses_no_work(folder, undisturbed, small, tmp_path, monkeypatch, capsys):
    save, out = Staging.save, tmp_path / "out"

    def interrupted(staging, splits):
        save(staging, splits)
        os.kill(os.getpid(), signal.SIGINT)

    command = ["prepare", "--source", str(folder), "--out", str(out), "--tokenizer", "byte", "--shard-tokens", "9000"]
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "save", interrupted)
        assert main(command) == 130
    lines = [line for line in capsys.readouterr().err.splitlines() if not re.search(r"/s  .* left", line)]
    assert "tokens are kept in" in lines[0]
    assert lines[1:] in ([], ["residua: interrupted"])
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train_tokens"] > 0
    assert contents(out) == undisturbed["fraction"]


def _prepare_and_die(source, out, settings, survive):
    """The process dies with a shard that is not full, after `survive` other writes of such shards."""
    for name, value in SMALL.items():
        setattr(writer, name, value)
    write, writes = ShardWriter.write, itertools.count()

    def fatal(shards):
        write(shards)
        if shards.tokens % shards.shard_tokens and next(writes) == survive:
            os.kill(os.getpid(), signal.SIGKILL)

    ShardWriter.write = fatal
    prepare(source, out, **settings, progress=False)


@pytest.mark.parametrize("settings", SETTINGS)
def test_repeated_kills_do_not_change_the_resulting_bytes(folder, undisturbed, small, tmp_path, start, settings):
    out, sizes = tmp_path / "out", []
    for survive in (0, 40, 40, 40):
        process = start(_prepare_and_die, folder, out, SETTINGS[settings], survive)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert [path.name for path in tmp_path.iterdir()] == [".out.preparing"]
        state = staging(out) / "progress.json"
        sizes.append(json.loads(state.read_text())["splits"]["train"]["bytes"] if state.exists() else 0)
    assert sizes[0] == 0 < sizes[1] < sizes[2] < sizes[3]
    prepare(folder, out, **SETTINGS[settings])
    assert contents(out) == undisturbed[settings]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class FullDisk:
    """Writing fails from the n-th time on, half-way through what is to be written."""

    def __init__(self, monkeypatch, survive):
        write, writes = ShardWriter.write, itertools.count()

        def failing(shards):
            if next(writes) >= survive:
                with shards._path(len(shards.shards)).open("ab") as file:
                    file.write(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(shards)

        monkeypatch.setattr(ShardWriter, "write", failing)


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_written_before_the_disk_was_full_are_kept(folder, undisturbed, small, tmp_path, capsys, settings):
    out = tmp_path / "out"
    for survive in (40, 44, 50):
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, survive)
            with pytest.raises(RunError, match="No space left on device"):
                prepare(folder, out, **SETTINGS[settings])
        assert re.search(r"[\d,]+ tokens are kept in .*preparing: the same command continues", capsys.readouterr().err)
    prepare(folder, out, **SETTINGS[settings])
    assert contents(out) == undisturbed[settings]


def test_a_folder_with_only_hidden_files_is_new(folder, undisturbed, small, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".gitkeep").touch()
    prepare(folder, tmp_path / "out", **SETTINGS["bpe"])
    (tmp_path / "out" / ".gitkeep").unlink()
    assert contents(tmp_path / "out") == undisturbed["bpe"]


def test_no_progress_is_saved_until_the_held_out_document_is_known(folder, small, tmp_path):
    """With a tiny fraction, the held-out document is known only at the end."""
    settings = {"tokenizer": "byte", "validation_fraction": 1e-12}
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, 100)
        with pytest.raises(RunError, match="No space left on device"):
            prepare(folder, tmp_path / "out", **settings)
    assert not staging(tmp_path / "out").exists()
    data = prepare(folder, tmp_path / "out", **settings)
    assert json.loads((data.folder / "index.json").read_text())["splits"]["validation"]["documents"] == 1


@pytest.fixture
def unfinished(folder, small, tmp_path):
    """A copy of the source, and a preparation of it that ended half-way."""
    source, out = shutil.copytree(folder, tmp_path / "texts"), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, 40)
        with pytest.raises(RunError):
            prepare(source, out, **SETTINGS["fraction"])
    return source, out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tokenizer": "bpe"}, "tokenizer was [0-9a-f]{64} and is bpe 2048 now"),
        ({"shard_tokens": 1}, "shard_tokens was 9000 and is 1 now"),
        ({"validation_fraction": 0.5}, r"validation_fraction was 0\.05 and is 0\.5 now"),
        ({"text_column": "body"}, "column 'body', got"),
    ],
)
def test_other_settings_are_refused_and_change_no_unfinished_work(unfinished, settings, expected):
    source, out = unfinished
    before = contents(staging(out))
    with pytest.raises(InputError, match=expected) as error:
        prepare(source, out, **SETTINGS["fraction"] | settings)
    assert "\n" not in str(error.value)
    assert contents(staging(out)) == before


def test_a_source_that_changed_is_noticed(unfinished):
    source, out = unfinished
    (source / "d.txt").write_text("more")
    with pytest.raises(InputError, match=r"other settings .*files "):
        prepare(source, out, **SETTINGS["fraction"])


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def unfinished_shard(folder):
    tokens = json.loads((folder / "progress.json").read_text())["splits"]["train"]["tokens"]
    assert tokens % 9_000
    return folder / f"train-{tokens // 9_000:05d}.bin"


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda folder: (folder / "train-00000.bin").unlink(), "train-00000.bin"),
        (lambda folder: shorten(folder / "train-00000.bin"), "train-00000.bin"),
        (lambda folder: os.truncate(unfinished_shard(folder), 100), r"train-\d+.bin"),
    ],
)
def test_damage_to_an_unfinished_preparation_is_noticed(unfinished, damage, name):
    source, out = unfinished
    damage(staging(out))
    with pytest.raises(InputError, match=f"{name}: .*unfinished") as e:
        prepare(source, out, **SETTINGS["fraction"])
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_progress_without_a_terminal_prints_lines_with_the_time_left(folder, small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(runs_progress, "LINE_SECONDS", 0.0)
    prepare(folder, tmp_path / "out", **SETTINGS["fraction"])
    line = capsys.readouterr().err.splitlines()[2]
    assert line.startswith("prepare: tokens: ")
    assert "%), " in line
    assert "/s  " in line
    assert line.endswith(" left")
    prepare(folder, tmp_path / "quiet", progress=False, **SETTINGS["fraction"])
    assert capsys.readouterr().err == ""


def test_no_time_left_is_shown_before_the_tokenizer_is_learned(folder, tmp_path, monkeypatch, capsys):
    """Reading the text takes less time than learning."""
    monkeypatch.setattr(writer, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(runs_progress, "LINE_SECONDS", 0.0)
    prepare(folder, tmp_path / "out", vocab_size=258)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prepare: tokenizer: ")]
    assert len(lines) > 1
    assert lines[-1].endswith("learning it from the text")
    assert not any(line.endswith(" left") for line in lines)


def test_the_column_of_the_text_can_be_named(tmp_path):
    rows = {"text": [1, 2, 3], "body": ["one", "two", "three"]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"body": "four"}\n')
    found = [document.text for document in open_corpus(tmp_path, text_column="body")]
    assert found == ["four", "one", "two", "three"]
    command = ["prepare", "--source", str(tmp_path), "--out", str(tmp_path / "out"), "--text-column", "body"]
    assert main([*command, "--tokenizer", "byte"]) == 0
    assert PreparedData.open(tmp_path / "out").facts["documents"] == 4


def test_the_encoder_holds_few_groups_at_a_time():
    taken = []

    def groups():
        for number in range(50):
            taken.append(number)
            yield [b"text %d" % number]

    for position, (encoded,) in enumerate(Encoder(byte_tokenizer(), np.dtype("<u2")).map(groups())):
        assert encoded.text == bytes(encoded.ids[:-1].tolist()) == b"text %d" % position
        assert len(taken) <= position + 4


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_text(tmp_path, small):
    peaks = []
    for count in (500, 3000):
        source = tmp_path / f"{count}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count)))
        tracemalloc.start()
        prepare(source, tmp_path / str(count), tokenizer="byte", shard_tokens=50_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
