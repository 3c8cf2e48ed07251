"""lm-evaluation-harness on local tasks: its own numbers against ours, the table, and the command. No network."""

import json
import math

import pytest
import torch

pytest.importorskip("lm_eval", reason='comes with: pip install ".[eval]"')

import lm_eval
from transformers import LlamaConfig, LlamaForCausalLM

import residua
from residua.commands.cli import main
from residua.errors import InputError
from residua.lab.data import byte_tokenizer
from residua.lab.evaluation.harness import score
from residua.lab.evaluation.published import PAPER_TASKS, rows
from residua.lab.experiment import run
from residua.models import ResiduaForCausalLM
from support.tiny_models import tiny_config
from support.tiny_runs import options, prepare_texts, run_config

QUESTIONS = [
    ("The sky is", ["blue", "made of old cheese", "red"], 0),
    ("Two and two are", ["five", "four", "a herd of cows"], 1),
    ("Ice is", ["hot", "a kind of music", "cold"], 2),
    ("A week has", ["seven days", "nine", "no"], 0),
    ("Grass is", ["loud", "green", "square on Mondays"], 1),
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/documents.jsonl
    validation: {folder}/documents.jsonl
output_type: multiple_choice
training_split: train
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
{metrics}
metadata:
  version: 7.0
"""


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        import datasets.config

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The paper's eight tasks as local files; two of them have no acc_norm."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in QUESTIONS]
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")
    for name in PAPER_TASKS:
        metrics = ["acc"] if name in ("social_iqa", "winogrande") else ["acc", "acc_norm"]
        listed = "\n".join(f"  - metric: {m}\n    aggregation: mean\n    higher_is_better: true" for m in metrics)
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder, metrics=listed))
    return folder


def build():
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "max_position_embeddings": 256, "embedding_init_std": 0.5}
    return ResiduaForCausalLM(tiny_config("ddl-ec", **sizes, eos_token_id=256, pad_token_id=256)).eval()


def likelihoods(model, tokenizer, question, choices):
    """Each choice's log-likelihood after the question, one at a time and without the harness."""
    found = []
    for choice in choices:
        context, whole = tokenizer.encode(question), tokenizer.encode(f"{question} {choice}")
        with torch.no_grad():
            logs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        found.append(sum(logs[i - 1, whole[i]].item() for i in range(len(context), len(whole))))
    return found


@pytest.mark.slow
def test_the_scores_follow_from_the_likelihoods(tasks, monkeypatch):
    """The harness does not read its thousands of own tasks if a folder is given."""
    monkeypatch.setattr("lm_eval.evaluator.TaskManager", None)
    model, tokenizer = build(), byte_tokenizer()
    right = normalised = 0
    for question, choices, answer in QUESTIONS:
        logs = likelihoods(model, tokenizer, question, choices)
        right += max(range(3), key=logs.__getitem__) == answer
        normalised += max(range(3), key=lambda i: logs[i] / len(choices[i])) == answer
    found = score(model, tokenizer, name="mine", tasks=["sciq", "winogrande"], include_path=tasks)
    sciq, winogrande = found.scores
    assert (sciq.metric, sciq.value) == ("acc_norm", pytest.approx(100 * normalised / 5))
    assert (winogrande.metric, winogrande.value) == ("acc", pytest.approx(100 * right / 5))
    share = normalised / 5
    assert sciq.stderr == pytest.approx(100 * math.sqrt(share * (1 - share) / 4))
    assert (sciq.version, sciq.documents, sciq.num_fewshot) == ("7.0", 5, 0)
    assert found.harness.startswith("0.")


@pytest.mark.nightly
@pytest.mark.parametrize("shots", [0, 1])
def test_the_batch_size_changes_nothing(tasks, shots):
    model, tokenizer = build(), byte_tokenizer()
    one, many = (score(model, tokenizer, name="m", num_fewshot=shots, batch_size=b, include_path=tasks) for b in (1, 7))
    assert one == many
    assert [found.task for found in one.scores] == list(PAPER_TASKS)
    assert {found.num_fewshot for found in one.scores} == {shots}


@pytest.mark.nightly
def test_a_converted_model_has_the_scores_of_the_original(tasks):
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=256, initializer_range=0.5)
    )
    options = {"name": "m", "tasks": ["sciq", "winogrande"], "num_fewshot": 1, "include_path": tasks}
    plain = score(model, byte_tokenizer(), **options)
    assert score(residua.convert(model, "hc"), byte_tokenizer(), **options) == plain
    assert score(residua.convert(residua.unconvert(model), "residual"), byte_tokenizer(), **options) == plain


@pytest.mark.nightly
def test_the_table_separates_our_scores_from_published_ones(tasks):
    found = score(build(), byte_tokenizer(), name="mine", include_path=tasks, limit=2)
    header, table = found.table(rows("small", 1))
    assert header == ["", "source", *PAPER_TASKS.values(), "Avg"]
    assert [row[1].partition(":")[0] for row in table] == ["ours"] * 2 + ["published"] * 6
    assert table[2][:3] == ["residual", "published: arXiv 2601.00417v2", "29.01"]
    assert {score.documents for score in found.scores} == {2}
    record = found.to_json(rows("medium", 0))
    assert record["published"][-1]["version"] == 3
    assert json.loads(json.dumps(record))["average"] == pytest.approx(found.average)


