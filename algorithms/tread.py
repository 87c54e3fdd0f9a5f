"""Token routing: in training, a part of the image tokens skips the blocks in the middle.

    algorithms='["algorithms.tread:Tread(rate=0.5, start=2, end=-4)"]'

Krause et al. 2025, TREAD, arXiv:2501.04765. With the blocks b_0 ... b_(N-1), those in [start, end) see a random part of the
tokens; the others go from the input of b_start unchanged to the input of b_end. Text tokens are never routed. Sampling,
validation and every other call outside training see all tokens.

`rate` is the fraction that skips them, 0.5 as in the examples of their code. By default the route leaves out two blocks at
the beginning and four at the end. One difference: they choose for each sample. Here one choice holds for a device batch,
because FLUX in diffusers has one table of positions for all samples.

After `until_images` no token is routed, since sampling uses all of them. SPRINT (Park et al. 2025, arXiv:2510.21986) ends
its training the same way. The rest of SPRINT is not implemented: it adds a layer and a mask token that diffusers' networks
lack, so no pipeline could load the result.

The choice is drawn on the device from (seed, batch, rank): the same after a resume, in every microbatch and in recomputation.
FLOPs and MFU of a run are those of the whole network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from composer import Algorithm, Event, Logger, State
from torch import Tensor, nn

from common import dist
from families.block_inputs import change_inputs
from families.spec import Family, transformer_blocks
from model import step_seed
from weights.tensors import build_on_meta


class Tread(Algorithm):
    """Routes `rate` of the image tokens past the denoiser's blocks [start, end), which count as in a Python slice."""

    def __init__(self, rate: float = 0.5, start: int = 2, end: int = -4, until_images: int | None = None):
        if type(rate) is not float or not 0.0 < rate < 1.0:
            raise ValueError(f"rate is {rate!r}. Possible: a number above 0 and below 1")
        if type(start) is not int or type(end) is not int:
            raise ValueError(f"start is {start!r}, end is {end!r}. Possible: integers")
        if until_images is not None and (type(until_images) is not int or until_images < 1):
            raise ValueError(f"until_images is {until_images!r}. Possible: null, or an integer from 1")
        self.rate, self.start, self.end, self.until_images = rate, start, end, until_images
        self.route: Route | None = None

    def problem(self, family: Family, keys: Mapping[str, Any]) -> str | None:
        """Say why a run cannot use it, or None. `keys`: of a resolved run."""
        if family.token_arguments is None:
            return (
                f"tread: {family.name} ({family.variant}) has no blocks that take a part of the tokens. Leave it out."
            )
        if keys["compile"] == "whole":
            return "tread: compile=whole makes one graph, and tokens are routed between blocks. Set compile=blocks."
        num = len(transformer_blocks(build_on_meta(family.build_denoiser)))
        first, after, _ = slice(self.start, self.end).indices(num)
        if first < after < num:
            return None
        text = f"tread: start={self.start}, end={self.end}: of {num} blocks none is in the route, or none is after it"
        return f"{text}. Give start=0 to {num - 2}, and a larger end, to {num - 1}, which is also -1."

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.FIT_START, Event.BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = getattr(state.model, "module", state.model)  # without DDP
        if event == Event.FIT_START:
            self.route = Route(self.rate, model.family.token_arguments)
            self.route.install(transformer_blocks(model.denoiser), self.start, self.end)
        else:
            assert self.route is not None
            if self.until_images is not None and state.timestamp.sample.value >= self.until_images:
                self.route.rate = 0.0
            batch, rank = state.timestamp.batch.value, dist.get_global_rank()
            self.route.begin_step(step_seed(state.rank_zero_seed, batch, rank, "tread"), model.device)


class Route:
    """The tokens of a step that the blocks of the route see.

    Args:
        token_arguments: see families.spec.Family.
    """

    def __init__(self, rate: float, token_arguments: Mapping[str, int]):
        self.rate, self.token_arguments = rate, token_arguments
        self.kept: Tensor | None = None  # their indices, sorted; None: not chosen yet
        self._generator: torch.Generator | None = None
        self._whole: Tensor | None = None  # (B, S, D), what entered the route; None: outside it, or nothing is routed
        self._selected: dict[str, tuple[Any, Any]] = {}  # argument -> what the blocks are given, its part for `kept`

    def install(self, blocks: Sequence[nn.Module], start: int, end: int) -> None:
        """Change what the blocks of the route and the one after it receive."""
        first, after, _ = slice(start, end).indices(len(blocks))
        for number in range(first, after + 1):
            change_inputs(blocks[number], {first: self.enter, after: self.leave}.get(number, self.gather))

    def begin_step(self, seed: int, device: torch.device) -> None:
        """Begin a step, whose first forward pass chooses: it knows the number of tokens."""
        self.kept, self._generator = None, torch.Generator(device).manual_seed(seed)

    def choose(self, num_tokens: int) -> Tensor:
        """Return the step's choice."""
        if self.kept is None:
            assert self._generator is not None, "no step has begun"
            draws = torch.rand(num_tokens, generator=self._generator, device=self._generator.device)
            self.kept = draws.argsort()[: num_tokens - int(self.rate * num_tokens)].sort().values
        return self.kept

    def enter(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Put the whole tokens aside; return the arguments of the route's first block."""
        tokens = arguments["hidden_states"]  # (B, S, D)
        if int(self.rate * tokens.shape[1]) == 0:
            return arguments
        self._whole = tokens
        return self.gather(arguments | {"hidden_states": tokens.index_select(1, self.choose(tokens.shape[1]))})

    def gather(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a block's arguments, those of `token_arguments` for the kept tokens alone."""
        if self._whole is None:
            return arguments
        for name, dim in self.token_arguments.items():
            if name not in self._selected or self._selected[name][0] is not arguments[name]:
                self._selected[name] = (arguments[name], self._select(arguments[name], dim))
        return arguments | {name: self._selected[name][1] for name in self.token_arguments}

    def leave(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the block after the route, with all tokens."""
        if self._whole is None:
            return arguments
        assert self.kept is not None
        tokens, whole = arguments["hidden_states"], self._whole
        self._whole, self._selected = None, {}
        return arguments | {"hidden_states": whole.to(tokens.dtype).index_copy(1, self.kept, tokens)}

    def _select(self, value: Any, dim: int) -> Any:
        if not isinstance(value, Tensor):
            return tuple(self._select(part, dim) for part in value)
        assert self.kept is not None and self._whole is not None
        num_text = value.shape[dim] - self._whole.shape[1]
        text = torch.arange(num_text, device=value.device)
        return value.index_select(dim, torch.cat([text, num_text + self.kept]))
