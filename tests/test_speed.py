"""training/speed.py: no key changes a step's results beyond rounding, and every network is compiled once.

The loss curve of the miniature with all keys is in tests/test_miniature.py.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo
from conftest import TINY_RUN, with_frames
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import benchmark
from checkpointing.content import load_optimizer_state
from data import SyntheticBatches
from families import load_family
from families.encoders import ModelConfig
from families.objectives import ObjectiveConfig
from model import LatentDiffusion, build_model, step_seed, zero_states
from training import memory, speed
from training.speed import SpeedKeys

pytestmark = pytest.mark.timeout(300, func_only=True)

EAGER = [
    {"attention": "flash", "gradient_checkpointing": 0.5},
    {"attention": "math"},
    {"gradient_checkpointing": 1.0, "channels_last": True},
]
COMPILED = [
    {"compile": "blocks"},
    {"compile": "whole", "channels_last": True, "attention": "flash", "gradient_checkpointing": 0.5},
]


@pytest.fixture
def kernels() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False, optimize_ddp=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def graphs_alone(monkeypatch, kernels) -> None:
    """Compile as far as graphs, without kernels: these take a C++ compiler minutes."""
    monkeypatch.setattr(speed, "BACKEND", "aot_eager")


def model_of(keys: dict, family: str = "shapes", *, precision: str = "fp32") -> LatentDiffusion:
    model = unprepared(family)
    model.to_device(torch.device("cpu"), precision)
    speed.apply(model, SpeedKeys(**keys))
    return model


def unprepared(family: str = "shapes", size: tuple[int, ...] | None = None, **more) -> LatentDiffusion:
    size = size or ((32, 32) if family == "shapes" else (64, 64))
    config = ModelConfig(family=family, preset="tiny", weights="random")
    return build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=1, **more)


def little(keys: dict) -> LatentDiffusion:
    """A model whose denoiser has every kind of block once, at most twice: dynamo takes seconds for it."""
    from diffusers import UNet2DConditionModel

    model = unprepared()
    torch.manual_seed(1)
    blocks = dict(down_block_types=("CrossAttnDownBlock2D",), up_block_types=("UpBlock2D",), layers_per_block=1)
    blocks |= dict(block_out_channels=(8,), norm_num_groups=4, attention_head_dim=2)
    model.denoiser = UNet2DConditionModel(8, cross_attention_dim=64, use_linear_projection=True, **blocks)
    model.to_device(torch.device("cpu"), "fp32")
    speed.apply(model, SpeedKeys(**keys))
    return model


def batch_of(model: LatentDiffusion, number: int, stage: str = "moments") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step_seed(3, number, 0))
    batch = {"tokens": torch.randint(1, 20, (4, model.family.num_tokens), generator=generator)}
    if stage == "moments":
        channels, height, width = model.latent_shape
        batch["moments"] = torch.randn(4, 2 * channels, height, width, generator=generator).half()
    else:
        batch["images"] = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return model.draw(batch, generator)


def train(model: LatentDiffusion, steps: int, stage: str = "moments", first: int = 0) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for number in range(first, first + steps):
        batch = batch_of(model, number, stage)
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def generate(model: LatentDiffusion) -> torch.Tensor:
    text = {"tokens": torch.ones(2, model.family.num_tokens, dtype=torch.int64)}
    noise = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(5))
    return model.generate(text, noise, sampler="ddim", steps=3, guidance=2.0)


# --- what is computed ---


class Small(nn.Module):
    """A module that is none of torch's own, which dynamo passes over."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def denoiser_of(keys: dict, denoiser: nn.Module | None = None) -> SimpleNamespace:
    """A denoiser alone, tiny SD2's where none is given, as `speed.apply` asks for it."""
    if denoiser is None:
        torch.manual_seed(1)
        denoiser = load_family("sd2", "tiny", "stock").build_denoiser()
    network = SimpleNamespace(denoiser=denoiser, frozen={}, memory_format=torch.contiguous_format, replays_graphs=False)
    network.autocast_dtype = None
    speed.apply(network, SpeedKeys(**keys))
    return network


@pytest.mark.parametrize("keys", [*EAGER, *COMPILED], ids=str)
def test_no_key_changes_a_name_or_a_value_of_the_state_dict(kernels, keys):
    """Applied, not run: a compiled network is compiled at its first call."""
    plain, fast = (denoiser_of(own).denoiser.state_dict() for own in ({}, keys))
    assert list(fast) == list(plain) and all(torch.equal(fast[name], plain[name]) for name in plain)


@pytest.mark.parametrize("keys", EAGER)
def test_the_loss_curve_and_the_images_stay_those_of_the_plain_path(keys):
    plain, fast = model_of({}), model_of(keys)
    assert train(fast, 2, "images") == pytest.approx(train(plain, 2, "images"), rel=1e-4)
    torch.testing.assert_close(generate(fast), generate(plain), rtol=1e-4, atol=1e-4)


# --- compilation ---


