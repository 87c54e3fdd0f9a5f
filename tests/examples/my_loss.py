"""A loss of your own: the Huber loss of a model that predicts noise or v.

composer benchmark.py 'objective.name=tests/examples/my_loss.py:Huber(delta=0.1)' model.preset=tiny data.synthetic=true
"""

import torch.nn.functional as F

from families.objectives import DiscreteDiffusion


class Huber(DiscreteDiffusion):
    """Errors beyond `delta` count linearly. For a flow subclass RectifiedFlow instead."""

    def __init__(self, config, delta=1.0):
        super().__init__(config)
        self.delta = delta

    def losses(self, prediction, target):  # (B, C, h, w) float32, twice -> (B,)
        return F.huber_loss(prediction, target, reduction="none", delta=self.delta).flatten(1).mean(dim=1)
