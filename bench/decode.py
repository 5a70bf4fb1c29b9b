"""JPEG to tensor, shared by all contenders that decode."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from bench.measure import Batch


def decoded(content: bytes) -> torch.Tensor:
    """Return the picture as ``(height, width, 3)`` uint8."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB")))


def stacked_batch(batch: Any) -> Batch:
    """Return a stacked batch as one buffer."""
    return [batch.numpy().reshape(-1).view(np.uint8)]
