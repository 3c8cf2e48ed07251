import json
import subprocess
import sys
from pathlib import Path

import pytest

from residua.errors import InputError
from residua.lab.records import folder as folders
from residua.lab.records.folder import (
    FREE_KEYS,
    LOGGING_KEYS,
    hold,
    new_folder,
    read_facts,
    read_object,
    read_settings,
    refuse_changes,
)
from residua.lab.training.config import KEYS
from support.waiting import wait_for

HOLDING = """
import sys, time
from pathlib import Path
from residua.lab.records.folder import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_every_free_setting_exists():
    from_the_data = {"data.tokenizer_fingerprint"}  # known once the data are prepared
    assert KEYS.keys() | from_the_data >= FREE_KEYS
    assert LOGGING_KEYS < FREE_KEYS


def test_a_folder_has_one_holder_until_its_process_ends_however_it_ends(tmp_path):
    folder = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLDING, str(folder), "600"], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(InputError, match="another process"), hold(folder):
        pass
    other.kill()
    other.communicate()
    with hold(folder), pytest.raises(InputError, match="another process"), hold(folder):
        pass
    with hold(folder):
        pass


def elsewhere(folder, seconds):
    """Hold a folder in a process of another machine: of another name, and without the lock of the system."""
    alone = "import filelock, fcntl, socket; from residua.lab.records import folder; folder.LEASE_SECONDS = 3.0\n"
    alone += "fcntl.flock = lambda *_: None; socket.gethostname = lambda: 'elsewhere'\n"
    command = [sys.executable, "-c", alone + HOLDING, str(folder), str(seconds)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    return other


@pytest.mark.processes
def test_a_folder_has_one_holder_among_machines_that_do_not_share_locks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folders, "LEASE_SECONDS", 3.0)
    other = elsewhere(tmp_path, 600)
    with pytest.raises(InputError, match="another process"), hold(tmp_path):
        pass
    assert "another machine worked here last; waiting 3 seconds to see if it still does" in capsys.readouterr().err
    other.kill()
    other.communicate()
    with hold(tmp_path):
        pass


@pytest.mark.processes
def test_another_machine_does_not_wait_for_a_holder_that_ended(tmp_path, capsys):
    elsewhere(tmp_path, 0).communicate()
    with hold(tmp_path):
        pass
    assert not capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of a process as Linux gives it")
def test_a_killed_holder_that_is_a_zombie_is_not_taken_for_another_machine(tmp_path, capsys):
    """A container without init keeps it as a zombie, which filelock takes for alive."""
    other = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path), "600"], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    other.kill()
    wait_for(lambda: Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    with hold(tmp_path, patience=60):  # its other threads, one of which renews the lease, may end later
        pass
    assert not capsys.readouterr().err
    other.communicate()


def test_a_new_holder_waits_for_a_process_that_is_ending(tmp_path):
    """A sweep that resumes at once after a kill -9 met its own dying workers."""
    other = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path), "0.3"], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    with hold(tmp_path, patience=60):
        assert other.wait(timeout=60) == 0
    other.communicate()


def test_a_folder_of_the_wrong_kind_is_refused_and_unchanged(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".mine.partial").write_text("mine")
    refused = "must be a new or empty folder, got a folder with other files; go away"
    with pytest.raises(InputError, match=refused), hold(tmp_path, hint="go away"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.partial", "mine"]
    with hold(tmp_path, markers=["mine"]):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match="run cannot be used as a folder"), hold(tmp_path / "run"):
        pass
    assert (tmp_path / "theirs").read_text() == "precious"


def test_changes_of_settings_are_named_unless_they_are_free(tmp_path):
    before = {"train.lr": 1, "train.betas": (0.9, 1), "train.device": "cpu", "model.a": 1}
    refuse_changes(before, before | {"train.lr": 1.0, "train.betas": [0.9, 1.0], "train.device": "cuda"}, tmp_path)
    with pytest.raises(InputError, match=r"model\.b was absent, is 2; train\.lr was 1, is 2; ") as error:
        refuse_changes(before, before | {"train.lr": 2, "model.b": 2}, tmp_path)
    assert "device" not in str(error.value)
    with pytest.raises(InputError, match=r"train\.device was cpu, is cuda"):
        refuse_changes(before, before | {"train.device": "cuda"}, tmp_path, free=())
    with pytest.raises(InputError, match=r"a study must .*train\.lr was 1, is 2"):
        refuse_changes(before, before | {"train.lr": 2}, tmp_path, of="a study")


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: [", "a: 1", "[1]"])
def test_settings_are_written_as_sections_of_plain_values(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml.* must be ") as error:
        read_settings(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"], ids=repr)
def test_a_file_that_is_not_a_json_object_is_refused(content, tmp_path):
    (tmp_path / "facts.json").write_bytes(content)
    with pytest.raises(InputError, match=r"facts\.json (must be .*, got|cannot be read as JSON)"):
        read_object(tmp_path / "facts.json")


def test_a_new_folder_must_be_missing_or_empty(tmp_path, monkeypatch):
    assert new_folder(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "empty").mkdir()
    assert new_folder(tmp_path / "empty", "--out") == tmp_path / "empty"
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / "empty" / ".gitattributes").touch()
    assert new_folder(".", "--out") == tmp_path / "empty"
    (tmp_path / "file").touch()
    for used in (tmp_path, tmp_path / "file", tmp_path / "file" / "below" / "folder"):
        with pytest.raises(InputError, match=r"folder must be .*, got"):
            new_folder(used)


@pytest.mark.parametrize(
    "facts",
    [
        {"data": []},
        {"data": {"place": 3}},
        {"data": {"fingerprint": []}},
        {"resumed": 3},
        {"resumed": [3]},
        {"parameters": "x"},
    ],
    ids=str,
)
def test_forged_facts_are_refused(facts, tmp_path):
    path = tmp_path / "facts.json"
    assert read_facts(path) == {}
    path.write_text(json.dumps(facts))
    with pytest.raises(InputError, match=r"facts\.json: "):
        read_facts(path)
