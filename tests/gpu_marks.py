"""The marks of every test that needs a GPU: `pytestmark = NEEDS_GPU`."""

from __future__ import annotations

import os

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif(
        bool(os.environ.get("SKIP_GPU_TESTS")) or not torch.cuda.is_available(),
        reason="no GPU, or SKIP_GPU_TESTS is set",
    ),
]