@pytest.mark.long
@pytest.mark.parametrize("compile", ["whole", "blocks"])
def test_nothing_is_compiled_after_the_first_step(graphs_alone, compile):
    model = little({"compile": compile, "gradient_checkpointing": float(compile == "blocks")})
    train(model, 1)
    first = speed.num_graphs()
    train(model, 2, first=1)
    assert speed.num_graphs() == first >= (2 if compile == "whole" else 4)
    if compile == "whole":
        assert first == 2 and torch._dynamo.utils.counters["graph_break"] == {}  # denoiser, text encoder
        for _ in range(2):  # at two batch sizes (the empty caption is one row), VAE's decoder
            generate(model)
            assert speed.num_graphs() == 2 + 4
            train(model, 1, first=4)


@pytest.mark.long
@pytest.mark.parametrize("family", ["sdxl", "flux", "mochi", "hunyuan_video", "wan"])
def test_the_other_families_are_one_graph_too_without_a_break(graphs_alone, family):
    size = with_frames(family, (64, 64))
    model = unprepared(family, size, empty_states=zero_states(load_family(family, "tiny", "stock"), size))
    model.to_device(torch.device("cpu"), "fp32")
    speed.apply(model, SpeedKeys(compile="whole"))
    columns = model.family.columns("moments", size, stored_text=True)
    for number in range(3):
        batch = next(iter(SyntheticBatches(columns, 2, torch.device("cpu"), number)))
        drawn = model.draw(batch, torch.Generator().manual_seed(number))
        model.loss(model(drawn), drawn).backward()
        assert speed.num_graphs() == 1 and torch._dynamo.utils.counters["graph_break"] == {}


def test_too_many_shapes_are_an_error_and_no_silent_return_to_eager(graphs_alone, monkeypatch):
    monkeypatch.setattr(speed, "GRAPHS_OF_WHOLE", 2)
    network = denoiser_of({"compile": "whole"}, Small())
    with pytest.raises(Exception, match="recompile_limit"):
        for size in range(1, 5):
            network.denoiser(torch.zeros(size, 1, 2, 2))


# --- memory format ---


