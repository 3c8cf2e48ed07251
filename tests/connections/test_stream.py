"""What a scheme and a stream print, and how it treats optimizers, dtypes and wrong inputs."""

import copy
import warnings

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import residua
from residua import DeepDelta, Residual
from residua.connections.parts.memory import reads_other_tokens
from residua.lab.training.optimizer import parameter_groups
from support.variants import ALL, NON_CAUSAL, bare_sublayers, perturbed


@pytest.mark.parametrize("name", ALL)
def test_a_scheme_prints_only_options_that_differ_as_valid_python(name):
    scheme = ALL[name]
    text = repr(scheme)
    assert eval(text, {type(scheme).__name__: type(scheme)}) == scheme
    assert "\n" not in text


def test_printed_schemes_and_streams_are_short():
    assert repr(Residual()) == "Residual()"
    assert repr(DeepDelta(map="v", beta_init=0.5)) == "DeepDelta(map='v', beta_init=0.5)"
    stream = residua.build("ddl:map=v", dim=8, num_sublayers=2)
    count = sum(parameter.numel() for parameter in stream.parameters())
    assert repr(stream) == f"Stream(DeepDelta(map='v'), dim=8, 2 sublayers, {count} parameters)"
    assert repr(copy.deepcopy(stream)) == repr(stream)
    by_hand = residua.Stream(stream.expand, stream.connections, stream.collapse)
    assert repr(by_hand) == f"Stream(2 sublayers, {count} parameters)"


@pytest.mark.parametrize("name", ALL)
def test_the_groups_of_a_stream_hold_every_parameter_once_and_decay_as_training_does(name):
    stream = ALL[name].build(16, 4)
    groups = stream.param_groups(lr=1e-3, weight_decay=0.1)
    listed = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, stream.parameters()))
    assert {group["lr"] for group in groups} == {1e-3}
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {id(p): group["weight_decay"] for group in parameter_groups(stream, 0.1) for p in group["params"]}


