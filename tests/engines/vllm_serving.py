"""Serve folders with vLLM, one after the other in this process, and write the answers.

    python vllm_serving.py REQUESTS.json ANSWERS.json

REQUESTS: a list of {"folder", "prompts", "tokens", "engine": options of vllm.LLM}. An answer has, for every prompt, the
greedy tokens, the logarithms of probabilities at each step by token, how many parameters of the connections have which
dtype, and how often a request was preempted; or the error of an engine that did not start.
"""

import json
import os
import sys
from collections import Counter

# In one process an engine starts in seconds; bound to a core it would wait for whoever computes there.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def answer(request):
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    small = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    small |= {"gpu_memory_utilization": 0.1, "disable_log_stats": False}
    try:
        engine = LLM(request["folder"], **(small | request["engine"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    dtypes = engine.apply_model(dtypes_of_connections)[0]
    options = SamplingParams(temperature=0, max_tokens=request["tokens"], logprobs=5, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    results = [result.outputs[0] for result in engine.generate(prompts, options, use_tqdm=False)]
    preemptions = next(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")
    del engine
    cleanup_dist_env_and_memory()
    return {
        "dtypes": dtypes,
        "preemptions": preemptions,
        "tokens": [list(result.token_ids) for result in results],
        "logprobs": [
            [{token: item.logprob for token, item in step.items()} for step in result.logprobs] for result in results
        ],
    }


def dtypes_of_connections(model):
    return dict(Counter(str(x.dtype) for name, x in model.named_parameters() if ".stream." in name))


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        requests = json.load(file)
    answers = [answer(request) for request in requests]
    with open(sys.argv[2], "w") as file:
        json.dump(answers, file)
