"""A model's own initialisation leaves the start of the connections as it is, and loads nothing uninitialised."""

import copy
import warnings

import pytest
import torch
import transformers
from torch import nn

import residua
from residua.connections import PRESETS, Carry, Connection, Projection
from support.variants import KINDS

DIM, SUBLAYERS = 16, 4


def of_gpt(module):  # nanoGPT, minGPT, litgpt
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def of_dit(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.constant_(module.bias, 0)


def of_old_code(module):
    if getattr(module, "weight", None) is not None:
        module.weight.data.normal_(0, 0.02)


def of_everything(module):
    for parameter in module.parameters(recurse=False):
        nn.init.trunc_normal_(parameter, std=0.02)


class Model(nn.Module):
    """The sublayers, and a stream or its parts, in one model."""

    def __init__(self, connection, *, loose=False):
        super().__init__()
        self.mlps = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(SUBLAYERS))
        stream = residua.build(connection, DIM, SUBLAYERS)
        if loose:
            self.expand, self.collapse, self.connections = stream.expand, stream.collapse, stream.connections
        else:
            self.stream = stream

    def start(self):
        return {name: value for name, value in copy.deepcopy(self.state_dict()).items() if "mlps" not in name}


class Gain(Connection):
    """A connection of a third-party scheme: x + gain y, where gain starts at 0.5."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(DIM))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.gain, 0.5)

    def read(self, state, memory=None):
        return state, Carry(state, ())

    def write(self, y, carry):
        return carry.residual + self.gain * y


@pytest.mark.filterwarnings("ignore:connections keep their own initial parameters")
def test_a_module_that_defines_reset_parameters_keeps_its_start():
    connection = Gain().apply(of_everything)
    assert (connection.gain == 0.5).all()


INITS = [of_gpt, of_dit, of_old_code, of_everything]  # the last one draws all that the others draw


@pytest.mark.parametrize(
    ("name", "init"), [(name, init) for name in PRESETS for init in INITS[-1 if name not in KINDS else 0 :]]
)
@pytest.mark.filterwarnings("ignore:connections keep their own initial parameters")
def test_every_preset_keeps_its_start(name, init):
    for loose in (False, True):
        model = Model(name, loose=loose)
        start, own = model.start(), model.mlps[0].weight.clone()
        model.apply(init)
        assert all(torch.equal(value, start[key]) for key, value in model.start().items())
        assert not torch.equal(model.mlps[0].weight, own)


class Pretrained(transformers.PreTrainedModel):
    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = Model(config.connection)
        self.chosen = self.inner.start() if self.inner.mlps[0].weight.device.type != "meta" else None
        self.post_init()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_keeps_its_start_in_a_model_of_transformers(name, tmp_path):
    """After `post_init`, and where a checkpoint lacks the connections: all are started, with values of that start."""
    torch.manual_seed(0)
    config = transformers.PretrainedConfig(connection=name)
    model = Pretrained(config)
    assert all(torch.equal(value, model.chosen[key]) for key, value in model.inner.start().items())
    missing = {key: value for key, value in model.state_dict().items() if ".mlps." in key}
    half = next((key for key in model.state_dict() if "connections.1" in key), None)
    if half:
        with torch.no_grad():
            model.get_parameter(half).fill_(7)
        missing[half] = model.state_dict()[half]
    model.save_pretrained(tmp_path, state_dict=missing)
    opened = Pretrained.from_pretrained(tmp_path).inner.start()
    other = Model(name).start()
    for key, value in opened.items():
        if f"inner.{key}" == half:
            assert (value == 7).all()
        elif torch.equal(other[key], model.chosen[key]):  # not random
            assert torch.equal(value, other[key]), key
        elif value.numel() >= 64:
            assert value.std().item() == pytest.approx(other[key].std().item(), rel=0.3), key
        else:
            assert value.abs().max() <= 4 * other[key].abs().max(), key


def test_a_function_passed_to_apply_that_initialises_nothing_has_its_full_effect():
    model, visited = Model("ddl-tc"), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.apply(lambda module: visited.append(module) or setattr(module, "flag", 1))
        assert set(visited) == set(model.modules())
        model.apply(lambda module: [p.requires_grad_(False) for p in module.parameters(recurse=False)])
        assert not any(p.requires_grad for p in model.parameters())
        model.apply(lambda module: module.half() if isinstance(module, nn.Linear) else None)
        assert {m.weight.dtype for m in model.modules() if isinstance(m, nn.Linear)} == {torch.float16}
        with torch.device("meta"):
            Model("ddl-tc").apply(of_gpt)


def test_a_reset_draws_again_and_keeps_changes_of_the_user():
    model = Model("ddl-v")
    map_ = next(m for m in model.stream.modules() if isinstance(m, Projection) and m.weight.std() > 0)
    before = map_.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
        assert not torch.equal(map_.weight, before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # as a step of training does
        model.apply(lambda module: [p.data.clamp_(-0.5, 0.5) for p in module.parameters(recurse=False)])
        assert map_.weight.max() <= 0.5
        Model("ddl-v").apply(of_gpt)  # which fills only `nn.Linear`
    with pytest.warns(UserWarning, match=r"apply\(of_everything\)"):
        Model("ddl-v").apply(of_everything)
