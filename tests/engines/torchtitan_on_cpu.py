"""torchtitan on processes without a GPU: `python -m torchtitan_on_cpu ARGUMENTS` is `python -m torchtitan.train` there.

torchtitan 0.3 takes a GPU for granted in a few places; this replaces them before it is imported.
"""

import types
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule


def device():
    """A device module as torch.cuda, for the CPU."""
    cpu = types.ModuleType("cpu")
    properties = types.SimpleNamespace(name="CPU", total_memory=1 << 34)
    cpu.__dict__.update(
        set_device=lambda device: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda *_: "CPU",
        get_device_properties=lambda *_: properties,
        memory_stats=lambda *_: {},
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        is_available=lambda: True,
    )
    return cpu


def install():
    """Let torchtitan run on the CPU, in this process."""
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", device()
    utils.get_local_device = lambda: torch.device("cpu")

    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    dist.set_timeout = lambda timeout, group=None: None
    factor = FSDPModule.set_gradient_divide_factor

    def divide(module, value):  # gloo has no sum of products
        factor(module, value)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide

    from torchtitan.models.common import config_utils
    from torchtitan.protocols.module import Module

    class CausalAttention(Module):
        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            pass

        def __init__(self, config):
            super().__init__()

        def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False):
            q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
            y = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True, enable_gqa=enable_gqa)
            return y.transpose(1, 2)

    config_utils.get_attention_config = lambda backend: CausalAttention.Config()


if __name__ == "__main__":
    install()
    from torchtitan.train import main

    main()
