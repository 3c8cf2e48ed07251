import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import pytest
from packaging.requirements import Requirement

from residua import Residual, __version__
from residua.commands.cli import main
from residua.commands.signature import command_parser
from residua.commands.table import COMMANDS
from residua.connections import PRESETS, SCHEMES, Scheme, registry
from residua.connections.names import ALIASES
from residua.errors import installing
from residua.lab import experiment
from support.processes import run_python
from support.tiny_runs import options, prepare_texts

ROOT = Path(__file__).parents[2]
SMALL = [
    "--config",
    "tiny",
    *options(None, steps=4, warmup_steps=1, evaluate_every=2, checkpoint_every=100, gradient_accumulation=1),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_texts(tmp_path_factory.mktemp("cli")).folder


@pytest.fixture(scope="module")
def runs(prepared, tmp_path_factory):
    """A finished run of the plain residual and one of ddl."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("residual", "ddl"):
        overrides = ["--data.path", str(prepared), "--model.connection", name]
        assert main(["train", "--run", str(folder / name), *SMALL, *overrides]) == 0
    return folder


def output(capsys, argv):
    """What a command that must succeed prints."""
    capsys.readouterr()
    status = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def error(capsys, argv):
    """The one line that a command which must fail prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("residua: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


def test_the_command_prints_its_version_and_an_overview(capsys):
    assert output(capsys, ["--version"]) == f"residua {__version__}\n"
    overview = output(capsys, ["--help"])
    assert all(f"  {name.split()[0]} " in overview for name in COMMANDS)
    assert output(capsys, ["help"]) == overview


@pytest.mark.parametrize("name", [*COMMANDS, "study", "study geometry", "cost"])
def test_every_command_explains_itself_in_80_columns_with_examples_that_it_understands(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    text = output(capsys, [*name.split(), "--help"])
    assert f"usage: residua {name}" in text
    examples, _, _ = text.partition("examples:")[2].partition("\n\n")
    assert f"  residua {name}" in examples
    assert output(capsys, ["help", *name.split()]) == text
    assert max(map(len, (text + output(capsys, [*name.split(), "--help-all"])).splitlines())) <= 80
    for line in examples.replace("\\\n", "").splitlines():
        example = next((words for words in COMMANDS if f" {words} " in f"{line} "), None)
        if example is not None:
            argv = shlex.split(line.partition(f"residua {example}")[2].partition(" > ")[0])
            command_parser(f"residua {example}", resolve_name(f"residua.commands.{COMMANDS[example]}")).parse_args(argv)


def test_without_a_command_the_overview_is_an_error(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trian", "there is no command trian; did you mean train?"),
        ("study", "one of run, report, verify, tune, geometry must follow study"),
        ("study rnu", "there is no command study rnu; did you mean run?"),
        ("generate", "RUN|HF_DIR, --prompt"),
        ("generate x --prompt a --temprature 1", "did you mean --temperature?"),
        ("generate x --prompt a --seed one", "--seed"),
        ("generate x --prompt a --top-p 0", "--top-p must be a number above 0, at most 1, got 0.0"),
        ("evaluate x y", "unexpected argument 'y'"),
        ("evaluate no-such-folder", "no-such-folder must be a run folder or a folder with a transformers model"),
        ("evaluate x --limit 3", "--limit needs --tasks, got none"),
        ("compare no-such-folder", "no-such-folder must be a run folder, found no such folder"),
        ("train --run x", "--config NAME|FILE.yaml must say what to train"),
        ("cost count", "--config NAME|FILE.yaml must say which run to count"),
        ("generate x --prompt a --temperature 0", "(--greedy takes the most probable token), got 0.0"),
        ("train --config tiny", "--run DIR"),
        ("train --run no-such-folder --resume", "must be a run to resume"),
        ("train --run x --config tiny --resme", "did you mean --resume?"),
        ("train --run x --config tiny --lr 1", "did you mean --train.lr?"),
        ("train --run x --config tiny --data.path no-such-folder", "no-such-folder"),
        ("prepare --source no-such-file --out x", "no-such-file"),
        ("demo --steps 0", "residua: --steps must be at least 1, got 0"),
        ("study run resbench", "the following arguments are required: --out"),
        ("study run nothing.yaml --out x", "must be resbench or a YAML file"),
        ("study report", "the following arguments are required: DIR"),
        ("study verify nowhere --share 0", "--share must be a number above 0, 1 at most, got 0"),
        ("study run resbench --out x --seeds 7", "unknown option --seeds"),
        ("study report x --no-costs", "unknown option --no-costs; see residua study report --help"),
        ("study run resbench --out x --sizes 9M", "--sizes must be some of"),
        ("study tune --config tiny", "give --out DIR"),
        ("study tune --config tiny --out x", "--over must have at least one key"),
        ("study tune --config tiny --out x --over train.lr=", "must be KEY=VALUE,VALUE"),
        ("study tune --config tiny --out x --over 'train.lr=[1'", "must be KEY=VALUE,VALUE"),
        ("study tune --config tiny --out x --over train.lr=1e-3 --over train.lr=2e-3", "must have train.lr once"),
        ("study tune --config tiny --out x --over train.seed=1,2", "--seeds N"),
        ("study tune --config tiny --out x --over train.lrr=1", "did you mean train.lr"),
        ("study tune --config tiny --out x --over train.lr=1e-3,-1", "train.lr must be a positive number"),
        ("study tune --config tiny --out x --over model.connection=residual,dll", "ddl"),
        (
            "study tune --config tiny --out x --over model.connection=ddl --neighbours",
            "--neighbours needs --over with a key",
        ),
        ("study tune --config tiny --out x --over train.lr=1 --trian.steps 3", "train.steps"),
        ("study geometry", "one of reflection, quick must follow study geometry"),
        ("study geometry refection", "refection"),
        ("study geometry quick --models dll", "did you mean ddl?"),
        ("study geometry quick --device tpu", "--device must be one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_bad_input_gives_a_one_line_error_and_status_2_and_writes_nothing(
    capsys, tmp_path, monkeypatch, line, expected
):
    monkeypatch.chdir(tmp_path)
    assert expected in error(capsys, shlex.split(line))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_schemes_command_explains_one_scheme(capsys):
    """It prints the values of the preset, the defaults, the meaning of each option, and the published results."""
    text = output(capsys, ["schemes", "ddl-cc"])
    (record,) = [json.loads(output(capsys, ["schemes", "ddl-cc", "--json"]))]
    kind = PRESETS["ddl-cc"]
    for words in (kind.title, kind.equation, kind.source, "+132,268 at small", "a state of 4d", "(default: null; "):
        assert words in text
    assert max(map(len, text.partition("published")[0].splitlines())) < 80
    assert "compress = channel (default: null; one of token, channel or null)" in text
    assert "compress_kernel = 4 (default: null; a whole number or null, at least 1, at most 1024)" in " ".join(
        text.split()
    )
    assert "k_eps = 1e-05 (default: 1e-05; a positive number)" in text
    assert " ".join(kind.users.split()) in " ".join(text.split())
    assert all(option["meaning"] in " ".join(text.split()) for option in record["all_options"])
    assert {"scheme": "ddl-cc", "small, 1-shot": "49.13 (v2)"}.items() <= record["published"][1].items()
    assert "ddl-cc (DDL-CC w/o EC)" in text
    assert {"row": "ddl-tc", "size": "0.1M"}.items() <= record["ours"][1].items()
    assert text.index("ours, ResBench") < text.index("compress = channel")
    first_screen = " ".join(text.partition("\npublished")[0].split())
    assert f"compress=channel, compress_kernel=4, value_channels=4; all {len(record['all_options'])}" in first_screen
    assert "ddl-cc" not in output(capsys, ["schemes", "mhc"])
    assert "This is lambdas with compress=token." in output(capsys, ["schemes", "lambdas+tc"])
    streams = "num_streams = 2 (default: 4; a whole number, at least 2, at most 256)"
    assert streams in output(capsys, ["schemes", "mhc:num_streams=2"])
    assert "did you mean 'ddl'" in error(capsys, ["schemes", "dll"])
    options = [line.partition(" = ")[0] for line in text.splitlines() if " = " in line and " (default: " in line]
    assert options[:4] == ["compress", "compress_kernel", "value_channels", "map"]  # the preset's come first


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["schemes"],
        ["schemes", "ddl"],
        ["cost", "count", "--config", "tiny"],
        ["prepare", "--source", "texts", "--out", "data", "--tokenizer", "byte"],
        ["explore", "ddl", "--no-page"],
    ],
)
def test_output_fits_a_terminal_of_80_columns(runs, prepared, capsys, monkeypatch, tmp_path, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddl").symlink_to(runs / "ddl")
    (tmp_path / "texts").mkdir()
    for file in (prepared.parent / "text").iterdir():
        (tmp_path / "texts" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line for line in output(capsys, argv).splitlines() if str(tmp_path.parent) not in line]
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.slow
def test_the_listed_results_equal_the_records():
    """resbench/scheme_results.py writes the file."""
    module = runpy.run_path(str(ROOT / "resbench" / "scheme_results.py"))
    assert module["FILE"].read_text(encoding="utf-8") == module["results"]()


@pytest.mark.parametrize("name", PRESETS)
def test_every_built_in_scheme_has_a_title_and_users(name):
    assert PRESETS[name].title
    assert PRESETS[name].users.endswith(".")


def test_a_registered_scheme_without_an_equation_breaks_no_list(capsys, monkeypatch):
    unfinished = dataclass(frozen=True)(type("Unfinished", (Scheme,), {"assemble": None, "state_spec": None}))
    monkeypatch.setitem(PRESETS, "unfinished", unfinished())
    monkeypatch.setitem(SCHEMES, "unfinished", unfinished)
    assert "unfinished: -, because it cannot be built here" in output(capsys, ["schemes"])
    assert "no equation is declared" in output(capsys, ["schemes", "unfinished"])


def test_schemes_lists_every_preset_with_the_parameters_of_the_paper(capsys):
    records = {record["name"]: record for record in json.loads(output(capsys, ["schemes", "--json"]))}
    assert records.keys() == PRESETS.keys()
    assert records["residual"]["parameters_added"] == {"small": 0, "medium": 0}
    # The authors' classes on the meta device give the same.
    assert records["ddl"]["parameters_added"] == {"small": 36_912, "medium": 98_400}
    assert records["ddl-cc-ec"]["parameters_added"] == {"small": 144_556, "medium": 364_884}
    assert (records["ddl"]["state_per_token"], records["ddl-cc-ec"]["state_per_token"]) == ("d", "4d")
    assert records["attnres"]["state_per_token"] == "d to 25d"
    assert records["attnres-block"]["state_per_token"] == "d to 3d"
    table = output(capsys, ["schemes"])
    assert all(any(line.startswith(f"{name} ") for line in table.splitlines()) for name in PRESETS)
    assert "+144,556" in table
    assert ALIASES.keys() <= set(table.replace(",", " ").split())


def test_a_scheme_that_cannot_be_built_is_still_listed(capsys, monkeypatch):
    class Narrow(Residual):
        def assemble(self, dim, num_sublayers, *options):
            raise ValueError(f"must be a width of at most 64, got {dim}")

    monkeypatch.setattr(registry, "PRESETS", {"narrow": Narrow(), "residual": Residual()})
    narrow, plain = json.loads(output(capsys, ["schemes", "--json"]))
    assert narrow["parameters_added"] == {"small": None, "medium": None}
    assert narrow["not_built"] == "ValueError: must be a width of at most 64, got 768"
    assert (plain["parameters_added"], plain["not_built"]) == ({"small": 0, "medium": 0}, None)
    table = output(capsys, ["schemes"]).splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["narrow", "residual"]
    assert table[-1] == "narrow: -, because it cannot be built here: ValueError: must be a width of at most 64, got 768"


def test_print_config_shows_the_resolved_configuration_and_trains_nothing(capsys, tmp_path):
    text = output(capsys, ["train", "--config", "tiny", "--train.lr", "0.5", "--print-config"])
    (tmp_path / "mine.yaml").write_text(text)
    assert "lr: 0.5" in text
    assert output(capsys, ["train", "--config", tmp_path / "mine.yaml", "--print-config"]) == text


def test_cost_count_prints_the_configuration_to_be_counted(capsys):
    argv = ["--config", "tiny", "--train.lr", "0.5", "--print-config"]
    assert output(capsys, ["cost", "count", *argv]) == output(capsys, ["train", *argv])


def test_evaluate_prints_a_table_or_json(capsys, runs):
    record = json.loads(output(capsys, ["evaluate", runs / "ddl", "--json"]))
    split = {"repeated_loss", "other_loss", "repeated_share"}
    assert record.keys() == {"step", "val_loss", "perplexity", "bits_per_byte", "tokens"} | split
    assert record["step"] == 4
    table = output(capsys, ["evaluate", runs / "ddl"])
    assert f"{record['val_loss']:.4f}" in table
    assert "found those of steps 4" in error(capsys, ["evaluate", runs / "ddl", "--checkpoint", "3"])


def test_evaluate_opens_the_best_checkpoint(capsys, prepared, tmp_path):
    """The second of three evaluations is made the best, so that it is neither the first nor the newest."""
    every = ["--train.evaluate_every", "1", "--train.checkpoint_every", "1", "--train.keep_checkpoints", "9"]
    output(capsys, ["train", "--run", tmp_path / "run", *SMALL, "--data.path", prepared, *every])
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        manifest = tmp_path / "run" / "checkpoints" / f"step-{step}" / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"val_loss": loss}))
    argv = ["evaluate", tmp_path / "run", "--json", "--checkpoint"]
    assert json.loads(output(capsys, [*argv, "best"]))["step"] == 2
    assert "must be a whole number or best, got 'worst'" in error(capsys, [*argv, "worst"])
    for manifest in (tmp_path / "run").glob("checkpoints/*/manifest.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"val_loss": None}))
    assert "must hold a checkpoint with a validation loss" in error(capsys, [*argv, "best"])


def test_a_run_that_resumes_by_its_recipe_keeps_the_schedule_that_it_began_with(capsys, prepared, tmp_path):
    """This also holds if another version of residua gave the recipe another schedule."""
    small = [option for option in SMALL if "warmup" not in option and "every" not in option]
    argv = ["train", "--run", tmp_path / "run", *small, "--data.path", prepared]
    output(capsys, argv)
    config = tmp_path / "run" / "config.yaml"
    assert "warmup_steps: 0\n" in config.read_text()
    assert "evaluate_every: 1\n" in config.read_text()
    config.write_text(config.read_text().replace("warmup_steps: 0\n", "warmup_steps: 3\n"))
    for manifest in (tmp_path / "run").glob("checkpoints/*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"train.warmup_steps": 0', '"train.warmup_steps": 3'))
    output(capsys, [*argv, "--resume"])
    output(capsys, [*argv, "--resume", "--train.steps", "5"])
    assert "warmup_steps: 3\n" in config.read_text()


def test_generate_prints_the_prompt_and_the_same_text_for_the_same_seed(capsys, runs):
    argv = ["generate", runs / "ddl", "--prompt", "Text", "--max-new-tokens", "20", "--seed"]
    first = output(capsys, [*argv, "1"])
    assert first.startswith("Text")
    assert first.endswith("\n")
    assert output(capsys, [*argv, "1"]) == first
    assert output(capsys, [*argv, "2"]) != first


def test_compare_prints_a_table_and_writes_the_requested_files(capsys, runs, tmp_path):
    folders = [runs / "residual", runs / "ddl"]
    table = output(capsys, ["compare", *folders, "--out", tmp_path])
    assert "vs residual" in table
    assert "baseline" in table
    names = {"loss.png", "repeats.png", "difference.png", "comparison.md", "comparison.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    printed = json.loads(output(capsys, ["compare", *folders, "--json"]))
    assert printed == json.loads((tmp_path / "comparison.json").read_text())
    assert [group["name"] for group in printed["groups"]] == ["residual", "ddl"]
    assert printed["groups"][0]["parameters"] < printed["groups"][1]["parameters"]
    assert "did you mean residual?" in error(capsys, ["compare", *folders, "--baseline", "residul"])


def test_a_finished_run_is_unchanged_and_a_used_folder_is_refused(capsys, prepared, runs):
    metrics = runs / "ddl" / "metrics.jsonl"
    before = metrics.read_bytes()
    assert "step 4" in output(capsys, ["train", "--run", runs / "ddl", "--resume"])
    assert "--resume" in error(capsys, ["train", "--run", runs / "ddl", *SMALL, "--data.path", prepared])
    assert "train.lr" in error(capsys, ["train", "--run", runs / "ddl", "--resume", "--train.lr", "0.5"])
    assert metrics.read_bytes() == before


IMPORTED = {"pyyaml": "yaml"}
"""The module of a package, where it has another name."""
BLOCK = """
import sys
from importlib.machinery import PathFinder
class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
from residua.commands.cli import main
statuses = []
for blocked, command in commands:
    statuses.append(main(command))
print(*statuses)
"""


def each_without(*commands):
    """The statuses of commands in one process, each with the modules that are not installed, and what they print.

    A module that an earlier command had is there.
    """
    commands = [(sorted(blocked), command) for blocked, command in commands]
    printed, said = run_python(f"blocked, commands = [], {commands}\n{BLOCK}")
    *lines, statuses = printed.splitlines()
    return [int(status) for status in statuses.split()], lines, said


def extras():
    """The modules of each extra of pyproject.toml and of the extras that it includes."""
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML from 3.11 on")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def modules(name):
        requirements = list(map(Requirement, listed[name]))
        included = [modules(extra) for line in requirements if line.name == "residua" for extra in line.extras]
        return {IMPORTED.get(line.name, line.name) for line in requirements if line.name != "residua"}.union(*included)

    return {name: modules(name) for name in listed}


@pytest.mark.nightly
@pytest.mark.processes
def test_the_lab_extra_is_enough_for_all_commands_and_hints_name_it(runs, prepared, tmp_path):
    """The demo names missing packages before it trains."""
    run, out = str(runs / "ddl"), str(tmp_path)
    commands = [
        ["explore", run, "--out", f"{out}/page.html"],
        ["compare", run, "--out", out],
        ["train", "--run", run, "--resume"],
        ["generate", run, "--prompt", "Text", "--max-new-tokens", "2"],
        ["prepare", "--source", str(prepared.parent / "text"), "--tokenizer", "byte", "--out", f"{out}/new"],
    ]
    known = extras()
    optional = set().union(*known.values())
    without_lab = [["schemes"], ["schemes", "ddl-tc"], *commands]
    statuses, table, err = each_without(*((optional, command) for command in without_lab))
    assert statuses == [0, 0, 1, 1, 1, 1, 1], err
    assert err.count(installing("lab")) == len(commands)
    assert all(any(line.startswith(f"{name} ") for line in table) for name in PRESETS), "torch alone lists the schemes"
    assert any("+144,556" in line for line in table)

    beyond = optional - known["lab"]
    modules = ["transformers", "matplotlib", "plotly"]  # in the order in which the demo imports them
    demos = [(beyond | {name}, ["demo", "--out", f"{out}/{name}"]) for name in modules]
    statuses, _, err = each_without(*demos, *((beyond, command) for command in commands))
    assert statuses == [1] * len(modules) + [0] * len(commands), err
    hints = [line for line in err.splitlines() if installing("lab") in line]
    assert [name for name, hint in zip(modules, hints, strict=True) if name in hint] == modules
    assert not any((tmp_path / name).exists() for name in modules)


@pytest.mark.processes
def test_missing_training_packages_are_named_with_the_command_that_installs_them(tmp_path):
    missing = ["yaml", "transformers"]  # in the order in which the command imports them
    command = ["train", "--config", "tiny", "--run", str(tmp_path / "run")]
    statuses, _, err = each_without(*(({name}, command) for name in missing))
    assert statuses == [1] * len(missing), err
    told = [line.removeprefix("residua: ") for line in err.splitlines() if line.startswith("residua: ")]
    assert told == [f"{name} is not installed; it comes with: {installing('lab')}" for name in missing]


def train_without_a_reader(opened, number, argv):
    """Train in this process, whose messages nobody reads from batch 2 on and which a signal ends before batch 40."""
    reader, writer = opened()
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    deeds = {2: lambda: os.close(reader), 40: lambda: signal.raise_signal(number)}
    take = experiment.Batches.at

    def at(batches, index):
        deeds.get(index, lambda: None)()
        return take(batches, index)

    experiment.Batches.at = at
    os._exit(main(argv))


@pytest.mark.parametrize(("opened", "number"), [(os.pipe, signal.SIGINT), (os.openpty, signal.SIGUSR1)])
def test_training_continues_after_the_reader_of_its_messages_ends(opened, number, start, prepared, tmp_path):
    """Examples are `2>&1 | head`, and a terminal that was closed while SIGHUP is ignored."""
    run = tmp_path / "run"
    argv = ["train", "--run", str(run), *SMALL, "--data.path", str(prepared), "--train.steps", "1000"]
    process = start(train_without_a_reader, opened, number, argv)
    process.join()
    assert process.exitcode == 128 + number
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-41"]


@pytest.mark.processes
def test_a_closed_pipe_on_stdout_prints_no_error():
    command = f"{sys.executable} -m residua --help | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stderr == ""


@pytest.mark.processes
def test_the_command_is_installed():
    script = Path(sys.executable).parent / "residua"
    if not script.exists():
        pytest.skip("the package is not installed beside this Python")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"residua {__version__}\n"
