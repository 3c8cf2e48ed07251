"""muP (maximal update parameterisation): learning rates by width. The model itself applies the factor on the logits.

Tensor Programs V, arXiv 2203.03466, table 8, for Adam and tied embeddings, at width d: logits are multiplied by
base / d; the embedding's initial scale and learning rate do not depend on d; a matrix whose number of inputs grows with
d has the learning rate lr * base / d, and everything else lr. At d = base this is the standard parameterisation.
"""

import torch

from residua.connections.parts.projection import LINEAR_MAPS
from residua.models.configuration import ResiduaConfig
from residua.models.transformer import ResiduaForCausalLM


def learning_rate_factors(model: ResiduaForCausalLM) -> dict[str, float]:
    """Return the factor on the learning rate under Adam for every parameter by name; all 1 without `config.mup`.

    The weight of a linear map gets mup_base_width / hidden_size if its number of inputs grows with hidden_size: the
    projections of attention and MLP, and the gates and maps of a scheme that read the state. The head gets 1, because
    the factor on the logits has the same effect.
    """
    config = model.config
    factors = {name: 1.0 for name, _ in model.named_parameters()}
    if not config.mup:
        return factors
    wider = config.to_dict()
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        wider[name] *= 2
    with torch.device("meta"):
        twice = dict(ResiduaForCausalLM(ResiduaConfig(**wider)).named_modules())
    for name, module in model.named_modules():
        if isinstance(module, LINEAR_MAPS) and module is not model.get_output_embeddings():
            grows = twice[name].in_features > module.in_features
            factors[f"{name}.weight"] = config.mup_base_width / config.hidden_size if grows else 1.0
    return factors
