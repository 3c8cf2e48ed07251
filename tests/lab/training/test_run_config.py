import dataclasses

import pytest

from residua.errors import InputError
from residua.lab.records.progress import say_once
from residua.lab.training import DataConfig, ModelConfig, RunConfig, TrainConfig, load_config
from residua.lab.training.config import recipe_names
from residua.models import SIZES, ResiduaConfig


def write(folder, text):
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_overrides_in_either_form_replace_values_of_the_file(tmp_path):
    path = write(tmp_path, "train:\n  lr: 3e-4\n  steps: 7\nmodel:\n  connection: ddl-cc\ndata:\n")
    config = load_config(path, ["--train.steps=9", "--train.precision=bfloat16", "train.seed=3"])
    assert config.train == TrainConfig(lr=3e-4, steps=9, precision="bfloat16", seed=3)
    assert config.model == ModelConfig(connection="ddl-cc")
    assert config.data == DataConfig()


def test_files_are_merged_and_the_later_one_wins(tmp_path):
    (tmp_path / "short.yaml").write_text("train:\n  steps: 50\n  lr: 3e-4\n")
    (tmp_path / "mine.yaml").write_text("model:\n  connection: mhc\ntrain:\n  lr: 0.5\n")
    stack = ["small", str(tmp_path / "short.yaml"), str(tmp_path / "mine.yaml")]
    config = load_config(stack, ["--train.warmup_steps=5"])
    small = load_config("small")
    every = {"evaluate_every": 1, "checkpoint_every": 1}
    assert config.train == dataclasses.replace(small.train, steps=50, lr=0.5, warmup_steps=5, **every)
    assert config.model == dataclasses.replace(small.model, connection="mhc")
    assert load_config([stack[0], stack[2], stack[1]], ["--train.warmup_steps=5"]).train.lr == 3e-4
    assert load_config([]) == RunConfig()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ['--model.connection={"preset": "ddl-cc", "beta_init": 5e-1}', "--train.adam_eps=1e-08", "--train.lr=3e-4"],
        ["--data.path=123", "--data.source=null", "--model.vocab_size=1000", "--train.compile=true"],
    ],
)
@pytest.mark.parametrize("name", [None, "tiny-ddl", "small", "medium"])
def test_a_configuration_is_restored_from_yaml(name, overrides, tmp_path):
    config = load_config(name, overrides)
    assert load_config(write(tmp_path, config.to_yaml())) == config


def test_the_model_section_builds_the_models_own_configuration():
    """Only the size of the vocabulary depends on the tokenizer."""
    assert load_config().model.vocab_size is None
    given = dataclasses.asdict(load_config(None, ["--model.vocab_size=64"]).model)
    assert ResiduaConfig(**given).to_dict() == ResiduaConfig(vocab_size=64).to_dict()


