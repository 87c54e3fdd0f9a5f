"""Compares the weights of all ranks, now and then: a rank that has computed something else stops the run.

DDP averages gradients and lets each rank take the same step: their weights stay equal to the bit, unchecked. A flipped
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
from torch import Tensor, nn

from common import dist
from ranks import rendezvous
from run_folder.metric_names import alert
from weights.tensors import local_shard

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the integers that its bits are added up as."""


@torch.no_grad()
def digest_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests of some tensors, (num_tensors,) int64 on the CPU. Waits for their device once."""
    sums = []
    for tensor in tensors:
        local = local_shard(tensor.detach())
        # A view needs memory in a row; NHWC weights are in a row in another order, which is no matter for a sum.
        row = torch.as_strided(local, (local.numel(),), (1,)) if _is_dense(local) else local.contiguous().view(-1)
        sums.append(row.view(INTEGERS[row.element_size()]).sum(dtype=torch.int64))
    return torch.stack([each.to(sums[0].device) for each in sums]).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def _is_dense(tensor: Tensor) -> bool:
    """True where a tensor's numbers lie in a row without gaps, in whatever order of dimensions."""
    is_dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return is_dense


class ReplicaCheck(Callback):
    """Compares the ranks' weights at a batch's end, before the batch is recorded, saved or evaluated; and before any save.

    Args:
        model: the ComposerModel itself, not wrapped by DDP.
        every_batches: of the run.
        ranks_per_copy: over how many ranks one copy of the weights is shared out; 1: each has all of them.
        extra_tensors: returns what is compared in addition to the model's tensors, by name: EMA weights, frozen encoders.
    """

    def __init__(
        self,
        model: nn.Module,
        every_batches: int,
        *,
        ranks_per_copy: int = 1,
        extra_tensors: Callable[[], Mapping[str, Tensor]] = dict,
    ):
        self.model, self.every_batches, self.extra_tensors = model, every_batches, extra_tensors
        self.ranks_per_copy = ranks_per_copy
        self.last_equal_batch: int | None = None
        """The last batch after which all weights were the same."""
        self._batch = 0
        self._group: torch.distributed.ProcessGroup | None = None
        self._loggers: Sequence[Any] = ()

    def fit_start(self, state: State, logger: Logger) -> None:
        self._batch, self._loggers = state.timestamp.batch.value, logger.destinations
        if dist.get_world_size() > 1:
            self._group = rendezvous.new_cpu_group()

    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch = state.timestamp.batch.value
        if self._batch % self.every_batches == 0:
            self.check()

    def before_saving(self) -> None:
        """Compare what a checkpoint is to hold, if it was not compared at this batch. All ranks call it."""
        if self._group is not None and self.last_equal_batch != self._batch:
            self.check()

    def check(self) -> None:
        """Compare the weights now. All ranks call it.

        Raises:
            ValueError: on all ranks alike: which ranks differ, and in which tensor first.
        """
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers()), **self.extra_tensors()}
        digests = digest_tensors(list(tensors.values()))
        short = hashlib.sha256(digests.numpy().tobytes()).digest()[:8]
        if len({*_group_by_copy(self._gather(short), self.ranks_per_copy)}) > 1:
            all_digests = _group_by_copy([tuple(each) for each in self._gather(digests.tolist())], self.ranks_per_copy)
            self._stop(all_digests, list(tensors))
        self.last_equal_batch = self._batch

    def _gather(self, content: Any) -> list[Any]:
        if self._group is None:
            return [content]
        contents = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(contents, content, group=self._group)
        return contents

    def _stop(self, of_copies: Sequence[tuple[Any, ...]], names: Sequence[str]) -> None:
        usual_copy, num = Counter(of_copies).most_common(1)[0]
        others = [number for number, each in enumerate(of_copies) if each != usual_copy]
        # Ranks of each differing copy whose digests differ from those of the most common copy.
        ranks, first = [], len(names)
        for copy in others:
            for number_in_copy, (digests, usual) in enumerate(zip(of_copies[copy], usual_copy, strict=True)):
                if digests != usual:
                    ranks.append(copy * self.ranks_per_copy + number_in_copy)
                    first = min(first, next(n for n, (a, b) in enumerate(zip(digests, usual, strict=True)) if a != b))
        is_clear = num > 1 or len(of_copies) > 2
        reference = (
            "the others" if is_clear else rendezvous.format_ranks([rank % self.ranks_per_copy for rank in ranks])
        )
        since = (
            "they were never compared before"
            if self.last_equal_batch is None
            else f"equal after batch {self.last_equal_batch}"
        )
        text = (
            f"health.digest_every_batches: after batch {self._batch} the weights of {rendezvous.format_ranks(ranks)} "
            f"differ from those of {reference}, first in {names[first]}; {since}. The run stops before anything of this "
            "batch is kept. Start it again without that machine: it resumes from the last checkpoint."
        )
        alert(self._loggers, "the ranks' weights differ", text)
        raise ValueError(text)


def _group_by_copy(of_ranks: Sequence[Any], ranks_per_copy: int) -> list[tuple[Any, ...]]:
    """Return what the ranks hold by copies: of each copy, what its ranks hold in their order."""
    return [tuple(of_ranks[at : at + ranks_per_copy]) for at in range(0, len(of_ranks), ranks_per_copy)]