def test_frozen_parameters_are_in_no_group():
    stream = residua.build("ddl-tc", dim=8, num_sublayers=2).requires_grad_(False)
    assert stream.param_groups(lr=1e-3, weight_decay=0.1) == []
    torch.optim.AdamW([*residua.build("residual", 8, 2).param_groups(lr=1e-3, weight_decay=0.1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_gates_are_in_float32_if_the_default_dtype_is_narrow(name, dtype):
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        stream = ALL[name].build(16, 4)
    finally:
        torch.set_default_dtype(kept)
    wide = set(stream.float32_parameters())
    for found, parameter in stream.named_parameters():
        assert parameter.dtype == (torch.float32 if found in wide and dtype == torch.bfloat16 else dtype)
    x = torch.randn(1, 3, 16, dtype=dtype)
    result = stream(x, bare_sublayers(16, 4))
    assert result.dtype == dtype
    assert result.isfinite().all()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrowing_the_gates_of_a_model_gives_a_warning(narrow):
    model = torch.nn.ModuleDict({"stream": residua.build("mhc", dim=8, num_sublayers=2)})
    count = len(model["stream"].float32_parameters())
    with pytest.warns(UserWarning, match=rf"the {count} parameters of gates .* float32, got {narrow}; .*autocast"):
        model.to(narrow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.float().double().to("meta")
        torch.nn.Sequential(residua.build("residual", dim=8, num_sublayers=2)).to(narrow)  # norms, and no gate


def test_token_ids_in_place_of_embeddings_give_a_one_line_error():
    stream = residua.build("ddl-tc", dim=8, num_sublayers=2)
    with pytest.raises(TypeError, match=r"x must be .*, got torch\.int64"):
        stream(torch.zeros(2, 5, dtype=torch.long), bare_sublayers(8, 2))


@pytest.mark.parametrize("memory", [True, residua.StreamMemory])
@pytest.mark.parametrize("name", ["residual", "ddl-tc"])
def test_a_memory_of_another_type_is_refused(name, memory):
    stream = residua.build(name, dim=8, num_sublayers=2)
    with pytest.raises(TypeError, match=r"memory must be a StreamMemory, got .*memory=StreamMemory\(\)"):
        stream(torch.zeros(2, 5, 8), bare_sublayers(8, 2), memory=memory)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_and_an_empty_sequence_are_allowed(name):
    stream = perturbed(ALL[name].build(8, 2))
    for shape in [(0, 5, 8), (2, 0, 8)]:
        x = torch.ones(shape, requires_grad=True)
        out = stream(x, bare_sublayers(8, 2))
        out.sum().backward()
        assert out.shape == x.grad.shape == shape


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("mudd")])
def test_rows_without_a_batch_axis_equal_a_batch_of_one_or_are_refused(name):
    """A graph has nodes and no sequence, so (nodes, dim) is accepted wherever it makes sense."""
    stream = perturbed(ALL[name].build(8, 2))
    x, sublayers = torch.randn(6, 8), bare_sublayers(8, 2)
    expected = stream(x[None], sublayers)[0]
    if any(getattr(part, "window", 0) for part in stream.parts):
        with pytest.raises(ValueError, match=r"x must be \(batch, seq, dim\), got \(6, 8\)"):
            stream(x, sublayers)
    else:
        torch.testing.assert_close(stream(x, sublayers), expected)
        torch.testing.assert_close(stream(x.view(2, 1, 3, 8), sublayers), expected.view(2, 1, 3, 8))


@pytest.mark.parametrize("name", ALL | NON_CAUSAL)
def test_only_the_sequence_axis_is_mixed(name):
    """A scheme that reads single tokens takes pixels (batch, height, width, dim); the others refuse them."""
    stream, sublayers = perturbed((ALL | NON_CAUSAL)[name].build(8, 2)), bare_sublayers(8, 2)
    x = torch.randn(2, 3, 5, 8)
    if any(map(reads_other_tokens, stream.parts)):
        with pytest.raises(ValueError, match=r"x must be \(batch, seq, dim\), got \(2, 3, 5, 8\)"):
            stream(x, sublayers)
        connection = next(filter(reads_other_tokens, stream.connections), stream.connections[0])
        with pytest.raises(ValueError, match=r"must be .*\(batch, seq, "):
            stream.collapse(connection.read(stream.expand(x))[1].residual)
    else:
        torch.testing.assert_close(stream(x, sublayers), stream(x.flatten(1, 2), sublayers).view_as(x))


@pytest.mark.parametrize("name", ["ddl-tc", "mhc", "residual"])
def test_nonsensical_options_give_a_one_line_error(name):
    stream, x, sublayers = residua.build(name, dim=8, num_sublayers=2), torch.randn(2, 5, 8), bare_sublayers(8, 2)
    for wrong in (torch.randn(2, 8, 4, 4), x.mT, torch.randn(2, 5, 6), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x must be \(batch, seq, dim\) with dim = 8, got \("):
            stream(wrong, sublayers)
    for nothing in ([[1.0]], None, (x, x)):
        with pytest.raises(TypeError, match="x must be a tensor"):
            stream(nothing, sublayers)
    one = torch.nn.Linear(8, 8)
    named = torch.nn.ModuleDict({"a": one, "b": one})
    for wrong in ((part for part in sublayers), one, map(abs, sublayers), None, named):
        with pytest.raises(TypeError, match="sublayers"):
            stream(x, wrong)
    for right in (torch.nn.ModuleList([one, one]), torch.nn.Sequential(one, one), (one, one), named.values()):
        stream(x, right)
    with pytest.raises(TypeError, match=r"sublayer must be .*, got NoneType"):
        stream.connections[0](stream.expand(x), None)


def test_invalid_numbers_and_norms_of_a_stream_give_a_one_line_error():
    for dim in ("64", 64.0, None, 0, [64]):
        with pytest.raises(ValueError, match=r"^dim must be .*, got"):
            residua.build("ddl-tc", dim, 2)
    for count in ("2", [torch.nn.Identity()], -1):
        with pytest.raises(ValueError, match=r"^num_sublayers must be .*, got"):
            residua.build("ddl-tc", 8, count)
    for norm in (torch.nn.LayerNorm(8), torch.nn.ModuleList(), "rms"):
        with pytest.raises(TypeError, match=r"^norm must be "):
            residua.build("ddl-tc", 8, 2, norm=norm)


def twice(out):
    return tuple(2 * part for part in out) if isinstance(out, tuple) else 2 * out


@pytest.mark.parametrize("name", ["residual", "mhc", "ddl-tc", "altup", "attnres", "lambdas"])
@pytest.mark.parametrize("kind", ["after", "before", "every module"])
@pytest.mark.parametrize("place", [0, 1])  # the first may own a part that the second runs too
def test_a_hook_that_changes_the_state_is_applied_once(name, kind, place):
    stream, sublayers, x = perturbed(residua.build(name, 8, 3)), bare_sublayers(8, 3), torch.randn(2, 5, 8)
    state = stream.expand(x)
    for i, (connection, sublayer) in enumerate(zip(stream.connections, sublayers)):
        state = connection(twice(state) if i == place and kind == "before" else state, sublayer)
        state = twice(state) if i == place and kind != "before" else state
    expected, hooked = stream.collapse(state), stream.connections[place]
    if kind == "before":
        handle = hooked.register_forward_pre_hook(lambda _, args: (twice(args[0]), *args[1:]))
    elif kind == "after":
        handle = hooked.register_forward_hook(lambda module, args, out: twice(out))
    else:
        handle = register_module_forward_hook(lambda module, args, out: twice(out) if module is hooked else None)
    try:
        torch.testing.assert_close(stream(x, sublayers), expected)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["residual", "residual:compress=token", "ddl-tc", "ddl-cc", "altup"])
def test_a_hook_that_records_sees_each_connection_once_and_its_state(name):
    stream, sublayers, x = perturbed(residua.build(name, 8, 4)), bare_sublayers(8, 4), torch.randn(2, 5, 8)
    states, seen = [stream.expand(x)], []
    for connection, sublayer in zip(stream.connections, sublayers):
        states.append(connection(states[-1], sublayer))
    for connection in stream.connections:
        connection.register_forward_pre_hook(lambda module, args: seen.append((module, args[0])))
        connection.register_forward_hook(lambda module, args, out: seen.append((module, out)))
    stream(x, sublayers)
    expected = [(c, state) for i, c in enumerate(stream.connections) for state in states[i : i + 2]]
    assert [module for module, _ in seen] == [module for module, _ in expected]
    torch.testing.assert_close([state for _, state in seen], [state for _, state in expected])


def test_data_parallel_copies_are_refused_where_connections_share_a_part():
    """A copy would run the original's part, on another device."""
    for name in ("ddl-tc", "residual:compress=token", "altup"):
        with pytest.raises(ValueError, match=r"^nn.DataParallel must .*torchrun"):
            residua.build(name, 8, 4).connections[1]._replicate_for_data_parallel()
    for name in ("ddl", "residual:branch=conv", "ddl-tc:compress_sharing=separate"):
        for connection in residua.build(name, 8, 4).connections:
            connection._replicate_for_data_parallel()
