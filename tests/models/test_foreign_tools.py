"""Tools that wrap, move, prune, adapt or quantise the modules of a model: connections are modules like any other."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize, prune

from residua.connections import PRESETS, Connection
from residua.connections.parts.projection import LinearMap
from residua.models import ResiduaForCausalLM
from support.tiny_models import prompt, tiny_model
from support.tolerances import assert_close
from support.variants import ALL, ASSEMBLED, KINDS, perturbed

# FSDP warns that a connection may return a view; no code changes it in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

every_preset = pytest.mark.parametrize("name", [name for name in PRESETS if name not in ASSEMBLED])
SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.stream": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}


def model_of(name: str, scale: float = 0.2) -> ResiduaForCausalLM:
    return tiny_model(name, torch.float32, scale=scale)


def connection_maps(model: nn.Module) -> list[tuple[str, LinearMap]]:
    return [(name, module) for name, module in model.model.stream.named_modules() if isinstance(module, LinearMap)]


@torch.no_grad()
@every_preset
@pytest.mark.parametrize("way", ["split", "whole connections"])
def test_offloaded_weights_give_the_same_logits(name, way, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, ids, cpu = model_of(name), prompt(2, 6), torch.device("cpu")
    expected = model(ids, output_hidden_states=True)
    if way == "split":
        accelerate.dispatch_model(model, SPLIT, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    else:
        classes = sorted({type(connection).__name__ for connection in model.model.stream.connections})
        accelerate.cpu_offload(model, execution_device=cpu, preload_module_classes=classes)
    assert all(p.device.type == "meta" for p in model.model.stream.parameters())
    for _ in range(2):
        found = model(ids, output_hidden_states=True)
        assert torch.equal(found.logits, expected.logits)
        assert len(found.hidden_states) == len(expected.hidden_states)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "hc", "mhc", "edelta"])
def test_a_device_map_with_disk_loads_the_same_model(name, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, ids = model_of(name), prompt(2, 6)
    model.save_pretrained(tmp_path / "saved")
    loaded = ResiduaForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=SPLIT, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


@every_preset
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_on_all_linear_maps_leave_the_connections_train_and_merge(name, dora):
    """Many maps of connections start from zero, where DoRA would divide by zero: here all gates are at their start."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    model, ids = model_of(name, scale=0), prompt(2, 6)
    expected = model(ids).logits.detach()
    config = peft.LoraConfig(target_modules="all-linear", use_dora=dora, r=2, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.get_peft_model(model, config)
    assert_close(adapted(ids).logits, expected)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * (3 if dora else 2)  # layers, linear maps of each, parameters of each
    assert not any(".stream." in name for name in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    assert not [name for name, parameter in trained.items() if not parameter.grad.count_nonzero()]
    found = adapted(ids).logits.detach()
    assert (found - expected).abs().max() > 1e-5
    assert_close(adapted.merge_and_unload()(ids).logits, found, factor=10)  # the same products in another order


@torch.no_grad()
@every_preset
@pytest.mark.parametrize("tool", ["pruning", "parametrisation"])
def test_a_weight_replaced_by_a_tool_is_used(name, tool):
    """Both tools keep the weight elsewhere, and compute the module's own before or at each call."""
    model, ids = model_of(name), prompt(2, 6)
    by_hand = copy.deepcopy(model)
    for _, module in connection_maps(by_hand):
        module.weight *= 0
    for _, module in connection_maps(model):
        if tool == "pruning":
            prune.random_unstructured(module, "weight", amount=1.0)
            module.weight_orig += 1  # the weight follows at the next call
        else:
            parametrize.register_parametrization(module, "weight", Nothing())
    assert torch.equal(model(ids).logits, by_hand(ids).logits)


class Nothing(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0


@torch.no_grad()
@every_preset
def test_hooks_on_a_connection_run_around_read_and_write(name):
    model, calls = model_of(name), []
    for connection in model.model.stream.connections:
        connection.register_forward_pre_hook(lambda module, _: calls.append(module))
    model(prompt(2, 6))
    assert all(calls.count(connection) >= 2 for connection in model.model.stream.connections)


def test_a_call_to_super_in_a_phase_runs_hooks_once():
    class Louder(type(model_of("ddl").model.stream.connections[0])):  # type: ignore[misc]
        def read(self, state, memory=None):
            x, carry = super().read(state, memory)
            return 2 * x, carry

    connection = model_of("ddl").model.stream.connections[0]
    state, calls = torch.randn(2, 3, 16), []
    x, _ = connection.read(state)
    connection.__class__ = Louder
    connection.register_forward_pre_hook(lambda *_: calls.append(1))
    assert torch.equal(connection.read(state)[0], 2 * x)
    assert calls == [1]


@torch.no_grad()
@every_preset
def test_dynamic_quantisation_covers_the_sublayers_and_not_the_connections(name):
    model, ids = model_of(name, scale=0.02), prompt(2, 6)
    expected = model(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its own quantisation
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    for layer in quantised.model.layers:
        for module in (layer.attention.q_proj, layer.attention.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
            assert isinstance(module, torch.ao.nn.quantized.dynamic.Linear)
    assert [name for name, _ in connection_maps(quantised)] == [name for name, _ in connection_maps(model)]
    found = quantised(ids).logits
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", ALL)
def test_tools_that_search_for_linear_maps_find_no_map_of_a_connection(name):
    """Of torch, by type or by the name of the class: adapters, quantizers, initialisations."""
    stream = ALL[name].build(16, 4)
    assert not [m for m in stream.modules() if isinstance(m, nn.Linear) or "Linear" in type(m).__name__]
    assert all(isinstance(connection, Connection) for connection in stream.connections)


@every_preset
def test_connections_sharded_one_by_one_train_as_before(name, alone):
    from torch.distributed.fsdp import fully_shard

    model, ids = model_of(name).train(), prompt(2, 6)
    sharded = copy.deepcopy(model)
    for connection in sharded.model.stream.connections:
        fully_shard(connection)
    for one in (model, sharded):
        one(ids, labels=ids).loss.backward()
    for (path, expected), (_, found) in zip(model.named_parameters(), sharded.named_parameters(), strict=True):
        gradient = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        assert_close(gradient, expected.grad, what=path)


def test_a_sharded_connection_works_in_a_custom_loop(alone):
    from torch.distributed.fsdp import fully_shard

    stream = perturbed(PRESETS["ddl-tc"].build(16, 2))
    state, sublayer = stream.expand(torch.randn(2, 5, 16)), nn.Linear(16, 16)
    expected = stream.connections[0](state, sublayer)
    fully_shard(stream.connections[0])
    assert_close(stream.connections[0](state, sublayer), expected)
    x, carry = stream.connections[0].read(state)
    assert_close(stream.connections[0].write(sublayer(x), carry), expected)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_per_sequence_gradients_of_a_language_model_are_exact(name):
    """Of every preset without a model: tests/connections/test_torch_func.py."""
    model, ids = model_of(name).double(), prompt(2, 5)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        return functional_call(model, parameters, (ids[None],), {"labels": ids[None], "use_cache": False}).loss

    found = vmap(grad(loss), (None, 0))(parameters, ids)
    for i in range(2):
        model.zero_grad()
        model(ids[i : i + 1], labels=ids[i : i + 1]).loss.backward()
        for name, parameter in model.named_parameters():
            assert_close(found[name][i], parameter.grad, what=name)
