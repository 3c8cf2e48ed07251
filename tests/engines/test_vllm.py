"""vLLM serves converted folders as they are: the same greedy tokens as transformers, and one line for what it cannot.

The tests with vLLM itself run in an environment of their own: `make vllm`.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from time import sleep
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

import residua
from residua.engines import vllm as plugin
from support.converted_models import converted, lively
from support.families import randomised

SCHEMES = ["hc", "mhc", "mhc-deepseek", "ihc", "attnres-block", "lambdas", "gated-delta"]
FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
PROMPTS = [torch.randint(2, 256, (5 + 3 * i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)]
TOKENS = 12

with_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM has an environment of its own: make vllm")


def plain(family):
    """Heads of 64, the least that vLLM's attention takes on a CPU."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128}
    config = FAMILIES[family](**sizes, **heads, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    return randomised(lambda: AutoModelForCausalLM.from_config(config), scale=0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of converted models with connections that are not at their start, by family and scheme."""
    place = tmp_path_factory.mktemp("converted")
    made = {}
    for family in FAMILIES:
        for scheme in SCHEMES:
            made[family, scheme] = place / f"{family}-{scheme}"
            lively(plain(family), scheme).save_pretrained(made[family, scheme])
    return made


def served(requests, place):
    """What vLLM answers, in a process of its own: it changes the classes of transformers."""
    (place / "requests.json").write_text(json.dumps(requests))
    script = Path(__file__).with_name("vllm_serving.py")
    command = [sys.executable, script, place / "requests.json", place / "answers.json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads((place / "answers.json").read_text())


def request(folder, **engine):
    return {"folder": str(folder), "prompts": PROMPTS, "tokens": TOKENS, "engine": {"enforce_eager": True, **engine}}


def generated(model):
    """The greedy tokens of every prompt, one at a time."""
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in PROMPTS]


def logprobs(model, answer):
    """The model's own numbers in the place of those of an answer, all in one row."""
    rows = []
    for prompt, tokens, steps in zip(PROMPTS, answer["tokens"], answer["logprobs"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        scores = logits.float().log_softmax(-1)
        rows += [scores[i, int(token)] for i, step in enumerate(steps) for token in step]
    return torch.stack(rows)


def numbers(answer):
    """The numbers of an answer in the order of `logprobs`."""
    return torch.tensor([number for steps in answer["logprobs"] for step in steps for number in step.values()])


def responds(address):
    try:
        return urlopen(address).status == 200
    except URLError:
        return False


@pytest.fixture(scope="module")
def answers(folders, tmp_path_factory):
    """Every folder served in one precision, by the names in `folders`."""

    def serve(dtype):
        results = served([request(folder, dtype=dtype) for folder in folders.values()], tmp_path_factory.mktemp(dtype))
        return dict(zip(folders, results, strict=True))

    return cache(serve)


@with_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_generates_the_tokens_of_transformers(folders, answers, family, scheme):
    answer = answers("float32")[family, scheme]
    model = residua.load(folders[family, scheme])
    tokens = generated(model)
    assert answer["tokens"] == tokens
    assert tokens != generated(plain(family)), "the connections must matter"
    assert torch.allclose(numbers(answer), logprobs(model, answer), atol=1e-4)


@with_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_vllm_is_as_near_to_exact_numbers_as_transformers(folders, answers, family, scheme):
    """Greedy tokens differ at near ties. Exact are the numbers of the same rounded weights in float32."""
    answer = answers("bfloat16")[family, scheme]
    assert answer["dtypes"].keys() == {"torch.float32"}
    model = residua.load(folders[family, scheme], dtype=torch.bfloat16)
    rounded, exact = logprobs(model, answer), logprobs(model.float(), answer)
    assert (numbers(answer) - exact).norm() < 1.5 * (rounded - exact).norm()


@with_vllm
@pytest.mark.timeout(900)
def test_compiled_the_tokens_are_the_same(folders, tmp_path):
    (answer,) = served([request(folders["llama", "hc"], dtype="float32", enforce_eager=False)], tmp_path)
    assert answer["tokens"] == generated(residua.load(folders["llama", "hc"]))


@with_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_serves_a_folder_as_it_is(folders, ranks):
    """What `vllm serve FOLDER` runs, in several processes, also with tensor parallelism. The command itself asks for
    the version of a package `vllm`, which the package for CPUs is not called."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = "--enforce-eager --dtype float32 --skip-tokenizer-init --max-model-len 128 --gpu-memory-utilization 0.1"
    small += f" --kv-cache-memory-bytes {64 << 20} --port {port} --tensor-parallel-size {ranks}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folders["llama", "hc"]]
    server = subprocess.Popen([*command, *small.split()], env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    try:
        while not responds(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, "the server must start"
            sleep(1)
        body = {"prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "return_token_ids": True}).encode()
        question = Request(f"http://127.0.0.1:{port}/v1/completions", data, {"Content-Type": "application/json"})
        with urlopen(question) as response:
            (choice,) = json.load(response)["choices"]
    finally:
        server.terminate()
        server.wait()
    assert choice["token_ids"] == generated(residua.load(folders["llama", "hc"]))[0]


@with_vllm
@pytest.mark.timeout(900)
def test_vllm_says_in_one_line_what_it_cannot_serve(folders, tmp_path):
    converted("ddl-tc", torch.float32).save_pretrained(tmp_path / "ddl-tc")
    stages = request(folders["llama", "hc"], pipeline_parallel_size=2)
    first, second = [answer["error"] for answer in served([request(tmp_path / "ddl-tc"), stages], tmp_path)]
    assert first == (
        "NotImplementedError: vLLM cannot serve ddl-tc, which reads earlier tokens in its connections; "
        "use residua.load(folder)"
    )
    assert second == (
        "NotImplementedError: pipeline_parallel_size must be 1 for a converted model, whose streams stay in one stage, "
        "got 2"
    )


def saved_config(model, folder):
    """The configuration that vLLM reads from a saved model."""
    model.save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("connection", "name"),
    [
        *((name, name) for name in ("ddl-tc", "ddl-ec", "ddl-cc-ec", "pooled-householder", "lambdas+smear")),
        ({"scheme": "deep_delta", "compress": "token"}, "deep_delta"),
    ],
)
def test_a_scheme_that_reads_earlier_tokens_is_refused_by_its_name_or_that_of_its_class(tmp_path, connection, name):
    config = saved_config(converted(connection, torch.float32), tmp_path)
    with pytest.raises(NotImplementedError, match=rf"^vLLM cannot serve {re.escape(name)}, which reads earlier tokens"):
        plugin.expect_served(config)


def test_every_scheme_that_reads_single_tokens_is_served(tmp_path):
    for scheme in SCHEMES:
        plugin.expect_served(saved_config(converted(scheme, torch.float32), tmp_path))


def test_experts_and_models_without_a_head_are_refused(tmp_path):
    config = saved_config(converted("hc", torch.float32), tmp_path)
    with pytest.raises(NotImplementedError, match=r"^vLLM serves no converted model with experts"):
        plugin.expect_served(config, is_moe=True)
    config = saved_config(converted("hc", torch.float32).model, tmp_path / "trunk")
    with pytest.raises(NotImplementedError, match=r"^vLLM serves converted language models, got"):
        plugin.expect_served(config)


def test_another_vllm_than_tested_is_refused_if_older_and_named_if_newer(caplog):
    major, minor = plugin.TESTED
    plugin.expect_tested(f"{major}.{minor}.3")
    assert not caplog.records
    line = rf"was not tested with residua, {major}\.{minor} was; pip install 'residua\[vllm\]' installs it$"
    with pytest.raises(NotImplementedError, match=f"^vllm {major}.{minor - 1}.0 {line}"):
        plugin.expect_tested(f"{major}.{minor - 1}.0")
    for version in (f"{major}.{minor + 1}.0rc1", "dev"):
        plugin.expect_tested(version)
        (record,) = caplog.records
        assert re.match(f"vllm {version} {line}", record.getMessage())
        caplog.clear()


def test_without_vllm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=r"^vllm is not installed; .*: pip install 'residua\[vllm\]'$"):
        plugin.register()