class Operations(TorchDispatchMode):
    """Records the name of each operation, of each convolution whether its input is in NHWC, and attention's types."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.is_nhwc: list[bool] = []
        self.attended: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if func is torch.ops.aten.convolution.default:
            self.is_nhwc.append(args[0].is_contiguous(memory_format=torch.channels_last))
        if "attention" in self.names[-1]:
            self.attended.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def operations_of_a_step(keys: dict, precision: str = "fp32") -> Operations:
    model = model_of(keys, "sd2", precision=precision).train()
    batch = batch_of(model, 0)
    with Operations() as operations:
        model(batch)
    return operations


def test_every_convolution_of_a_training_step_is_given_nhwc_in_this_model_alone():
    """With model and input alone in NHWC many are not: diffusers goes back at each transformer."""
    seen = operations_of_a_step({"channels_last": True}).is_nhwc
    assert len(seen) == 64 and all(seen)
    assert "NhwcConv2d" not in {type(module).__name__ for module in model_of({}, "sd2").denoiser.modules()}


def test_the_state_of_an_optimizer_in_another_layout_is_laid_out_anew():
    weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    plain = torch.arange(108.0).view(4, 3, 3, 3)
    optimizer = torch.optim.AdamW([weight])
    saved = {"step": torch.tensor(3.0), "exp_avg": plain}
    load_optimizer_state(optimizer, {**optimizer.state_dict(), "state": {0: saved}})
    state = optimizer.state[weight]
    assert state["exp_avg"].stride() == weight.stride() and torch.equal(state["exp_avg"], plain)
    assert state["step"] == 3.0


# --- attention ---


@pytest.mark.parametrize(("attention", "fused"), [("auto", True), ("math", False)])
def test_the_requested_back_end_attends(attention, fused):
    names = operations_of_a_step({"attention": attention}).names
    of_denoiser = sum("_scaled_dot_product_flash_attention_for_cpu" in name for name in names)
    assert of_denoiser >= 32 if fused else of_denoiser <= 2  # the text encoder keeps torch's choice


@pytest.mark.parametrize(("attention", "dtype"), [("auto", torch.float32), ("flash", torch.bfloat16)])
def test_in_bf16_a_cpu_attends_in_float32_unless_another_attention_is_given_or_it_is_compiled(attention, dtype):
    operations = operations_of_a_step({"attention": attention}, "bf16")
    assert sum(attended is dtype for attended in operations.attended) >= 32
    assert not speed.attends_in_float32(SpeedKeys("whole"), torch.bfloat16)


def test_attention_in_float32_is_that_of_float32_forward_and_backward():
    query, key, value = (torch.randn(2, 3, 5, 8).bfloat16().requires_grad_() for _ in range(3))
    attend, mask = nn.functional.scaled_dot_product_attention, torch.randn(5, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), speed.Float32Attention():
        found = attend(query, key, value=value, attn_mask=mask)
    wanted = attend(query.float(), key.float(), value.float(), attn_mask=mask.float())
    gradients = [torch.autograd.grad(result.sin().sum(), (query, key, value)) for result in (found, wanted)]
    torch.testing.assert_close([found, *gradients[0]], [wanted, *gradients[1]], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("attention", "lengths", "chosen"),
    [("cudnn", (256, 256), "cudnn"), ("cudnn", (4096, 77), "flash"), ("efficient", (4096, 77), "efficient")],
)
def test_cudnn_attends_where_each_of_its_versions_is_right(attention, lengths, chosen):
    assert speed.back_end_for(attention, lengths) == chosen


# --- activation checkpointing ---


@pytest.mark.slow
def test_a_fraction_of_the_blocks_is_computed_again_for_less_memory_and_equal_flops():
    """22 residual and 16 transformer blocks of SD2's denoiser; a step of the miniature's."""
    assert [speed.checkpoint_blocks(denoiser_of({}).denoiser, part) for part in (0.0, 0.25, 1.0)] == [0, 9, 38]
    config, keys = ModelConfig(family="shapes", preset="tiny"), dict(stage="moments", size=(32, 32), precision="fp32")
    none, whole = (
        memory.measure_cost(config, ObjectiveConfig(), **keys, gradient_checkpointing=fraction)
        for fraction in (0.0, 1.0)
    )
    assert 0.4 * none.activation_gib_per_image > whole.activation_gib_per_image > 0.0
    assert none.flops_per_image == whole.flops_per_image


# --- what cannot be ---


def refused(capsys, *words: str) -> list[str]:
    assert benchmark.main([*TINY_RUN, "data.synthetic=true", *words]) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("attention=cudnn", "attention: cudnn needs a GPU. Possible on a CPU: auto, flash, math."),
        ("compile_mode=max-autotune", "compile_mode: max-autotune, but compile=off."),
        ("cuda_graphs=true", "cuda_graphs: true, but compile=off, which has several graphs."),
        ("cuda_graphs=true compile=whole device_train_microbatch_size=4", "cuda_graphs: true, but device_train_micro"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_starts(capsys, words, text):
    assert refused(capsys, *words.split())[0].startswith(text)


def test_what_a_gpu_lacks_for_an_attention_is_named(monkeypatch):
    assert "computes in 16 bits, the run in fp32. " in speed.attention_problem("cudnn", "fp32", True)
    fails = Mock(side_effect=RuntimeError("no kernel image is available.\nCUDA kernel errors might be"))
    monkeypatch.setattr(speed.torch, "zeros", lambda *shape, device, **more: torch.ones(*shape, **more))
    monkeypatch.setattr(speed.nn.functional, "scaled_dot_product_attention", fails)
    problem = speed.attention_problem("cudnn", "bf16", True)
    assert problem == "does not run on this GPU (no kernel image is available). Use attention=auto."


@pytest.mark.parametrize(
    ("precision", "has_mask", "hip", "chosen"),
    [("bf16", False, None, "cudnn"), ("bf16", False, "7.2", "auto"), ("bf16", True, None, "auto")],
    ids=["NVIDIA", "AMD", "mask"],
)
def test_auto_is_cudnns_attention_where_there_is_one(monkeypatch, precision, has_mask, hip, chosen):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lacks_float32 = lambda name, precision, is_gpu: "computes in 16 bits" if precision == "fp32" else None  # noqa: E731
    monkeypatch.setattr(speed, "attention_problem", lacks_float32)
    assert speed.resolve_attention("auto", precision, has_mask=has_mask) == chosen
    assert speed.resolve_attention("math", precision, has_mask=has_mask) == "math"


def test_tensors_that_enter_or_outlive_a_cuda_graph_are_copies(monkeypatch):
    compiled = {}
    monkeypatch.setattr(nn.Module, "compile", lambda module, **settings: compiled.update({module: settings["options"]}))
    model = model_of({}, "sd2")
    speed.apply(model, SpeedKeys(compile="whole", cuda_graphs=True))
    assert compiled.pop(model.denoiser) == {"triton.cudagraphs": True}
    assert len(compiled) == 3 and not any(compiled.values())  # text encoder, both halves of the autoencoder
    output = torch.zeros(1)
    monkeypatch.setattr(type(model.family), "denoise", lambda *_: output)
    assert model._denoise(torch.zeros(1, 4, 8, 8), torch.zeros(1), {}) is not output


# --- inductor's cache: libraries of a real compiler that a killed process has left cut off ---


def test_a_library_that_was_cut_off_is_removed_and_a_whole_one_stays(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "none"))
    speed.remove_unfinished_libraries()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    source, whole = tmp_path / "key.main.cpp", tmp_path / "key.main.so"
    source.write_text('extern "C" int one() { return 1; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", whole, source], check=True)
    content = whole.read_bytes()
    for cut in (b"", content[:64], content[:-1], b"\0" * len(content)):  # the last: as a linker that maps begins
        path = tmp_path / "bb" / "cut.main.so"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(cut)
        speed.remove_unfinished_libraries()
        output = f"compile: {path} was cut off when an earlier process was killed. It is removed, and compiled again.\n"
        assert not path.exists() and capsys.readouterr().err == output
    assert ctypes.CDLL(str(whole)).one() == 1 and whole.read_bytes() == content and source.exists()
