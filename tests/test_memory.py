"""training/memory.py and preflight/plan.py: memory by kind against counted bytes, divided over ranks; what fits on cards."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from test_low_memory_adamw import optimizer_of
from test_speed import model_of
from torch.utils._python_dispatch import TorchDispatchMode

from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from preflight import plan
from training import memory
from training.config import RunConfig
from training.memory import BUCKETS, EMA, STATES, UPDATE, Cost, measure_cost
from training.optimizer import OptimizerConfig, build_optimizer

GIB = 2**30
PARTS = dict(small_parameters=10**6, uneven_parameters=10**7, largest_stack=10**8, largest_block=3 * 10**8)
PARTS |= dict(num_blocks=64, beside_blocks=10**8, precision="bf16")
LARGE = Cost(12 * 10**9, 0, 1.0, activation_gib_per_image=0.5, activation_gib_once=2.0, frozen_gib=1.0, **PARTS)
RUN = {"precision": "bf16", "compile": "whole", "model.frozen_device": "device"}
RUN |= {"ema.enabled": False, "ema.device": "model"}


def num_bytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# --- kinds ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "states", "precision"),
    [("sd2", "fp32", "fp32"), ("flux", "bf16", "bf16_params"), ("sd2", "muon", "fp32")],
)
def test_weights_gradients_and_states_are_those_of_a_real_step(family, states, precision):
    """Bytes of the tensors themselves, but for the step that each counts. In 8 bits: tests/test_low_memory_adamw_8bit.py."""
    config = ModelConfig(family, "tiny", weights="random")
    traced = measure_cost(config, ObjectiveConfig(), stage="moments", size=(64, 64), precision=precision)
    is_muon, model = states == "muon", model_of({}, family, precision=precision)
    kinds = dataclasses.replace(traced, **{"optimizer" if is_muon else "states": states}).memory_by_kind(1, ema=True)
    muon = OptimizerConfig(name="muon")
    optimizer = build_optimizer(muon, model.denoiser, 8) if is_muon else optimizer_of(model, states)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert kinds["weights"] * GIB == num_bytes(model.parameters())
    assert kinds["gradients"] * GIB == num_bytes(parameter.grad for parameter in model.parameters())
    assert kinds[STATES] * GIB == pytest.approx(num_bytes(moments), rel=1e-9)
    assert kinds[EMA] * GIB == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert (kinds[UPDATE] > 0) == is_muon


class Peak(TorchDispatchMode):
    """The most bytes of tensors that torch's operations made and nobody has freed, without those of `known`."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (address := storage.data_ptr()) not in self.known and address not in self.alive:
                    self.alive[address] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, address, None)
        self.most = max(self.most, sum(self.alive.values()))
        return made


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("family", ["sd2", "flux"])
def test_activations_are_the_peak_of_a_real_step_also_where_blocks_are_computed_twice(family, fraction):
    """A block that is computed twice keeps its inputs, and in the backward pass one is there whole."""
    model = model_of({"gradient_checkpointing": fraction}, family)
    columns, most = model.family.columns("moments", (64, 64), stored_text=True), []
    for num in (4, 8):
        batch = {name: torch.zeros_like(tensor) for name, tensor in memory._batch(model, columns, num).items()}
        model.loss(model(batch), batch).backward()  # gradients are there
        gradients = [parameter.grad for parameter in model.parameters()]
        with Peak([*model.parameters(), *gradients, *batch.values()]) as peak:
            model.loss(model(batch), batch).backward()
        most.append(peak.most / GIB)
    planned = memory._saved_gib(model, columns, 2) - memory._saved_gib(model, columns, 1)
    assert planned == pytest.approx((most[1] - most[0]) / 4, rel=0.1)


