"""Contrastive flow matching: a sample's velocity is pushed away from that of another sample of its batch.

    algorithms='["algorithms.contrastive_flow:ContrastiveFlow(weight=0.05)"]'

With the prediction v_i, the target u_i = eps_i - x_i, and u_j of another sample (Stoica et al. 2025, arXiv:2506.05350):

    loss = mean_i( |v_i - u_i|^2 - weight |v_i - u_j|^2 )

The other sample is the one before it, j = i - 1, and the first one's the last: datasets are shuffled, so it is a random one,
and nothing is drawn. It is one of the same microbatch, of the same rank. The training loss of logs and records includes the
term; validation does not.

The gradient is (1 - weight) times that of |v_i - (u_i - weight u_j) / (1 - weight)|^2: what is learned is a flow that is
1 / (1 - weight) too long, away from the mean of all targets. The paper takes that back in sampling with guidance (section
5.4); here nothing does, so the validation loss is that of this flow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from composer import Algorithm, Event, Logger, State
from torch import Tensor

from families.objectives import Objective, RectifiedFlow
from families.spec import Family
from model import LatentDiffusion

TOO_FEW = (
    "contrastive flow needs a second sample, but a microbatch has one. Give device_train_microbatch_size=2 or more."
)


class ContrastiveFlow(Algorithm):
    """Subtract the loss against another sample's target, times `weight`, from a rectified flow's loss.

    Args:
        weight: of the term, in (0, 1): from 1 on the loss has no lower bound. The paper's is 0.05.

    Raises:
        ValueError: `weight` is outside; a microbatch has one sample.
    """

    def __init__(self, weight: float = 0.05):
        if not 0.0 < weight < 1.0:
            raise ValueError(f"weight is {weight}. Possible: more than 0 and less than 1; the paper's is 0.05")
        self.weight = weight
        self._objective: Objective | None = None

    def problem(self, family: Family, keys: Mapping[str, Any]) -> str | None:
        """Say why a run cannot use it, or None. `keys`: of a resolved run."""
        if (prediction := keys["objective.prediction"]) != RectifiedFlow.prediction:
            text = f"contrastive flow needs a rectified flow, but the prediction is {prediction}"
            return f"{text}. Set objective.prediction=flow, or leave it out."
        return TOO_FEW if keys["device_train_microbatch_size"] == 1 else None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:  # the model is not wrapped yet
            assert isinstance(state.model, LatentDiffusion)
            self._objective = state.model.objective
            return
        assert self._objective is not None and isinstance(state.loss, Tensor)
        outputs = cast(Mapping[str, Tensor], state.outputs)
        prediction, target, weight = (outputs[name] for name in ("prediction", "target", "weight"))
        if len(target) < 2:
            raise ValueError(f"algorithms: {TOO_FEW}")
        losses = self._objective.losses(prediction.float(), target.roll(1, dims=0).float())  # (B,)
        state.loss = state.loss - self.weight * (weight * losses).mean()
