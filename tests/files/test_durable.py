"""Durable writing: the old content or the new, and neither a link nor a device in its place is written to."""

import errno
import os
import stat
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from residua.errors import InputError
from residua.files.durable import replacing, unfinished, write_bytes, write_text
from residua.lab.data.tokenizer import byte_tokenizer
from residua.lab.records.folder import hold
from support.full_disk import room


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("write", "old", "new"), [(write_text, "alt: ü\n", "neu"), (write_bytes, b"\x00\xff", b"")])
@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_content(write, old, new, fails, tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(path, new)
    write(path, old)

    monkeypatch.setattr(os, fails, Mock(side_effect=OSError("no")))
    with pytest.raises(OSError, match="no"):
        write(path, new)
    assert path.read_bytes() == (old.encode() if isinstance(old, str) else old)
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="Windows opens no folder")
def test_a_file_that_already_has_its_name_counts_as_written(tmp_path, monkeypatch):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "damaged")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.warns(UserWarning, match=r"file .*damaged"):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


def test_a_new_file_has_the_default_mode(tmp_path):
    write_text(tmp_path / "ours", "x")
    (tmp_path / "other").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_second_writer_does_not_remove_the_partial_file_of_the_first(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"slow")
        write_text(path, "quick")
        assert path.read_text() == "quick"
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["file"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with unfinished(tmp_path / "new" / "folder") as temporary:
        (temporary / "file").write_text("x")
        assert not (tmp_path / "new" / "folder").exists()
    assert names(tmp_path / "new") == ["folder"]

    def fails():
        with unfinished(tmp_path / "other") as temporary:
            (temporary / "file").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    with pytest.raises(OSError, match="not empty"), unfinished(tmp_path / "new" / "folder"):
        pass
    assert names(tmp_path) == ["new"]


def test_a_system_error_names_the_file_to_be_written(tmp_path):
    with room(1000), pytest.raises(OSError, match="File too large") as failure:
        write_bytes(tmp_path / "file", bytes(2000))
    assert failure.value.filename == str(tmp_path / "file")
    assert str(failure.value).endswith(repr(str(tmp_path / "file"))), "no second name is shown"
    with pytest.raises(FileNotFoundError) as failure, replacing(tmp_path / "file"):
        (tmp_path / "another").read_text()
    assert failure.value.filename == str(tmp_path / "another")
    assert names(tmp_path) == []


def test_system_errors_of_compiled_writers_become_those_of_python(tmp_path):
    tensors = {"x": torch.zeros(1000)}
    write = (lambda path: save_file(tensors, path), lambda path: byte_tokenizer().backend_tokenizer.save(str(path)))
    for save in write:
        with room(1000), pytest.raises(OSError, match="File too large") as failure, unfinished(tmp_path / "new") as new:
            save(new / "file")
        assert failure.value.errno == errno.EFBIG
        assert names(tmp_path) == []
    with pytest.raises(InputError), unfinished(tmp_path / "new"):
        raise InputError("cannot read: no such file (os error 2)")


def test_partial_files_are_removed_by_the_next_holder_without_following_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".step-3.0123abcd.partial").symlink_to(outside)
    (run / ".step-4.89abcdef.partial").mkdir()
    (run / ".step-4.89abcdef.partial" / "file").write_text("half")
    (run / ".facts.json.0123abcd.partial").write_text("half")
    (run / "facts.json").write_text("old")
    with hold(run, markers=["facts.json"]):
        assert names(run) == [".lease", ".lock", "facts.json"]
    assert (outside / "file").read_text() == "precious"


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_link_is_refused_in_one_line(target, tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(InputError, match=rf"link: must not be a link, .*{target}"):
        write_text(tmp_path / "link", "new")
    assert names(tmp_path) == ["link", "victim"]
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.skipif(os.name == "nt", reason="Windows locks no folders")
def test_partial_folders_of_a_killed_writer_are_removed_by_the_next(tmp_path):
    abandoned, other = tmp_path / ".a[b].0123abcd.partial", tmp_path / ".ab.0123abcd.partial"
    for folder in (abandoned, other, tmp_path / ".a[b].c.partial"):
        folder.mkdir()
        (folder / "file").write_text("half")
    (tmp_path / ".a[b].89abcdef.partial").symlink_to(other)
    with unfinished(tmp_path / "a[b]") as held:
        assert not abandoned.exists()
        with pytest.raises(RuntimeError), unfinished(tmp_path / "a[b]"):
            raise RuntimeError
        (held / "file").write_text("whole")
    assert names(tmp_path) == [".a[b].89abcdef.partial", ".a[b].c.partial", ".ab.0123abcd.partial", "a[b]"]
    assert names(other) == names(tmp_path / "a[b]") == ["file"]
