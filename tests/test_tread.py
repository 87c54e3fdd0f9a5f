"""algorithms/tread.py: a routed step by hand and in every family, the same again after a resume, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer import Event, Timestamp
from conftest import TINY_RUN, with_frames
from mlperf_fixture import problems_of
from test_checkpoints import newest, same_training
from test_families import VARIANTS
from test_sharding import TOLERANCE, distance, trained

import benchmark
from algorithms.tread import Route, Tread
from families import load_family
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from families.packing import unpack
from families.spec import Family, transformer_blocks
from model import LatentDiffusion, build_model, zero_states
from training import speed
from training.speed import SpeedKeys

ROUTE = (0.5, 2, -1)
NAME = "algorithms.tread:Tread"
OF_TINY = f'algorithms=["{NAME}(start=0, end=1)"]'  # a network of two blocks
FLOW = ["model.family=shapes", "model.variant=flow", "data.synthetic=true", "image_size=32"]


def words_of(folder: Path, name: str, *more: str) -> list[str]:
    own = [f"run_folder={folder}", f"run_name={name}", "save.every_images=16", "ema.enabled=true"]
    return [*TINY_RUN, *FLOW, *own, *more]


def model_of(name: str, variant: str, preset: str = "tiny") -> LatentDiffusion:
    """A family's network without encoders; what begins as zeros, so that blocks would do nothing, is drawn."""
    config, family = ModelConfig(name, preset, variant, weights="random"), load_family(name, preset, variant)
    size = size_of(family)
    options = dict(size=size, normalize="symmetric", seed=0, empty_states=zero_states(family, size))
    model = build_model(config, ObjectiveConfig(), **options).to_device(torch.device("cpu"), "fp32")
    own = torch.Generator().manual_seed(1)
    for parameter in model.denoiser.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=own)
    model.denoiser.train()
    return model


def size_of(family: Family) -> tuple[int, ...]:
    return with_frames(family.name, (32, 32) if family.name == "shapes" else (64, 64), family.variant)


def predict(model: LatentDiffusion) -> torch.Tensor:
    own, columns = (
        torch.Generator().manual_seed(2),
        model.family.columns("moments", size_of(model.family), stored_text=True),
    )
    batch = {name: torch.randn(2, *column.shape, generator=own).to(column.dtype) for name, column in columns.items()}
    batch |= {name: torch.ones_like(value) for name, value in batch.items() if name in ("mask", "sizes")}
    return model(model.draw(batch, own))["prediction"]


def route_of(model: LatentDiffusion, rate: float, start: int, end: int) -> Route:
    route = Route(rate, model.family.token_arguments)
    route.install(transformer_blocks(model.denoiser), start, end)
    route.begin_step(7, model.device)
    return route


ROUTABLE = [
    (name, variant)
    for name, variants in VARIANTS.items()
    for variant in variants
    if load_family(name, "tiny", variant).token_arguments is not None
]


