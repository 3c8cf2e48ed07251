"""Language models on transformers, with any residual scheme in their trunk."""

import logging

from residua.errors import extra, installing
from residua.models.authors import load_authors_checkpoint
from residua.models.configuration import SIZES, ResiduaConfig
from residua.models.transformer import ResiduaForCausalLM, ResiduaModel

with extra("lab"):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, __version__

TESTED = (5, 24)
"""The newest minor release of transformers that is tested; the extra `lab` allows no newer one."""


def _say_if_newer(installed: str) -> None:
    """Warn if this version of transformers is newer than any that was tested."""
    if tuple(map(int, installed.split(".")[:2])) > TESTED:
        newest = ".".join(map(str, TESTED))
        logging.getLogger("residua").warning(
            f"transformers {installed} is newer than {newest}, the newest that residua was tested with; "
            f"{installing('lab')} goes back to that"
        )


_say_if_newer(__version__)

# Registered here, because transformers loads exported copies of the classes' own files, which must not register.
AutoConfig.register("residua", ResiduaConfig)
AutoModel.register(ResiduaConfig, ResiduaModel)
AutoModelForCausalLM.register(ResiduaConfig, ResiduaForCausalLM)

__all__ = [
    "SIZES",
    "ResiduaConfig",
    "ResiduaForCausalLM",
    "ResiduaModel",
    "load_authors_checkpoint",
]