@pytest.mark.parametrize(
    ("sharding", "num", "parts"), [("off", 16, 1), ("full", 16, 16), ("hybrid", 16, 8), ("full", 1, 1)]
)
def test_sharding_divides_what_is_kept_for_each_parameter_and_gathers_blocks(sharding, num, parts):
    whole = plan.cost_over_gpus(LARGE, 1, sharding).memory_by_kind(2, ema=True)
    kinds = plan.cost_over_gpus(LARGE, num, sharding).memory_by_kind(2, ema=True)
    for kind in ("weights", "gradients", STATES, EMA):
        assert kinds[kind] == pytest.approx(whole[kind] / parts)
    is_sharded = parts > 1
    gathered = 2 * (3 * 3 * 10**8 + 2 * 10**8) / GIB  # bf16: two blocks and a block's gradient; twice what is in none
    assert kinds["gathered blocks"] == (pytest.approx(gathered) if is_sharded else 0.0)
    assert kinds["cast weights"] == (0.0 if is_sharded else 2.0)
    assert kinds[BUCKETS] == (pytest.approx(whole["gradients"]) if sharding == "off" else 0.0)
    assert (kinds["activations"], kinds["frozen encoders"]) == (1.0, 1.0)


# --- cards ---


def test_the_smallest_number_of_cards_is_the_first_on_which_an_image_fits():
    numbers = [plan.fewest_cards(LARGE, gib, "full", ema=False) for gib in plan.CARDS_GIB]
    for gib, num in zip(plan.CARDS_GIB, numbers, strict=True):
        need = [plan.cost_over_gpus(LARGE, n, "full").memory_gib(1, ema=False) for n in (num - 1, num)]
        assert need[1] <= memory.USABLE_FRACTION * gib < need[0]
    assert plan.fewest_cards(LARGE, 80, "off", ema=False) is None
    assert plan.images_a_pass(LARGE, 80, ema=False) == 0
    over_eight = plan.cost_over_gpus(LARGE, 8, "full")
    room = memory.USABLE_FRACTION * 80 - over_eight.memory_gib(0, ema=False)
    assert plan.images_a_pass(over_eight, 80, ema=False) == int(room / 0.5)
    text = "smallest number of cards with sharding=full: of 80 GiB {}, of 139 GiB {}".format(*numbers)
    assert plan.smallest_num_cards(LARGE, RUN)[1] == text


def test_the_fewest_keys_that_make_a_run_fit_a_small_card_are_named(monkeypatch):
    """15.2 and 22.8 GiB are usable. A parameter takes 16 bytes: weight, gradient and moments, which are 8 of them."""

    def one_card(activations: float, recomputed: float, frozen: float, parameters_gib: float = 0.0) -> str:
        def cost(config: RunConfig) -> Cost:
            kept = recomputed if config.gradient_checkpointing else activations
            sizes = int(parameters_gib * GIB / 16), 0, 18e12
            return Cost(*sizes, kept, forward_flops=6e12, activation_gib_once=0.0, frozen_gib=frozen)

        monkeypatch.setattr(plan, "measure_step_cost", cost)
        line = plan.on_small_cards(RunConfig(precision="bf16", compile="whole"))
        line = line.removeprefix("one card, one image a pass: ").removesuffix("; speed at 50 TFLOP/s")
        return line.replace(" images an hour", "")

    assert one_card(14, 2, 1) == "of 16 GiB as it is (10,000), of 24 GiB as it is (10,000)"
    assert one_card(16, 2, 4) == "of 16 GiB with gradient_checkpointing=1 (7,500), of 24 GiB as it is (10,000)"
    assert one_card(3, 2, 14) == "of 16 GiB with model.frozen_device=cpu, of 24 GiB as it is (10,000)"
    both = "gradient_checkpointing=1 optimizer.states=8bit"
    assert one_card(3, 2, 0, 20) == f"of 16 GiB with {both} (7,500), of 24 GiB with gradient_checkpointing=1 (7,500)"
    assert one_card(30, 25, 0) == "of 16 GiB does not fit, of 24 GiB does not fit"