def test_a_missing_folder_of_task_files_is_refused():
    with pytest.raises(InputError, match="must be a folder of task files"):
        score(build(), byte_tokenizer(), name="m", tasks=["siqa"], include_path="here")


KINDS = {
    "generation": ("generate_until", "exact_match", {"generation_kwargs": {"until": ["."], "max_gen_toks": 4}}),
    "long": ("generate_until", "exact_match", {"generation_kwargs": {"until": ["."], "max_gen_toks": 256}}),
    "rolling": ("loglikelihood_rolling", "word_perplexity", {}),
    "first": ("multiple_choice", "acc", {"tag": "a_tag", "doc_to_choice": "choices", "doc_to_target": "answer"}),
    "second": ("multiple_choice", "acc", {"tag": "a_tag", "doc_to_choice": "choices", "doc_to_target": "answer"}),
}
MEAN = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
GROUPS = {"with_mean": {"aggregate_metric_list": MEAN}, "without": {}}


@pytest.fixture(scope="module")
def kinds(tasks, tmp_path_factory):
    """A task of every kind, a tag, a group with an aggregate and one without."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, (kind, metric, keys) in KINDS.items():
        files = {"data_files": {"validation": str(tasks / "documents.jsonl")}}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "validation_split": "validation"}
        task |= {"output_type": kind, "doc_to_text": "{{question}}", "doc_to_target": "{{question}}"}
        (folder / f"{name}.yaml").write_text(json.dumps({**task, "metric_list": [{"metric": metric}], **keys}))
    for name, keys in GROUPS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"group": name, "task": ["first", "second"], **keys}))
    return folder


@pytest.mark.nightly
def test_groups_tags_perplexity_and_generation_are_all_reported(kinds):
    options = {"name": "m", "include_path": kinds, "batch_size": 4}
    found = score(build(), byte_tokenizer(), tasks=["with_mean", "rolling", "generation"], **options)
    group, rolling, generation = found.scores
    assert [part.task for part in group.subtasks] == ["first", "second"]
    assert (group.metric, group.documents) == ("acc", 10)
    assert group.value == pytest.approx(sum(part.value for part in group.subtasks) / 2)
    assert (rolling.metric, rolling.title) == ("word_perplexity", "rolling (word_perplexity)")
    assert rolling.value == rolling.results["word_perplexity,none"]
    assert (generation.metric, generation.documents) == ("exact_match", 5)
    assert found.average == pytest.approx((group.value + generation.value) / 2)
    assert len(found.table()[1][0]) == 6
    json.dumps(found.to_json(), allow_nan=False)
    for name in ("a_tag", "without"):
        assert [s.task for s in score(build(), byte_tokenizer(), tasks=[name], **options).scores] == ["first", "second"]


@pytest.mark.slow
def test_the_logits_of_a_bfloat16_model_give_likelihoods_in_float32(kinds):
    """In bfloat16 the likelihoods of these texts, about 100 nats each, would be rounded to half a nat."""
    model, tokenizer = build(), byte_tokenizer()
    options = {"name": "m", "tasks": ["rolling"], "include_path": kinds, "batch_size": 1}
    (found,) = score(model, tokenizer, **options, bfloat16=True).scores
    nats = 0.0
    for question, *_ in QUESTIONS:
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer.encode(question)])
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[None, :-1]).logits[0]
        assert logits.dtype == torch.bfloat16
        nats += torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum").item()
    words = sum(len(question.split()) for question, *_ in QUESTIONS)
    assert found.value == pytest.approx(math.exp(nats / words), rel=1e-4)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["with_mean", "a_tag"], "first .*with_mean .*got 'a_tag'"),
        (["first", "long"], "256 .*long .*256"),
        pytest.param(["first", "nothing"], "nothing", marks=pytest.mark.nightly),  # looks in the harness's own tasks
    ],
)
def test_tasks_that_cannot_be_scored_are_refused_before_the_first_request(kinds, names, said, monkeypatch):
    monkeypatch.setattr(lm_eval, "simple_evaluate", None)
    with pytest.raises(InputError, match=said):
        score(build(), byte_tokenizer(), name="m", tasks=names, include_path=kinds)


@pytest.mark.parametrize(("context", "noted"), [(256, True), (64, False)])
def test_tasks_beyond_the_trained_window_give_a_note(context, noted, capsys, tasks, tmp_path):
    data = prepare_texts(tmp_path)
    model = {"max_position_embeddings": context}
    run(run_config(options(data, model=model, steps=1, sequence_length=64)), tmp_path / "run", progress=False)
    assert main(["evaluate", str(tmp_path / "run"), "--tasks", "sciq", "--include-path", str(tasks)]) == 0
    note = "trained on windows of 64 tokens; tasks give it up to 256"
    assert (note in capsys.readouterr().out) is noted


@pytest.mark.nightly
def test_the_command_evaluates_a_folder_of_transformers(capsys, tasks, tmp_path):
    build().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    argv = ["evaluate", str(tmp_path / "model"), "--tasks", "paper", "--num-fewshot", "1", "--include-path", str(tasks)]
    assert main([*argv, "--published", "small"]) == 0
    table = capsys.readouterr().out
    assert "published: arXiv 2601.00417v2" in table
    assert "lm_eval" in table
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["scores"]) == 8
    assert record["published"] == [], "no published model has this size"
    assert main(["evaluate", str(tmp_path / "model")]) == 2
    assert "--tasks" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--tasks", "paper"]) == 2
