"""Language models on transformers, with any residual scheme in their trunk."""

from residua.models.authors import load_authors_checkpoint
from residua.models.configuration import MODEL_FIELDS, SIZES, ResiduaConfig
from residua.models.transformer import ResiduaForCausalLM, ResiduaModel

__all__ = ["MODEL_FIELDS", "SIZES", "ResiduaConfig", "ResiduaForCausalLM", "ResiduaModel", "load_authors_checkpoint"]
