"""What completes commands and options in a shell."""

import subprocess
import sys

import pytest

from residua.commands.cli import main

NEEDS_SHTAB = "shtab is not installed: pip install 'residua[completion]'"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("residua stu", {"study"}),
        ("residua study ge", {"geometry"}),
        ("residua train --train.de", {"--train.device"}),
        ("residua train --train.device c", {"cpu", "cuda"}),
        ("residua convert model --connection attnres-", {"attnres-block", "attnres-inkling"}),
        ("residua cost step --train.precision b", {"bfloat16"}),
    ],
)
def test_bash_completes(line, completions, capsys, tmp_path):
    pytest.importorskip("shtab", reason=NEEDS_SHTAB)
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "residua.bash").write_text(capsys.readouterr().out)
    words = line.split()
    code = f"source residua.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_residua"
    command = ["bash", "-c", f'{code}; echo "${{COMPREPLY[@]}}"']
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert set(result.stdout.split()) == completions


def test_a_shell_that_shtab_does_not_know_is_one_line(capsys):
    pytest.importorskip("shtab", reason=NEEDS_SHTAB)
    for argv in (["--print-completion"], ["--print-completion", "cmd"]):
        assert main(argv) == 2
        assert capsys.readouterr().err.startswith("residua: --print-completion must be one of bash, zsh, ")


def test_without_shtab_a_line_says_what_installs_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("it comes with: pip install 'residua[completion]'")
