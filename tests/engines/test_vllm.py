"""vLLM serves converted folders unchanged, with the greedy tokens of transformers, or refuses them in one line.

The tests with vLLM itself run in an environment of their own: `make vllm`.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from time import sleep
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

import residua
from residua.connections import PRESETS
from residua.connections.parts.memory import window_of
from residua.engines import vllm as plugin
from support.converted_models import converted, lively
from support.families import randomised

LOOKING_BACK = [
    "lambdas+tc",
    "residual+tc",
    "ddl-tc",
    "ddl-tc-v",
    "ddl-ec",
    "ddl-cc-ec",
    "lambdas+smear",
    "lambdas+conv",
]
NOT_SERVED = {"mudd", "pooled-householder"}  # no layer of transformers takes the inputs of mudd
SCHEMES = list(dict.fromkeys([*(name for name in PRESETS if name not in NOT_SERVED), *LOOKING_BACK]))
FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
CASES = [("llama", scheme) for scheme in SCHEMES] + [("qwen3", scheme) for scheme in ("hc", "attnres-block", "ddl-tc")]


def prompt(seed, length):
    return torch.randint(2, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(i, 5 + 3 * i) for i in range(8)]
MIXED = [prompt(i, 1 + 7 * i % 90) for i in range(64)]
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
    for family, scheme in CASES:
        made[family, scheme] = place / f"{family}-{scheme}"
        lively(plain(family), scheme).save_pretrained(made[family, scheme])
    return made


def served(requests, place):
    """What vLLM answers, in a process of its own: it changes the classes of transformers."""
    (place / "requests.json").write_text(json.dumps(requests))
    script = Path(__file__).with_name("vllm_serving.py")
    command = [sys.executable, script, place / "requests.json", place / "answers.json"]
    result = subprocess.run(command, capture_output=True, text=True)
    print(result.stdout, result.stderr, sep="\n")
    assert result.returncode == 0
    return json.loads((place / "answers.json").read_text())


def request(folder, prompts=PROMPTS, tokens=TOKENS, **engine):
    return {"folder": str(folder), "prompts": prompts, "tokens": tokens, "engine": {"enforce_eager": True, **engine}}


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
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_vllm_generates_the_tokens_of_transformers(folders, answers, family, scheme):
    answer = answers("float32")[family, scheme]
    model = residua.load(folders[family, scheme])
    tokens = generated(model)
    assert answer["tokens"] == tokens
    assert (tokens == generated(plain(family))) == (scheme == "residual"), "the connections must matter"
    narrow, exact = logprobs(model, answer), logprobs(model.double(), answer)  # some schemes multiply rounding errors
    assert (numbers(answer) - exact).abs().max() < max(1e-4, 1.5 * (narrow - exact).abs().max())


@with_vllm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_in_bfloat16_vllm_is_as_near_to_exact_numbers_as_transformers(folders, answers, family, scheme):
    """Greedy tokens differ at near ties. The exact numbers are those of the same rounded weights in float32."""
    answer = answers("bfloat16")[family, scheme]
    model = residua.load(folders[family, scheme], dtype=torch.bfloat16)
    has_parameters = any(".stream." in name for name, _ in model.named_parameters())
    assert answer["dtypes"].keys() == ({"torch.float32"} if has_parameters else set())
    rounded, exact = logprobs(model, answer), logprobs(model.float(), answer)
    assert (numbers(answer) - exact).norm() < 1.5 * (rounded - exact).norm()


@with_vllm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["lambdas+tc", "residual+tc", "ddl-tc"])
def test_mixed_requests_in_pieces_and_with_eviction_get_the_tokens_of_transformers(folders, tmp_path, scheme):
    """Each greedy token is the one that the model finds likeliest after all tokens before it."""
    folder = folders["llama", scheme]
    few = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 60}
    asked = [({"max_num_seqs": 64}, TOKENS), (few, 36)]
    answers = served([request(folder, MIXED, tokens, dtype="float32", **how) for how, tokens in asked], tmp_path)
    assert answers[0]["preemptions"] == 0 < answers[1]["preemptions"]
    model = residua.load(folder)
    for answer in answers:
        for prompt, tokens in zip(MIXED, answer["tokens"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            assert tokens == logits.argmax(-1).tolist()


@with_vllm
@pytest.mark.timeout(3600)
def test_prefix_caching_is_switched_off_for_convolutions_with_a_message(folders, tmp_path, capsys):
    cached = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "dtype": "float32"}
    (answer,) = served([request(folders["llama", "lambdas+tc"], PROMPTS * 2, **cached)], tmp_path)
    assert answer["tokens"] == generated(residua.load(folders["llama", "lambdas+tc"])) * 2
    said = "Prefix caching and compilation are off for a scheme that reads earlier tokens"
    assert said in capsys.readouterr().out


@with_vllm
@pytest.mark.timeout(3600)
def test_the_folder_in_the_production_guide_is_served(tmp_path):
    path = Path(__file__).parents[2] / "examples/production.py"
    example, out = runpy.run_path(str(path)), tmp_path / "out"
    example["main"](example["tiny_base"](tmp_path / "base"), path, out)
    (answer,) = served([request(out, dtype="float32")], tmp_path)
    assert answer["tokens"] == generated(residua.load(out))


@with_vllm
@pytest.mark.timeout(3600)
def test_compiled_generation_gives_the_same_tokens(folders, tmp_path):
    (answer,) = served([request(folders["llama", "hc"], dtype="float32", enforce_eager=False)], tmp_path)
    assert answer["tokens"] == generated(residua.load(folders["llama", "hc"]))


@with_vllm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("scheme", "ranks"), [("hc", 1), ("hc", 2), ("lambdas+tc", 2), ("ddl-tc", 2)])
def test_the_vllm_command_serves_an_unchanged_folder(folders, scheme, ranks):
    """What `vllm serve FOLDER` runs, in several processes, also with tensor parallelism. The command itself asks for
    the version of a package `vllm`, which the package for CPUs is not called."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = "--enforce-eager --dtype float32 --skip-tokenizer-init --max-model-len 128 --gpu-memory-utilization 0.1"
    small += f" --kv-cache-memory-bytes {64 << 20} --port {port} --tensor-parallel-size {ranks}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folders["llama", scheme]]
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
    assert choice["token_ids"] == generated(residua.load(folders["llama", scheme]))[0]


