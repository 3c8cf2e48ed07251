"""A converted model as vLLM runs it: the model of transformers with vLLM's attention, maps and sampling.

Connections stay what they are, in float32 and in PyTorch: vLLM replaces the modules around them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from vllm.model_executor.models.transformers import TransformersForCausalLM

from residua.conversion.flow import STREAM, Reader


class ConvertedForCausalLM(TransformersForCausalLM):
    """A converted language model."""

    supports_pp = False  # a stage hands on one tensor of hidden states
    supports_eagle3 = False  # it reads hidden states between layers

    def recursive_replace(self) -> None:
        """Replace modules of transformers by vLLM's, but none of the connections and no norm that reads the stream."""
        with kept(self.model):
            super().recursive_replace()


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Take the connections and the norms that they apply out of a model for a while."""
    parts = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == STREAM or (isinstance(child, Reader) and child.residua_is_norm)
    ]
    for parent, name, _ in parts:
        delattr(parent, name)
    try:
        yield
    finally:
        for parent, name, child in parts:
            parent.add_module(name, child)
