"""torch.compile takes the whole model in one piece, forward and backward, and computes the same."""

import shutil
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from support.lanes import some
from support.tiny_models import left_padded, prompt, tiny_model
from support.tolerances import assert_close
from support.variants import ALL, ASSEMBLED, PRESETS, bare_sublayers, normal, perturbed

# The compiler itself uses what PyTorch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


TRAINED = [name for name in PRESETS if name not in ASSEMBLED]
IN_A_MODEL = ("edelta", "mudd")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def loss_and_gradients(module, loss) -> list[torch.Tensor]:
    module.zero_grad(set_to_none=True)
    found = loss()
    found.backward()
    return [found.detach(), *(parameter.grad for parameter in module.parameters())]


def language_model(name, dtype=torch.float64):
    """A model and its loss. One layer has both kinds of sublayer, both borders and a shared compressor."""
    model, ids = tiny_model(name, dtype, num_hidden_layers=1).train(), prompt(2, 6)
    return model, lambda: model(ids, labels=ids).loss


def stream_alone(name):
    """The same stream and a loss of it, around sublayers that compile in no time."""
    torch.manual_seed(0)
    scheme = PRESETS[name]
    scheme = replace(scheme, iterations=2) if hasattr(scheme, "iterations") else scheme  # twenty take ten times as long
    stream, sublayers = perturbed(scheme.build(16, 2), scale=0.3).double(), bare_sublayers(16, 2)
    x = normal(2, 6, 16)
    return stream, lambda: stream(x, sublayers).square().mean()


class Step(NamedTuple):
    """A step of training, compiled and not, and the tensors that the compiled one keeps for its backward pass."""

    ours: list[torch.Tensor]
    expected: list[torch.Tensor]
    kept: dict[str, tuple[int, tuple]]  # by name: the storage, and the shape, strides and offset in it


@pytest.fixture(scope="module", params=some(TRAINED, {"ddl-tc", "mhc", "mudd"}.__contains__))
def step(request) -> Step:
    """Of the stream alone, and of a language model where it adds to the graph what only some schemes have: a penalty,
    several inputs of attention. Raises where the graph breaks."""
    kept = {}

    def inspected(graph, inputs):
        *given, output = (node for node in graph.graph.nodes if node.op in ("placeholder", "output"))
        given = {node.meta["val"].untyped_storage()._cdata for node in given}
        for node in output.args[0]:
            tensor = node.meta["val"] if isinstance(node, torch.fx.Node) else None
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
                kept[node.name] = tensor.untyped_storage()._cdata, layout
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=inspected,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compiler.reset()
    module, loss = (language_model if request.param in IN_A_MODEL else stream_alone)(request.param)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    return Step(loss_and_gradients(module, compiled), loss_and_gradients(module, loss), kept)


def test_compiled_training_computes_the_same(step):
    for ours, theirs in zip(step.ours, step.expected, strict=True):
        assert_close(ours, theirs)


def test_nothing_is_kept_twice_for_the_backward_pass(step):
    """If two kept tensors share memory, inductor may overwrite one while the other is still needed."""
    assert step.kept
    owners: dict[tuple[int, int], str] = {}
    for name, (storage, (shape, stride, offset)) in step.kept.items():
        room = offset + 1 + sum((size - 1) * hop for size, hop in zip(shape, stride))
        for place in torch.arange(room).as_strided(shape, stride, offset).flatten().tolist():
            assert owners.setdefault((storage, place), name) == name


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler: apt-get install g++")
def test_training_through_inductor_computes_the_same():
    stream, loss = stream_alone("ddl-cc")
    compiled = torch.compile(loss, fullgraph=True)
    for ours, theirs in zip(loss_and_gradients(stream, compiled), loss_and_gradients(stream, loss), strict=True):
        assert_close(ours, theirs)


@pytest.mark.nightly
def test_training_compiles_under_autocast():
    model, ids = tiny_model("ddl-cc-ec", torch.float32, num_hidden_layers=1).train(), prompt(2, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids, labels=ids).loss
        loss = compiled(ids, labels=ids).loss
    loss.backward()
    assert_close(loss, expected, dtype=torch.bfloat16)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.nightly
