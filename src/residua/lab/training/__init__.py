"""Training: configuration, optimizer, loop, checkpoints and the log of a run."""

from typing import TYPE_CHECKING

from residua import lazy

if TYPE_CHECKING:
    from residua.lab.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, open_checkpoint
    from residua.lab.training.config import (
        BaseModelConfig,
        DataConfig,
        ModelConfig,
        RunConfig,
        TrainConfig,
        load_config,
        recipe_names,
    )
    from residua.lab.training.folder import claim
    from residua.lab.training.loop import pick_device, train
    from residua.lab.training.optimizer import (
        hidden_matrices,
        learning_rate_factor,
        make_optimizer,
        parameter_groups,
        set_learning_rate,
    )
    from residua.records.folder import RunFolder
    from residua.records.jsonlines import read_metrics

__all__ = [
    "BaseModelConfig",
    "Checkpoint",
    "DataConfig",
    "ModelConfig",
    "RunConfig",
    "RunFolder",
    "TrainConfig",
    "claim",
    "hidden_matrices",
    "latest_checkpoint",
    "learning_rate_factor",
    "load_checkpoint",
    "load_config",
    "make_optimizer",
    "open_checkpoint",
    "parameter_groups",
    "pick_device",
    "read_metrics",
    "recipe_names",
    "set_learning_rate",
    "train",
]

MODULES = ["config", "folder", "log", "optimizer", "checkpoint", "loop"]
__getattr__, __dir__ = lazy.attributes(__name__, __all__, MODULES)