@pytest.mark.parametrize(("name", "variant"), ROUTABLE)
def test_every_familys_blocks_see_each_token_with_its_own_position(name, variant):
    """Attention knows the order of tokens by their positions alone: all in another order change nothing, half of them do."""
    model = model_of(name, variant, "full" if name == "shapes" else "tiny")  # its tiny ones have a block or two
    plain = predict(model)
    route = route_of(model, 0.5, 0, -1)
    assert (predict(model) - plain).abs().max() > 1e-3
    route.kept = torch.randperm(2 * len(route.kept), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(predict(model), plain, rtol=1e-4, atol=1e-5)


def test_a_routed_step_is_that_of_the_blocks_on_the_chosen_tokens_with_the_others_put_back():
    """FLUX's forward pass by hand: the route takes its second two-stream block and the first three of four single ones."""
    model = model_of("shapes", "flow", "full")
    network, route = model.denoiser, route_of(model, 0.25, 1, -1)
    inputs = {}
    network.register_forward_pre_hook(
        lambda _, args, more: inputs.update(more, hidden_states=args[0]), with_kwargs=True
    )
    routed = predict(model)
    kept = route.kept
    assert len(kept) == 12 and torch.equal(kept, kept.unique())  # of 16 tokens
    tokens, text = (
        network.x_embedder(inputs["hidden_states"]),
        network.context_embedder(inputs["encoder_hidden_states"]),
    )
    time = network.time_text_embed(1000 * inputs["timestep"], inputs["pooled_projections"])
    tables = network.pos_embed(torch.cat([inputs["txt_ids"], inputs["img_ids"]]))
    of_kept = [torch.cat([table[:16], table[16:][kept]]) for table in tables]  # after 16 text tokens
    first, *route_blocks, last = transformer_blocks(network.eval())  # eval: the blocks themselves
    text, tokens = first(tokens, text, time, tables)
    part = tokens[:, kept]
    for block in route_blocks:
        text, part = block(part, text, time, of_kept)
    tokens = tokens.clone()
    tokens[:, kept] = part
    _, tokens = last(tokens, text, time, tables)
    expected = unpack(network.proj_out(network.norm_out(tokens, time)), 8, 8)
    assert torch.equal(routed, expected)


def test_nothing_is_routed_outside_training_or_at_rate_zero_and_recomputation_has_the_same_tokens():
    def gradients(route: tuple[float, int, int] | None, fraction: float = 0.0) -> list[torch.Tensor]:
        model = model_of("shapes", "flow", "full")
        speed.checkpoint_blocks(model.denoiser, fraction)
        if route is not None:
            route_of(model, *route)
        model.denoiser.eval()
        outside = predict(model)
        model.denoiser.train()
        result = predict(model)
        result.square().mean().backward()
        return [outside, result, *(parameter.grad for parameter in model.denoiser.parameters())]

    plain, zero, routed, recomputed = gradients(None), gradients((0.0, 2, -1)), gradients(ROUTE), gradients(ROUTE, 1.0)
    assert all(map(torch.equal, plain, zero)) and all(map(torch.equal, routed, recomputed))
    assert torch.equal(plain[0], routed[0]) and not torch.equal(plain[1], routed[1])


@pytest.mark.slow
def test_compiled_blocks_get_the_chosen_tokens(monkeypatch):
    monkeypatch.setattr(speed, "BACKEND", "aot_eager")
    model, compiled = (model_of("shapes", "flow") for _ in range(2))
    speed.apply(compiled, SpeedKeys(compile="blocks", gradient_checkpointing=1.0))
    for each in (model, compiled):
        route_of(each, 0.5, 0, 1)
        predict(each).square().mean().backward()
    for one, other in zip(model.denoiser.parameters(), compiled.denoiser.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_step_chooses_once_by_seed_batch_and_rank_until_all_tokens_are_trained_on():
    algorithm, choices = Tread(until_images=64), []
    model = model_of("shapes", "flow", "full")
    for batch in (3, 3, 4):
        state = SimpleNamespace(model=model, rank_zero_seed=17, timestamp=Timestamp(batch=batch))
        if not choices:
            algorithm.apply(Event.FIT_START, state, None)
        algorithm.apply(Event.BATCH_START, state, None)
        choices.append(algorithm.route.choose(1024))
        assert algorithm.route.choose(1024) is choices[-1]
    assert torch.equal(choices[0], choices[1]) and not torch.equal(choices[0], choices[2])
    assert len(choices[0].unique()) == 512 and 400 < choices[0].float().mean() < 624
    state.timestamp = Timestamp(batch=8, sample=64)
    algorithm.apply(Event.BATCH_START, state, None)
    assert len(algorithm.route.choose(1024)) == 1024


# --- runs ---


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_run_resumes_bit_for_bit_in_microbatches(tmp_path):
    keys = ["device_train_microbatch_size=4", OF_TINY]
    assert benchmark.main(words_of(tmp_path, "whole", *keys)) == 0
    assert benchmark.main(words_of(tmp_path, "resumed", *keys, "max_duration=2ba")) == 0
    assert benchmark.main(words_of(tmp_path, "resumed", *keys)) == 0
    whole = newest(tmp_path, "whole")
    assert same_training(whole, newest(tmp_path, "resumed"))
    assert benchmark.main(words_of(tmp_path, "plain", keys[0])) == 0
    assert not same_training(whole, newest(tmp_path, "plain"))


@pytest.mark.long
@pytest.mark.timeout(400, func_only=True)
def test_sharded_weights_are_trained_as_whole_ones(tmp_path):
    keys = [OF_TINY, "gradient_checkpointing=0.5", "max_duration=2ba"]
    for name, how in (("ddp", "off"), ("full", "full")):
        trained(2, words_of(tmp_path, name, *keys, f"sharding={how}"))
    assert distance(tmp_path / "full", tmp_path / "ddp") < TOLERANCE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [f"algorithms=['{NAME}']", "model.family=sana", "model.variant=stock", "image_size=64"],
            "tread: sana (1600m) has no blocks that take a part of the tokens. Leave it out.",
        ),
        (
            [OF_TINY, "compile=whole"],
            "tread: compile=whole makes one graph, and tokens are routed between blocks. Set compile=blocks.",
        ),
        (
            [f"algorithms=['{NAME}']", "model.preset=full"],
            "tread: start=2, end=-4: of 6 blocks none is in the route, or none is after it. Give start=0 to 4, and a "
            "larger end, to 5, which is also -1.",
        ),
    ],
)
def test_what_cannot_be_routed_is_refused(words, message):
    assert f"algorithms[0]: {message}" in problems_of(*TINY_RUN, *FLOW, *words)
