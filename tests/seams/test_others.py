"""The names of smaller libraries that residua uses beyond their common functions."""

import pytest
from torch import nn

from support.seams import Seam, check

SEAMS = [
    Seam(
        "lm_eval.simple_evaluate",
        "the tasks of the paper",
        parameters="model tasks num_fewshot task_manager limit log_samples",
    ),
    Seam(
        "lm_eval.models.huggingface.HFLM",
        "the tasks of the paper",
        parameters="pretrained tokenizer backend device batch_size max_length mixed_precision_dtype",
    ),
    Seam("lm_eval.tasks.TaskManager", "the tasks of the paper", "match_tasks", "include_path"),
    Seam(
        "huggingface_hub.errors",
        "a data set that cannot be reached is one line",
        "HFValidationError HTTPError RepositoryNotFoundError RevisionNotFoundError",
    ),
    Seam(
        "tensorboard.summary.writer.record_writer.RecordWriter",
        "events are written in our own thread, which gets the error of a full disk",
        "write close",
        "writer",
    ),
    Seam("tensorboard.compat.proto.event_pb2", "a run that goes on takes back its later events", "Event SessionLog"),
    Seam("tensorboard.compat.proto.summary_pb2", "the numbers of a step are events", "Summary"),
    Seam("safetensors.safe_open", "weights are read without executing anything"),
    Seam("safetensors.SafetensorError", "damaged weights are one line"),
    Seam("plotly.offline.get_plotlyjs", "the explorer's pages need no network"),
]


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.path)
def test_the_package_has_the_names_that_we_use(seam):
    check(seam)


def test_accelerate_puts_the_forward_of_its_hooks_into_the_module():
    """This shows that a module is not plain, so its result is kept instead of recomputed."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    from residua.connections.parts.projection import is_plain

    module = nn.Linear(2, 2)
    assert is_plain(module, nn.Linear)
    assert not is_plain(add_hook_to_module(module, ModelHook()), nn.Linear)


def test_peft_keeps_what_it_adapts_under_base_layer():
    """`save_connection` refuses a model with adapters by that name."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    assert any(".base_layer." in name for name in model.state_dict())


def test_triton_interprets_kernels_if_the_environment_variable_is_set(monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton is for Linux")
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def kernel():
        pass

    jitted = triton.jit(kernel)
    assert isinstance(jitted, InterpretedFunction)
    assert not isinstance(jitted, triton.JITFunction)
