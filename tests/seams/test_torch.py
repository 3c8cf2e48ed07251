"""The private or undocumented names of PyTorch that residua uses."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.seams import Seam, check, find, reached

TREES = "states are opaque trees of tensors"
TRANSFORMS = "gradients of our functions step aside inside torch.func"
SHARDING = "torchtitan shards our model with FSDP2"
HOOKED = "kernels are left where a module has hooks; hooks of converted models are removed"
SEAMS = [
    *(
        Seam(f"torch.utils._pytree.{name}", TREES)
        for name in ("tree_flatten", "tree_leaves", "tree_map", "tree_structure", "tree_unflatten")
    ),
    Seam("torch.utils._pytree.register_pytree_node", "a Flow is a tree of its state", parameters="cls flatten_fn"),
    Seam("torch.utils._python_dispatch.TorchDispatchMode", "memory and time are counted operation by operation"),
    Seam("torch._subclasses.FakeTensor", "kernels launch nothing on fake tensors"),
    Seam("torch._subclasses.fake_tensor.FakeTensorMode", "memory is counted without memory"),
    Seam("torch.autograd.Function._compiled_autograd_key", "states are replayed under compiled autograd"),
    Seam("torch._C._are_functorch_transforms_active", TRANSFORMS),
    Seam("torch._C._functorch.is_legacy_batchedtensor", TRANSFORMS),
    Seam("torch.autograd.forward_ad._current_level", TRANSFORMS),
    Seam("torch._assert_async", "padding between tokens is refused without waiting for the GPU"),
    Seam("torch._dynamo.reset", "every benchmark is compiled anew"),
    Seam("torch._dynamo.config.patch", "benchmarks compile one code for many shapes"),
    Seam("torch._dynamo.config", "benchmarks compile one code for many shapes", "recompile_limit"),
    Seam(
        "torch.nn.Module",
        HOOKED,
        "_backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks "
        "_forward_pre_hooks_with_kwargs _parameters _buffers _modules",
        make=lambda kind: kind(),
    ),
    Seam("torch.nn.Module", "whether a module was compiled is read there", "_compiled_call_impl"),
    Seam("torch.Tensor", "a state that was changed in place is not replayed", "_version output_nr grad_fn"),
    Seam("torch.UntypedStorage", "memory is counted by storage", "_cdata", make=lambda kind: kind(1)),
    Seam("torch.distributed.fsdp.fully_shard", SHARDING, parameters="mesh mp_policy reshard_after_forward"),
    Seam(
        "torch.distributed.fsdp.MixedPrecisionPolicy",
        SHARDING,
        parameters="param_dtype reduce_dtype cast_forward_inputs",
    ),
    Seam("torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction", "states are replayed"),
    Seam("torch._C._autograd._top_saved_tensors_default_hooks", "no layer is replayed for another checkpoint"),
    Seam("torch._C._current_graph_task_id", "a memory that the forward pass changed is refused in a backward pass"),
    Seam("torch.utils.flop_counter.FlopCounterMode", "FLOPs are counted", "mod_tracker", make=lambda kind: kind()),
    Seam("torch.utils.flop_counter.FlopCounterMode.get_total_flops", "FLOPs are counted"),
    Seam("torch._dynamo.config.recompile_limit", "torchtitan's blocks are compiled for every form of the state"),
    Seam("torch.library.custom_op", "kernels are operators", parameters="name fn mutates_args"),
]


@pytest.mark.parametrize(
    "seam", SEAMS, ids=lambda seam: f"{seam.path.partition('.')[2]}-{len(seam.attributes.split())}"
)
def test_the_package_has_the_names_that_we_use(seam):
    check(seam)


def test_every_private_name_that_we_use_is_in_the_table():
    assert reached("torch") <= {seam.path for seam in SEAMS}


def test_nodes_of_the_graph_have_the_names_by_which_writes_are_followed():
    """`residua.ops.recompute` walks from a write to the one before it, through views and FSDP2's nodes."""
    from residua.ops.recompute import PASSES_THROUGH

    x = torch.ones(2, 3, requires_grad=True)
    view = (2 * x).view(6)
    assert view.grad_fn.name() in PASSES_THROUGH
    node = find("torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction", SHARDING)
    assert f"{node.__name__}Backward" in PASSES_THROUGH
    (before, output), *_ = view.grad_fn.next_functions
    assert (before.name(), output) == ("MulBackward0", 0)


def test_an_activation_checkpoint_is_recognised_by_its_hook():
    """A second module would be replayed for the first, whose weights FSDP2 may have taken away."""
    from residua.ops.recompute import _checkpoint

    checkpoints = []

    def layer(x):
        checkpoints.append(_checkpoint())
        return x.square()

    x = torch.ones(1, requires_grad=True)
    checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False).backward()
    layer(x)
    assert len({id(hook) for hook in checkpoints[:4]}) == 4
    assert [hook is None for hook in checkpoints] == [False] * 4 + [True]


def test_the_node_of_a_function_keeps_the_attributes_of_its_context():
    """A write stores in them how it is replayed."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.age = 3
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    y = Twice.apply(torch.ones(1, requires_grad=True))
    assert y.grad_fn.age == 3
    y.grad_fn.age = 4
    assert y.grad_fn.age == 4


def test_the_version_of_a_tensor_counts_changes_in_place():
    x = torch.ones(1)
    assert x._version == 0
    x += 1
    assert x._version == 1


def test_views_share_the_address_of_their_storage():
    x = torch.ones(4)
    assert x.untyped_storage()._cdata == x[1:].untyped_storage()._cdata
    assert x.untyped_storage()._cdata != x.clone().untyped_storage()._cdata


def test_a_hook_with_keywords_is_listed_under_its_key():
    module = nn.Identity()
    handle = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    assert set(module._forward_pre_hooks) == set(module._forward_pre_hooks_with_kwargs) == {handle.id}