# Overrides, or the text of a file, and the one line that answers.
MISTAKES = [
    (["--train.lrr=1"], "unknown key train.lrr; did you mean train.lr?"),
    (["--lr=1"], "unknown key lr; did you mean train.lr?"),
    (["--warmup_step=3"], "unknown key warmup_step; did you mean train.warmup_steps?"),
    (["--modle.hidden_size=8"], "unknown key modle.hidden_size; did you mean model.hidden_size?"),
    (["--zzz=1"], "unknown key zzz; --print-config shows every key"),
    (["--model=1"], "unknown key model: must have a dot, such as model.vocab_size"),
    (["--train.lr"], "an override must be KEY=VALUE, such as --train.lr=3e-4, got '--train.lr'"),
    (["--train.lr=fast"], "train.lr must be a number, got 'fast'"),
    (["--train.steps=1.5"], "train.steps must be a whole number, got '1.5'"),
    (["--train.compile=maybe"], "train.compile must be true or false, got 'maybe'"),
    (["--train.precision=fp16"], "train.precision must be one of float32, bfloat16, got 'fp16'"),
    (["--model.head_dim=wide"], "model.head_dim must be a whole number or null, got 'wide'"),
    (["--train.steps=0"], "train.steps must be at least 1, got 0"),
    (["--train.lr=-1"], "train.lr must be a positive number, got -1.0"),
    (["--train.clip=-1"], "train.clip must be 0 or more, got -1.0"),
    (["--train.beta2=1"], "train.beta2 must be a number in [0, 1), got 1.0"),
    (["--train.min_lr_ratio=2"], "train.min_lr_ratio must be a number in [0, 1], got 2.0"),
    (["--train.warmup_steps=500"], "train.warmup_steps must be 0 to train.steps (400), got 500"),
    (["--train.seed=-1"], "train.seed must be 0 or more, got -1"),
    (
        ["--train.optimizer=muon", "--model.mup=true"],
        "train.optimizer must be adamw with model.mup, whose rates are for Adam, got 'muon'",
    ),
    (["--data.vocab_size=0"], "data.vocab_size must be at least 1, got 0"),
    (["--data.validation_fraction=1"], "data.validation_fraction must be a number between 0 and 1, got 1.0"),
    (
        ["--train.sequence_length=2048"],
        "train.sequence_length must be at most model.max_position_embeddings (1024), got 2048",
    ),
    (
        ["--model.num_attention_heads=5"],
        "model.num_attention_heads must be a divisor of hidden_size (768) unless head_dim is given, got 5",
    ),
    ("trian:\n  lr: 1\n", "FILE: unknown key trian; did you mean train?"),
    ("model:\n  connection: [ddl]\n", "FILE: model.connection must be text or a mapping, got ['ddl']"),
    ("- 1\n", "configuration must be a mapping of keys to values, got [1]"),
    ("", "configuration must be a mapping of keys to values, got None"),
    (["--train.lr=1e400"], "train.lr must be a positive number, got inf"),
    (["--train.lr=.nan"], "train.lr must be a positive number, got nan"),
    ([f"--train.seed={2**63}"], f"train.seed must be at most {2**63 - 1}, got {2**63}"),
    (["--data.vocab_size=1000000000000"], "data.vocab_size must be at most 16777216, got 1000000000000"),
    (["--model.num_hidden_layers=1000000"], "model.num_hidden_layers must be at most 16384, got 1000000"),
    (["--model.hidden_size=1000000000000"], "model.hidden_size must be at most 268435456, got 1000000000000"),
    (
        ["--model.connection={preset: hc, num_streams: 1:30}"],
        "model.connection: HyperConnections: num_streams must be a whole number, got '1:30'",
    ),
    ("train:\n  lr: 2020-01-01\n", "FILE: train.lr must be a number, got '2020-01-01'"),
    (["--data.path="], "data.path must be text or null, got ''"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_a_mistake_gives_a_one_line_error(given, message, tmp_path):
    with pytest.raises(InputError) as error:
        load_config(write(tmp_path, given)) if isinstance(given, str) else load_config(None, given)
    said = str(error.value).replace(str(tmp_path / "config.yaml"), "FILE")
    assert said == message


@pytest.mark.parametrize(
    "connection", ["ddl-c", '{"preset": "ddl", "beta_int": 1}', '{"preset": "ddl-cc", "value_channels": 0}']
)
def test_a_mistake_in_the_connection_names_it(connection):
    with pytest.raises(InputError, match=r"^model\.connection.*(did you mean|at least 1)") as error:
        load_config(None, [f"--model.connection={connection}"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["#data", "1e3", ".5e3", "+1e5", "12e4567", "1:30", "*team", "@x", "a: b: c", "%x", "no"]
)
def test_a_text_that_yaml_reads_as_something_else_stays_text(text, tmp_path):
    config = load_config(None, [f"--data.path={text}", f"--train.wandb={text}"])
    assert (config.data.path, config.train.wandb) == (text, text)
    assert load_config(write(tmp_path, config.to_yaml())) == config


def test_the_words_for_nothing_are_null():
    for text in ("null", "~", "NULL"):
        assert load_config("tiny", [f"--data.path={text}", "--data.source=stdlib"]).data.path is None


def test_a_base_and_data_of_null_are_none_on_a_command_line_too(tmp_path):
    """Whether they are there decides which other keys are allowed, and the tokenizer."""
    config = load_config("retrofit", ["--model.base=models/base", "--data.path=null"])
    assert config.data.tokenizer == "models/base"
    assert load_config("tiny", ["--model.base=null"]) == load_config("tiny")
    assert load_config("tiny", ["--model.base=~", "--model.hidden_size=64"]).model.hidden_size == 64


def test_a_recipe_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match=r"must be a recipe \(.*small.*, tiny.*\).*'tinny'; did you mean tiny\?"):
        load_config("tinny")


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config().train.lr = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config().model.hidden_size = 1


def schedule(config):
    return config.train.warmup_steps, config.train.evaluate_every, config.train.checkpoint_every


@pytest.mark.parametrize("recipe", ["tiny-ddl", "nano", "small", "retrofit"])
@pytest.mark.parametrize("part", [0.01, 0.1, 0.5, 1.01, 3])
def test_a_recipe_keeps_its_schedule_in_a_run_of_any_length(recipe, part):
    """Its warmup, evaluations and checkpoints are shares of the run."""
    base = ["--model.base=models/base"] if recipe == "retrofit" else []
    whole = load_config(recipe, base)
    steps = round(part * whole.train.steps)
    expected = [max(least, key * steps // whole.train.steps) for least, key in zip((0, 1, 1), schedule(whole))]
    assert schedule(load_config(recipe, [*base, f"--train.steps={steps}"])) == tuple(expected)


def test_the_schedule_that_a_recipe_gets_is_printed_once(capsys):
    say_once.cache_clear()
    for _ in range(2):
        assert schedule(load_config("nano", ["--train.steps=112"])) == (11, 11, 28)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in ("112", "1124", "warmup_steps 11", "evaluate_every 11", "checkpoint_every 28"))
    load_config("nano", ["--train.steps=1124"])
    assert capsys.readouterr().err == ""


def test_a_resumed_run_keeps_its_schedule(tmp_path, capsys):
    say_once.cache_clear()
    begun = {"train.warmup_steps": 40, "train.evaluate_every": 50, "train.checkpoint_every": 100}
    assert schedule(load_config("tiny", ["--train.steps=60"], begun=begun)) == (40, 50, 100)
    mine = ["--train.steps=60", "--train.evaluate_every=7"]
    assert schedule(load_config("tiny", mine, begun=begun)) == (40, 7, 100)
    saved = write(tmp_path, load_config("tiny", ["--train.steps=60"], begun=begun).to_yaml())
    assert capsys.readouterr().err == ""
    assert schedule(load_config(saved, ["--train.steps=90"])) == (40, 50, 100)
    assert capsys.readouterr().err == ""


def test_a_warmup_set_by_the_user_is_kept(tmp_path, capsys):
    say_once.cache_clear()
    mine = write(tmp_path, "base: tiny\ntrain: {warmup_steps: 30}\n")
    assert load_config([mine, "tiny"], ["--train.steps=20"]).train.warmup_steps == 2
    for sources, overrides in ((["tiny", mine], []), ("tiny", ["--train.warmup_steps=30"])):
        with pytest.raises(InputError, match=r"train\.warmup_steps must be 0 to train\.steps \(20\), got 30"):
            load_config(sources, ["--train.steps=20", *overrides])
    assert "warmup_steps 30" not in capsys.readouterr().err


def test_recipes_have_the_sizes_in_their_names():
    assert set(recipe_names()) >= set(SIZES)
    for name in set(recipe_names()) - {"retrofit"}:  # which trains a model that is there
        size = SIZES[name.partition("-")[0]]
        model = dataclasses.asdict(load_config(name).model)
        assert {key: model[key] for key in size} == size


PAPER_ROWS = ("residual", "ddl", "ddl-tc", "ddl-ec", "ddl-cc", "ddl-cc-ec")


@pytest.mark.parametrize("row", PAPER_ROWS)
@pytest.mark.parametrize("size", ["small", "medium"])
def test_every_row_of_the_paper_is_a_size_and_a_connection(size, row):
    """arXiv 2601.00417v2, section 5.1."""
    config = load_config(size, [f"--model.connection={row}"])
    assert config.model.connection == row
    built = {name: getattr(config.model, name) for name in SIZES[size]}
    assert built == SIZES[size]
    train = config.train
    assert train.batch_size * train.gradient_accumulation == 480
    assert (train.steps, train.sequence_length, train.warmup_steps, train.lr) == (100_000, 1024, 2000, 1e-3)
    assert (train.beta1, train.beta2, train.weight_decay, train.clip) == (0.9, 0.95, 0.1, 1.0)
    assert all(train.gradient_accumulation % gpus == 0 for gpus in (1, 2, 4, 8))
    assert (config.model.mup, config.model.mup_base_width) == (True, 1024)
    assert (config.data.path, config.data.source) == (None, None)


def test_a_file_with_a_base_needs_only_the_differences(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: tiny-ddl\ntrain:\n  steps: 41\n")
    own = tmp_path / "own.yaml"
    own.write_text(f"base: {mine}\ntrain:\n  lr: 0.5\n")
    tiny = load_config("tiny-ddl")
    shares = {"warmup_steps": 4, "evaluate_every": 5, "checkpoint_every": 10}
    train = dataclasses.replace(tiny.train, steps=41, lr=0.5, **shares)
    assert load_config(str(own)) == dataclasses.replace(tiny, train=train)


def test_a_base_that_is_circular_or_unknown_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    for base, message in (
        (str(path), "^base must .*, got"),
        ("tyny", rf"^base in {path} must be .*did you mean tiny\?"),
        ("[1]", r"must be a recipe \(.*\) or a YAML file, relative to the working directory, got"),
        ("''", r"^base in .* must be a recipe"),
    ):
        path.write_text(f"base: {base}\n")
        with pytest.raises(InputError, match=message):
            load_config(str(path))
