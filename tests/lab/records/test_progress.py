import io
import sys

import pytest

from residua.lab.records import progress
from residua.lab.records.progress import Progress, say


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_lines_show_the_time_left_at_intervals(capsys, clock):
    with Progress("title", 100, done=20) as bar:
        clock[0] += 8
        bar.update(40, "a")  # 20 in 8 seconds: 24 left
        clock[0] += 8
        bar.update(60, "b")
        bar.update(60, "c", line=True)
        clock[0] += 10
        bar.update(80, "d", total=110)
    assert capsys.readouterr() == ("", "a  0:00:24 left\nc  0:00:16 left\nd  0:00:13 left\n")


def test_work_of_an_earlier_process_does_not_count_for_the_speed(capsys, clock):
    with Progress("", 100) as bar:
        bar.skip(50)
        clock[0] += 10
        bar.update(75, "resumed")
    assert capsys.readouterr().err == "resumed  0:00:10 left\n"


def test_the_start_of_processes_does_not_count_for_the_speed(capsys, clock):
    with Progress("", 100) as bar:
        clock[0] += 60  # until the first job reports its step 0
        bar.skip(0)
        bar.update(0, "started")
        clock[0] += 10
        bar.update(20, "going on")
        bar.skip(10)  # a second job begins where it was interrupted
        bar.update(30, "begun", line=True)
    assert capsys.readouterr().err == "started\ngoing on  0:00:40 left\nbegun  0:00:35 left\n"


@pytest.mark.parametrize("options", [{"enabled": False}, {"measuring": True}])
def test_no_progress_is_shown_if_it_is_switched_off(options, capsys):
    with Progress("title", 10, **options) as bar:
        bar.update(10, "x", line=True)
    assert capsys.readouterr() == ("", "")


def made_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return found


@pytest.mark.parametrize(("steps", "known"), [(1, False), (2, True)])
def test_the_slow_start_of_a_resumed_run_does_not_count_for_the_time_left(steps, known, monkeypatch):
    terminal = made_terminal(monkeypatch)
    with Progress("run", 100, done=50, measuring=True) as bar:
        for step in range(51, 51 + steps):
            bar.update(step, "a step")
    assert f"{50 + steps}%" in terminal.getvalue()
    assert ("0:00:0" in terminal.getvalue()) is known


@pytest.mark.parametrize("measuring", [True, False])
def test_a_terminal_shows_a_bar_and_prints_markup_as_text(measuring, monkeypatch):
    terminal = made_terminal(monkeypatch)
    with Progress("[red]run", 10, measuring=measuring) as bar:
        bar.update(5, "step 5/10 [bold]")
    shown = terminal.getvalue()
    assert "[red]run" in shown
    assert "step 5/10 [bold]" in shown
    assert "50%" in shown


def test_an_untrusted_name_is_printed_in_one_line_without_terminal_commands(capsys):
    say("runs/\x1b[2J\nresidua: done")
    assert capsys.readouterr().err == "runs/\\u001b[2J residua: done\n"