@with_vllm
@pytest.mark.timeout(3600)
def test_a_scheme_that_vllm_cannot_serve_gives_a_one_line_error(folders, tmp_path):
    converted("pooled-householder", torch.float32).save_pretrained(tmp_path / "refused")
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    asked = [
        request(tmp_path / "refused"),
        request(folders["llama", "hc"], pipeline_parallel_size=2),
        request(folders["llama", "lambdas+tc"], speculative_config=drafts),
    ]
    scheme, stages, speculation = [answer["error"] for answer in served(asked, tmp_path)]
    assert scheme.startswith("NotImplementedError: vLLM cannot serve pooled-householder, which reads")
    assert stages == (
        "NotImplementedError: pipeline_parallel_size must be 1 for a converted model, whose streams stay in one stage, "
        "got 2"
    )
    assert speculation.startswith("NotImplementedError: speculative_config must be None")


def saved_config(model, folder):
    """The configuration that vLLM reads from a saved model."""
    model.save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("connection", "name"),
    [
        ("pooled-householder", "pooled-householder"),
        ("ddl-tc:beta_input=conv", "ddl-tc:beta_input=conv"),
        ({"scheme": "deep_delta", "compress": "token", "beta_input": "conv"}, "ddl:compress=token,beta_input=conv"),
    ],
)
def test_a_scheme_that_reads_earlier_tokens_without_filters_is_refused_by_its_written_name(tmp_path, connection, name):
    config = saved_config(converted(connection, torch.float32), tmp_path)
    with pytest.raises(NotImplementedError, match=rf"^vLLM cannot serve {re.escape(name)}, "):
        plugin.expect_served(config)


@pytest.mark.parametrize("scheme", ["residual", *LOOKING_BACK])
def test_a_scheme_that_reads_single_tokens_or_through_filters_is_served(tmp_path, scheme):
    plugin.expect_served(saved_config(converted(scheme, torch.float32), tmp_path))


class Scheduled(plugin.FilterMemory):
    """A memory that is told of its requests as vLLM tells it. Pages hold NaN before their first use."""

    def __init__(self, numbers, dtype):
        self.kv_cache = (torch.full((8, numbers), torch.nan, dtype=dtype),)
        self.now = None

    def batch(self):
        return self.now


