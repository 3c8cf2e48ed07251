"""What all tests share: one thread, and property tests that draw the same examples in every run."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("residua", deadline=None, derandomize=True)
settings.load_profile("residua")
