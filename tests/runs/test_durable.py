"""Durable writing: the old content or the new, through links and devices as they are, and no planted link followed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from residua.runs import durable
from residua.runs.durable import replacing, unfinished, write_bytes, write_text

KILLED = """
import os, signal, sys
from pathlib import Path
from residua.runs.durable import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("write", "old", "new"), [(write_text, "alt: ü\n", "neu"), (write_bytes, b"\x00\xff", b"")])
@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_content(write, old, new, fails, tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(path, new)
    write(path, old)

    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr(os, fails, refuse)
    with pytest.raises(OSError, match="no"):
        write(path, new)
    assert path.read_bytes() == (old.encode() if isinstance(old, str) else old)
    assert names(tmp_path) == ["file"]


def test_a_new_file_has_the_mode_of_any_other(tmp_path):
    write_text(tmp_path / "ours", "x")
    (tmp_path / "other").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_no_link_under_a_guessed_name_is_followed(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    (tmp_path / ".file.partial").symlink_to(victim)
    write_text(path, "new")
    assert (path.read_text(), victim.read_text()) == ("new", "precious")
    # Even if a name was guessed: the file is made, or nothing is written.
    monkeypatch.setattr(durable.secrets, "token_hex", lambda count: "0" * 2 * count)
    (tmp_path / ".file.00000000.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(path, "newer")
    with pytest.raises(FileExistsError), unfinished(path):
        pass
    assert (path.read_text(), victim.read_text()) == ("new", "precious")


def test_temporary_names_differ(tmp_path):
    seen = set()
    for _ in range(5):
        with replacing(tmp_path / "file"):
            seen.update(name for name in names(tmp_path) if name.endswith(".partial"))
    assert len(seen) == 5


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    process = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert process.returncode == -signal.SIGKILL
    (stale,) = tmp_path.glob(".*.partial")
    assert stale.read_text() == "half"
    assert path.read_text() == "old"
    write_text(path, "new")
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "new"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_folder_that_a_killed_writer_left_is_removed_by_the_next_one_and_no_other(tmp_path):
    path = tmp_path / "folder"
    code = (
        KILLED.replace("replacing", "unfinished")
        .replace("file.write(b", "(file / 'a').write_text(")
        .replace("    file.flush()\n", "")
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".folder.*.partial"))) == 1
    with unfinished(path) as temporary:
        assert list(tmp_path.iterdir()) == [temporary]
        (temporary / "file").write_text("ours")
        with unfinished(path) as other:  # of a second writer, which is done first
            assert temporary.is_dir()
            (other / "file").write_text("theirs")
        assert (path / "file").read_text() == "theirs"
        durable.remove(path)
    assert names(tmp_path) == ["folder"]
    assert (path / "file").read_text() == "ours"


def test_a_writer_at_work_keeps_its_partial_file(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"slow")
        write_text(path, "quick")
        assert path.read_text() == "quick"
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["file"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path / "there") == ["target"]
    target.unlink()
    write_text(link, "made")
    assert link.is_symlink()
    assert target.read_text() == "made"


def test_a_link_to_itself_and_a_folder_are_refused(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, tmp_path):
        with pytest.raises(OSError, match=r"links|directory"):
            write_text(path, "x")
    assert loop.is_symlink()
    assert names(tmp_path) == ["loop"]


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="this system has no device nodes")
def test_a_device_is_written_to_and_stays(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    before = os.stat("/dev/null")
    for path in (Path("/dev/null"), link):
        write_text(path, "nothing")
    after = os.stat("/dev/null")
    assert (before.st_ino, before.st_rdev) == (after.st_ino, after.st_rdev)
    assert link.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_is_written_to_and_stays(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_bytes(path, b"through")
    reader.join()
    assert read == [b"through"]
    assert path.is_fifo()


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="this system has no /dev/stdout")
@pytest.mark.parametrize("into", ["pipe", "file"])
def test_standard_output_keeps_what_else_is_printed(into, tmp_path):
    code = (
        "from pathlib import Path; from residua.runs.durable import write_text; print('before'); "
        "write_text(Path('/dev/stdout'), 'content\\n'); print('after')"
    )
    out = tmp_path / "out"
    with out.open("wb") as file:
        target = file if into == "file" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=target)
    assert (out.read_bytes() if into == "file" else done.stdout) == b"before\ncontent\nafter\n"


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


def test_partials_of_every_kind_are_removed_without_following_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".step-3.partial").symlink_to(outside)
    (run / ".step-4.partial").mkdir()
    (run / ".step-4.partial" / "file").write_text("half")
    (run / ".facts.json.0123abcd.partial").write_text("half")
    durable.remove_partials(run)
    assert names(run) == []
    assert (outside / "file").read_text() == "precious"