def as_batch(single, pieces):
    """Rows of vLLM: the pages of requests with one new token, then (page, length, whether it has begun) of prompts."""
    lengths = torch.tensor([0, *(length for _, length, _ in pieces)])
    return SimpleNamespace(
        num_decodes=len(single),
        num_prefills=len(pieces),
        state_indices_tensor_d=torch.tensor(single)[:, None] if single else None,
        state_indices_tensor_p=torch.tensor([page for page, _, _ in pieces]),
        query_start_loc_p=lengths.cumsum(0),
        has_initial_states_p=torch.tensor([begun for _, _, begun in pieces]),
    )


# Requests 0, 1 and 2: 7, 5 and 6 tokens in steps of (request, page, tokens); request 1 is evicted and begins anew.
SCHEDULE = [
    [(0, 3, 4)],
    [(0, 3, 2), (1, 5, 1)],
    [(0, 3, 1), (1, 5, 3), (2, 1, 2)],
    [(2, 1, 1), (1, 3, 4)],
    [(2, 1, 1), (1, 3, 1)],
    [(2, 1, 2)],
]


@pytest.mark.parametrize("scheme", [*LOOKING_BACK, "lambdas:branch=conv"])
@pytest.mark.parametrize(("dtype", "distance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_requests_in_pieces_and_in_one_row_give_the_logits_of_whole_sequences(scheme, dtype, distance):
    wide = torch.promote_types(dtype, torch.float32)
    stream = residua.build(scheme, 8, 4).to(wide)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    sublayers = [torch.nn.Linear(8, 8, dtype=dtype) for _ in range(4)]
    inputs = [torch.randn(1, length, 8, dtype=dtype) for length in (7, 5, 6)]
    with torch.no_grad():
        expected = [stream(x, sublayers) for x in inputs]
    plugin.make_filters(stream.parts)
    numbers = 8 * max(map(window_of, stream.parts))
    memories = [Scheduled(numbers, wide) if window_of(part) else None for part in stream.parts]
    done, pages, found = [0] * 3, [None] * 3, [[], [], []]
    for step in SCHEDULE:
        for request, page, _ in step:
            if pages[request] != page:
                done[request], pages[request], found[request] = 0, page, []
        step.sort(key=lambda item: item[2] > 1 or not done[item[0]])
        single = [page for request, page, length in step if length == 1 and done[request]]
        for memory in filter(None, memories):
            memory.now = as_batch(single, [(p, n, bool(done[r])) for r, p, n in step[len(single) :]])
        rows = [inputs[r][:, done[r] : done[r] + n] for r, _, n in step]
        x = torch.cat([*rows, torch.full((1, 2, 8), torch.nan, dtype=dtype)], 1)  # vLLM fills it up with anything
        with torch.no_grad():
            state = stream.expand(x, memories[0])
            for connection, sublayer, memory in zip(stream.connections, sublayers, memories[1:]):
                y, carry = connection.read(state, memory)
                state = connection.write(sublayer(y), carry)
            x = stream.collapse(state, memories[-1])
        for (request, _, length), row in zip(step, x.split([n for _, _, n in step] + [2], 1)):
            done[request] += length
            found[request].append(row)
    for rows, whole in zip(found, expected):
        assert (torch.cat(rows, 1) - whole).norm() < distance * whole.norm()


def test_experts_and_models_without_a_head_are_refused(tmp_path):
    config = saved_config(converted("hc", torch.float32), tmp_path)
    with pytest.raises(NotImplementedError, match=r"^vLLM .*experts"):
        plugin.expect_served(config, is_moe=True)
    config = saved_config(converted("hc", torch.float32).model, tmp_path / "trunk")
    with pytest.raises(NotImplementedError, match=r"^vLLM .*, got"):
        plugin.expect_served(config)


def test_an_older_vllm_is_refused_and_a_newer_one_gives_a_message(caplog):
    (major, oldest), (_, newest) = plugin.TESTED[0], plugin.TESTED[-1]
    for minor in (oldest, newest):
        plugin.expect_tested(f"{major}.{minor}.3")
    assert not caplog.records
    line = rf'was not tested with residua, {major}\.{oldest} and {major}\.{newest} were; pip install "\.\[vllm\]"'
    with pytest.raises(NotImplementedError, match=f"^vllm {major}.{oldest - 1}.0 {line}"):
        plugin.expect_tested(f"{major}.{oldest - 1}.0")
    for version in (f"{major}.{newest + 1}.0rc1", "dev"):
        plugin.expect_tested(version)
        (record,) = caplog.records
        assert re.match(f"vllm {version} {line}", record.getMessage())
        caplog.clear()


def test_without_vllm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=r'^vllm is not installed; .* pip install "\.\[vllm\]"'):
        plugin.register()