@torch.no_grad()
def test_evaluation_of_a_padded_batch_compiles():
    model = tiny_model("ddl-ec", num_hidden_layers=1)
    ids, mask = left_padded([prompt(6, seed=1), prompt(3, seed=2)])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    real = mask.bool()
    out = compiled(ids, attention_mask=mask, use_cache=False).logits
    assert_close(out[real], model(ids, attention_mask=mask).logits[real])
    assert_close(compiled(ids, attention_mask=(1.0 - mask) * -1e9, use_cache=False).logits[real], out[real])
    gap = torch.tensor([[1, 1, 0, 0, 1, 1], [1] * 6])
    with pytest.raises(RuntimeError, match="must have padding only"):
        compiled(ids, attention_mask=gap, use_cache=False)


@pytest.mark.nightly
@torch.no_grad()
def test_packed_documents_compile():
    """Positions separate them without a look at values; two sources that differ raise inside the graph."""
    model, ids = tiny_model("ddl-ec", num_hidden_layers=1), prompt(1, 6)
    numbers, positions = torch.tensor([[0, 0, 0, 1, 2, 2]]), torch.tensor([[0, 1, 2, 0, 0, 1]])
    expected = torch.cat([model(part).logits for part in ids.split((3, 1, 2), 1)], 1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids, position_ids=positions, use_cache=False).logits, expected)
    assert_close(compiled(ids, position_ids=positions, seq_idx=numbers, use_cache=False).logits, expected)
    with pytest.raises(RuntimeError, match="seq_idx has, got others"):
        compiled(ids, position_ids=torch.arange(6)[None], seq_idx=numbers, use_cache=False)


@pytest.mark.nightly
@torch.no_grad()
def test_compiled_rows_of_documents_equal_eager_ones():
    """Batches and lengths change, and packed rows with a cache are refused as without a compiler."""
    model = tiny_model("ddl-tc", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for rows, length in ((1, 6), (2, 6), (3, 8)):
        ids, positions = prompt(rows, length), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])[:, :length].repeat(rows, 1)
        numbers = {"seq_idx": (torch.arange(length) > 2).long().repeat(rows, 1)} if rows > 1 else {}
        apart = torch.cat([model(part).logits for part in ids.split((3, length - 3), 1)], 1)
        assert_close(compiled(ids, position_ids=positions, use_cache=False, **numbers).logits, apart)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"packed documents \(position_ids\), got a cache"):
        compiled(ids, position_ids=positions, use_cache=True)


@pytest.mark.nightly
def test_compiled_autograd_works_after_an_eager_forward_pass():
    """It frees what a node saved before the graph of its backward pass runs, which replays the writes."""
    stream, loss = stream_alone("ddl-tc")
    expected = loss_and_gradients(stream, loss)
    stream.zero_grad(set_to_none=True)
    found = loss()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        found.backward()
    for ours, theirs in zip([found, *(parameter.grad for parameter in stream.parameters())], expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["beta-conv-dv1", "v1-operator", "attnres-block-s2"])
def test_variants_beyond_the_presets_compile_into_one_graph(name):
    """tests/ops/test_ops_compile.py has the operations and their gradients."""
    stream, sublayers = perturbed(ALL[name].build(8, 2)), bare_sublayers(8, 2)
    x = normal(2, 5, 8, dtype=torch.float32)
    compiled = torch.compile(lambda x: stream(x, sublayers), fullgraph=True, backend="eager")
    assert_close(compiled(x), stream(x, sublayers))


def test_a_model_is_exported_with_dynamic_batch_and_length():
    model, ids, other = tiny_model("ddl-ec", num_hidden_layers=1), prompt(2, 9), prompt(3, 17)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=1024)
    shapes = {"input_ids": {0: batch, 1: length}, "use_cache": None}
    program = torch.export.export(
        model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes, strict=False
    )
    for tokens in (other, other[:, :2]):
        with torch.no_grad():
            assert_close(program.module()(input_ids=tokens, use_cache=False).logits, model(tokens).logits)
