"""Compares the weights of all ranks, now and then: a rank that has computed something else stops the run.

DDP averages gradients and lets each rank take the same step: their weights stay equal to the bit, and nobody looks. A flipped
bit, a faulty GPU or a library that differs makes one rank's weights others for good. Nothing fails; its gradients are wrong.

A tensor's digest is the sum of its bits as integers, on its device: 8 bytes, the same in whatever order it is added up, and
another one after any one flipped bit. The digests of all ranks are compared on the CPU: first 8 bytes of each rank, and only
where these differ those of all tensors.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor, nn

from cli import meeting
from record.metric_names import alert
from weights.parts import part

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the integers that its bits are added up as."""


@torch.no_grad()
def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests of some tensors, (num_tensors,) int64 on the CPU."""
    sums = []
    for tensor in tensors:
        own = part(tensor.detach())
        # A view needs memory in a row; NHWC weights are in a row in another order, which is no matter for a sum.
        row = torch.as_strided(own, (own.numel(),), (1,)) if _is_dense(own) else own.contiguous().view(-1)
        sums.append(row.view(INTEGERS[row.element_size()]).sum(dtype=torch.int64))
    return torch.tensor([int(each) for each in sums], dtype=torch.int64)


def _is_dense(tensor: Tensor) -> bool:
    """True where a tensor's numbers lie in a row without gaps, in whatever order of dimensions."""
    is_dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return is_dense


class Replicas(Callback):
    """Compares the ranks' weights at a batch's end, before the batch is recorded, saved or evaluated; and before any save.

    Args:
        model: the ComposerModel itself, not wrapped by DDP.
        every_batches: of the run.
        ranks_of_a_copy: over how many ranks one copy of the weights is shared out; 1: each has all of them.
        beside: returns what is compared beside the model's own tensors, by name: EMA weights, frozen encoders.
    """

    def __init__(
        self,
        model: nn.Module,
        every_batches: int,
        *,
        ranks_of_a_copy: int = 1,
        beside: Callable[[], Mapping[str, Tensor]] = dict,
    ):
        self.model, self.every_batches, self.beside = model, every_batches, beside
        self.ranks_of_a_copy = ranks_of_a_copy
        self.agreed_at: int | None = None
        """The last batch after which all weights were the same."""
        self._batch = 0
        self._group: torch.distributed.ProcessGroup | None = None
        self._loggers: Sequence[Any] = ()

    def fit_start(self, state: State, logger: Logger) -> None:
        self._batch, self._loggers = state.timestamp.batch.value, logger.destinations
        if dist.get_world_size() > 1:
            self._group = torch.distributed.new_group(backend="gloo")

    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch = state.timestamp.batch.value
        if self._batch % self.every_batches == 0:
            self.check()

    def before_saving(self) -> None:
        """Compare what a checkpoint is to hold, if it was not compared at this batch. All ranks call it."""
        if self._group is not None and self.agreed_at != self._batch:
            self.check()

    def check(self) -> None:
        """Compare the weights now. All ranks call it.

        Raises:
            ValueError: on all ranks alike: which ranks differ, and in which tensor first.
        """
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers()), **self.beside()}
        own = digest(list(named.values()))
        short = hashlib.sha256(own.numpy().tobytes()).digest()[:8]
        if len({*_copies(self._gather(short), self.ranks_of_a_copy)}) > 1:
            whole = _copies([tuple(each) for each in self._gather(own.tolist())], self.ranks_of_a_copy)
            self._stop(whole, list(named))
        self.agreed_at = self._batch

    def _gather(self, content: Any) -> list[Any]:
        if self._group is None:
            return [content]
        found = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(found, content, group=self._group)
        return found

    def _stop(self, of_copies: Sequence[tuple[Any, ...]], names: Sequence[str]) -> None:
        most, num = Counter(of_copies).most_common(1)[0]
        others = [number for number, each in enumerate(of_copies) if each != most]
        # Ranks of each copy that hold something else, where the first copy that is like most of them holds another.
        ranks, first = [], len(names)
        for copy in others:
            for place, (own, usual) in enumerate(zip(of_copies[copy], most, strict=True)):
                if own != usual:
                    ranks.append(copy * self.ranks_of_a_copy + place)
                    first = min(first, next(n for n, (a, b) in enumerate(zip(own, usual, strict=True)) if a != b))
        is_clear = num > 1 or len(of_copies) > 2
        whom = "the others" if is_clear else meeting.named([rank % self.ranks_of_a_copy for rank in ranks])
        since = "they were never compared before" if self.agreed_at is None else f"equal after batch {self.agreed_at}"
        text = (
            f"health.digest_every_batches: after batch {self._batch} the weights of {meeting.named(ranks)} differ from those "
            f"of {whom}, first in {names[first]}; {since}. The run stops before anything of this batch is kept. Start it "
            "again without that machine: it resumes from the last checkpoint."
        )
        alert(self._loggers, "the ranks' weights differ", text)
        raise ValueError(text)


def _copies(of_ranks: Sequence[Any], ranks_of_a_copy: int) -> list[tuple[Any, ...]]:
    """Return what the ranks hold by copies: of each copy, what its ranks hold in their order."""
    return [tuple(of_ranks[at : at + ranks_of_a_copy]) for at in range(0, len(of_ranks), ranks_of_a_copy)]
