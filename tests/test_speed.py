"""training/speed.py: no key changes a step's results beyond rounding, and every network is compiled once.

The proofs over the miniature's own steps are in tests/test_miniature_speed.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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
    {"compile": "whole"},
    {"compile": "blocks"},
    {"compile": "whole", "channels_last": True, "attention": "flash", "gradient_checkpointing": 0.5},
    {"compile": "blocks", "channels_last": True, "gradient_checkpointing": 0.5},
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
    size = (32, 32) if family == "shapes" else (64, 64)
    config = ModelConfig(family=family, preset="tiny", weights="random")
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=1)
    model.to_device(torch.device("cpu"), precision)
    speed.apply(model, SpeedKeys(**keys))
    return model


def little(keys: dict) -> LatentDiffusion:
    """A model whose denoiser has every kind of block once, at most twice: dynamo takes seconds for it."""
    from diffusers import UNet2DConditionModel

    config = ModelConfig(family="shapes", preset="tiny", weights="random")
    model = build_model(config, ObjectiveConfig(), size=(32, 32), normalize="symmetric", seed=1)
    torch.manual_seed(1)
    model.denoiser = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("UpBlock2D",),
        layers_per_block=1,
        cross_attention_dim=64,
        norm_num_groups=4,
        attention_head_dim=2,
        use_linear_projection=True,
    )
    model.to_device(torch.device("cpu"), "fp32")
    speed.apply(model, SpeedKeys(**keys))
    return model


def batch_of(model: LatentDiffusion, number: int, size: int = 4, stage: str = "moments") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step_seed(3, number, 0))
    pixels = 32 if model.latent_shape[-1] == 8 and model.family.name == "shapes" else 64
    batch = {"tokens": torch.randint(1, 20, (size, model.family.num_tokens), generator=generator)}
    if stage == "moments":
        channels, height, width = model.latent_shape
        batch["moments"] = torch.randn(size, 2 * channels, height, width, generator=generator).half()
    else:
        batch["images"] = torch.randint(0, 256, (size, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    return model.draw(batch, generator)


def train(model: LatentDiffusion, steps: int, stage: str = "moments", first: int = 0) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for number in range(first, first + steps):
        batch = batch_of(model, number, stage=stage)
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def generate(model: LatentDiffusion, number: int = 2) -> torch.Tensor:
    text = {"tokens": torch.ones(number, model.family.num_tokens, dtype=torch.int64)}
    noise = torch.randn(number, *model.latent_shape, generator=torch.Generator().manual_seed(5))
    return model.generate(text, noise, sampler="ddim", steps=3, guidance=2.0)


# --- what is computed ---


class Small(nn.Module):
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
    speed.apply(network, SpeedKeys(**keys))
    return network


def test_no_key_changes_a_name_or_a_value_of_the_state_dict(kernels):
    """Applied, not run: a compiled network is compiled at its first call."""
    plain = denoiser_of({}).denoiser.state_dict()
    for keys in (*EAGER, *COMPILED):
        fast = denoiser_of(keys).denoiser.state_dict()
        assert list(fast) == list(plain), keys
        assert all(torch.equal(fast[name], plain[name]) for name in plain), keys


@pytest.mark.parametrize(
    ("keys", "family"), [*((keys, "shapes") for keys in EAGER), pytest.param(EAGER[-1], "sd2", marks=pytest.mark.slow)]
)
def test_the_loss_curve_and_the_images_stay_those_of_the_plain_path(keys, family):
    plain, fast = model_of({}, family), model_of(keys, family)
    assert train(fast, 2, "images") == pytest.approx(train(plain, 2, "images"), rel=1e-4)
    torch.testing.assert_close(generate(fast), generate(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.timeout(600, func_only=True)  # kernels are compiled by gcc
def test_blocks_compiled_to_kernels_keep_the_loss_curve(kernels):
    """Of a small network: those of the miniature's take a compiler minutes, see compile=whole in test_miniature_speed.py."""
    plain, fast = little({}), little({"compile": "blocks", "channels_last": True, "gradient_checkpointing": 0.5})
    assert train(fast, 6) == pytest.approx(train(plain, 6), rel=1e-4)


# --- compilation ---


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["whole", "blocks"])
def test_nothing_is_compiled_after_the_first_step(graphs_alone, compile):
    model = little({"compile": compile, "gradient_checkpointing": float(compile == "blocks")})
    train(model, 1)
    first = speed.num_graphs()
    train(model, 2, first=1)
    assert speed.num_graphs() == first >= (2 if compile == "whole" else 4)
    if (
        compile == "whole"
    ):  # denoiser, text encoder; then at two batch sizes (the empty caption is one row), VAE's decoder
        assert first == 2 and torch._dynamo.utils.counters["graph_break"] == {}
        generate(model)
        assert speed.num_graphs() == 2 + 4
        train(model, 1, first=4)
        generate(model)
        assert speed.num_graphs() == 2 + 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux", "mochi", "hunyuan_video", "wan"])
def test_the_other_families_are_one_graph_too_without_a_break(graphs_alone, family):
    config, size = ModelConfig(family=family, preset="tiny", weights="random"), with_frames(family, (64, 64))
    empty = zero_states(load_family(family, "tiny", "stock"), size)
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=1, empty_states=empty)
    model.to_device(torch.device("cpu"), "fp32")
    speed.apply(model, SpeedKeys(compile="whole"))
    columns = model.family.columns("moments", size, stored_text=True)
    for number in range(3):
        batch = next(iter(SyntheticBatches(columns, 2, torch.device("cpu"), number)))
        drawn = model.draw(batch, torch.Generator().manual_seed(number))
        model.loss(model(drawn), drawn).backward()
        assert speed.num_graphs() == 1 and torch._dynamo.utils.counters["graph_break"] == {}


def test_too_many_shapes_are_an_error_and_no_silent_return_to_eager(graphs_alone, monkeypatch):
    monkeypatch.setattr(speed, "GRAPHS_OF_WHOLE", 3)
    network = denoiser_of({"compile": "whole"}, Small())
    with pytest.raises(Exception, match="recompile_limit"):
        for size in range(1, speed.GRAPHS_OF_WHOLE + 2):
            network.denoiser(torch.zeros(size, 1, 2, 2))


def test_inductors_options_are_those_of_the_keys():
    from torch._inductor import config, list_mode_options

    assert speed.inductor_options(SpeedKeys(compile="whole")) == {}
    keys = SpeedKeys(compile="whole", compile_mode="max-autotune", channels_last=True, cuda_graphs=True)
    options = speed.inductor_options(keys)
    own = {"force_layout_optimization": True, "triton.cudagraphs": True}
    assert options == {"max_autotune": True, "coordinate_descent_tuning": True, **own}
    assert set(options) <= set(config.get_config_copy())
    assert list_mode_options("max-autotune-no-cudagraphs").items() <= options.items()


# --- memory format ---


class Operations(TorchDispatchMode):
    """Records the name of each operation, and for each convolution whether its input is in NHWC."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.is_nhwc: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if func is torch.ops.aten.convolution.default:
            self.is_nhwc.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return func(*args, **(kwargs or {}))


def operations_of_a_step(keys: dict) -> Operations:
    model = model_of(keys, "sd2").train()
    batch = batch_of(model, 0)
    with Operations() as operations:
        model(batch)
    return operations


def test_every_convolution_of_a_training_step_is_given_nhwc_in_this_model_alone():
    """With model and input alone in NHWC many are not: diffusers goes back at each transformer."""
    seen = operations_of_a_step({"channels_last": True}).is_nhwc
    assert len(seen) == 64 and all(seen)
    names = {type(module).__name__ for module in model_of({}, "sd2").denoiser.modules()}
    assert {"Conv2d", "Transformer2DModel"} <= names and not {"NhwcConv2d", "NhwcTransformer2DModel"} & names


def test_the_state_of_an_optimizer_in_another_layout_is_laid_out_anew():
    weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    plain = torch.arange(108.0).view(4, 3, 3, 3)
    optimizer = torch.optim.AdamW([weight])
    load_optimizer_state(
        optimizer, {**optimizer.state_dict(), "state": {0: {"step": torch.tensor(3.0), "exp_avg": plain}}}
    )
    state = optimizer.state[weight]
    assert state["exp_avg"].stride() == weight.stride() and torch.equal(state["exp_avg"], plain)
    assert state["step"] == 3.0


# --- attention ---


@pytest.mark.parametrize(("attention", "fused"), [("auto", True), ("flash", True), ("math", False)])
def test_the_requested_back_end_attends(attention, fused):
    names = operations_of_a_step({"attention": attention}).names
    of_denoiser = sum("_scaled_dot_product_flash_attention_for_cpu" in name for name in names)
    assert of_denoiser >= 32 if fused else of_denoiser <= 2  # the text encoder keeps torch's choice


@pytest.mark.parametrize(
    ("attention", "lengths", "chosen"),
    [
        *(("cudnn", (4096, 4096), "cudnn"), ("cudnn", (256, 256), "cudnn"), ("cudnn", (4096, 77), "flash")),
        *(("cudnn", (64, 64), "flash"), ("efficient", (4096, 77), "efficient")),
    ],
)
def test_cudnn_attends_where_each_of_its_versions_is_right(attention, lengths, chosen):
    assert speed.back_end_for(attention, lengths) == chosen


# --- activation checkpointing ---


@pytest.mark.parametrize(("fraction", "num"), [(0.0, 0), (0.25, 9), (1.0, 38)])
def test_a_fraction_of_the_blocks_is_computed_again(fraction, num):
    """22 residual and 16 transformer blocks of SD2's denoiser."""
    assert speed.checkpoint_blocks(denoiser_of({}).denoiser, fraction) == num


def test_gradient_checkpointing_lowers_the_memory_of_an_image_and_not_its_compute():
    config, keys = ModelConfig(family="shapes", preset="tiny"), dict(stage="moments", size=(32, 32), precision="fp32")
    none, whole = (
        memory.measure_cost(config, ObjectiveConfig(), **keys, gradient_checkpointing=fraction)
        for fraction in (0.0, 1.0)
    )
    assert 0.4 * none.activation_gib_per_image > whole.activation_gib_per_image > 0.0
    assert none.flops_per_image == whole.flops_per_image


# --- whole runs ---


def run(folder: Path, name: str, *words: str) -> dict:
    own = [f"run_folder={folder}", f"run_name={name}", "data.synthetic=true", "data.stage=moments"]
    own += ["model.family=shapes", "image_size=32"]
    assert benchmark.main([*TINY_RUN, *own, *words]) == 0
    return json.loads((folder / name / "summary.json").read_text())


@pytest.mark.usefixtures("quick_estimate")
def test_a_speed_is_that_of_the_keys_which_the_summary_names(tmp_path, capsys):
    """The first start's windows, without the keys, do not count for the second. The checkpoint fits both."""
    plain = ["measure.warmup_batches=0", "measure.window_batches=1", "save.every_images=8"]
    run(tmp_path, "a", *plain, "max_duration=2ba")
    assert run(tmp_path, "a", *plain, "max_duration=3ba")["windows"] == 3
    keys = ["channels_last=true", "gradient_checkpointing=0.25"]
    summary = run(tmp_path, "a", *plain, *keys, "max_duration=4ba")
    assert (summary["windows"], summary["batches"], summary["starts"]) == (1, 4, 3)
    assert (summary["compile"], summary["gradient_checkpointing"], summary["channels_last"]) == ("off", 0.25, True)
    assert summary["first_step_seconds"] > 0.0 and summary["compiled_graphs"] is None


# --- what cannot be ---


def refused(capsys, *words: str) -> list[str]:
    assert benchmark.main([*TINY_RUN, "data.synthetic=true", *words]) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("attention=cudnn", "attention: cudnn needs a GPU. Possible on a CPU: auto, flash, math."),
        ("attention=xformers", "attention: xformers needs a GPU."),
        ("compile_mode=max-autotune", "compile_mode: max-autotune, but compile=off."),
        ("cudnn_benchmark=true", "cudnn_benchmark: true needs a GPU."),
        ("cuda_graphs=true", "cuda_graphs: true, but compile=off, which has several graphs."),
        (
            "cuda_graphs=true compile=whole device_train_microbatch_size=4",
            "cuda_graphs: true, but device_train_microbatch_size=4: a graph's gradients cannot be added",
        ),
        ("cuda_graphs=true compile=whole device_train_microbatch_size=auto", "cuda_graphs: true, but device_train_mic"),
        ("cuda_graphs=true compile=whole device_train_microbatch_size=8", "cuda_graphs: true needs a GPU."),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_starts(capsys, words, text):
    assert refused(capsys, *words.split())[0].startswith(text)


@pytest.mark.parametrize(
    ("built_for", "cuda", "problem"),
    [
        ("2.1.0+cu128", 1300, "does not load: it is built for torch 2.1.0+cu128, here is 2.10.0+cu130."),
        ("2.10.0+cu128", 1208, "does not load: it is built for torch 2.10.0+cu128, here is 2.10.0+cu130."),
        ("2.10.0", 1305, None),
    ],
)
def test_xformers_that_does_not_load_is_named_without_an_import(monkeypatch, tmp_path, built_for, cuda, problem):
    (tmp_path / "__init__.py").write_text("raise SystemExit('it was imported')")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "cpp_lib.json").write_text(json.dumps({"version": {"cuda": cuda, "torch": built_for}}))
    assert speed.attention_problem("xformers", "bf16", True) == (problem and f"{problem} Use attention=auto.")


def test_what_a_gpu_lacks_for_an_attention_is_named(monkeypatch):
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
    assert speed.attention_problem("xformers", "bf16", True).startswith("is not installed: it has no release for every")
    for attention in ("flash", "cudnn"):
        assert "computes in 16 bits, the run in fp32. " in speed.attention_problem(attention, "fp32", True)

    def fail(*_, **__):
        raise RuntimeError("no kernel image is available.\nCUDA kernel errors might be")

    monkeypatch.setattr(speed.torch, "zeros", lambda *shape, device, **more: torch.ones(*shape, **more))
    monkeypatch.setattr(speed.nn.functional, "scaled_dot_product_attention", fail)
    problem = speed.attention_problem("cudnn", "bf16", True)
    assert problem == "does not run on this GPU (no kernel image is available). Use attention=auto."


@pytest.mark.parametrize(
    ("precision", "has_mask", "hip", "has_gpu", "chosen"),
    [
        ("bf16", False, None, True, "cudnn"),
        ("bf16", False, "7.2", True, "auto"),
        ("bf16", True, None, True, "auto"),
        ("fp32", False, None, True, "auto"),
        ("bf16", False, None, False, "auto"),
    ],
    ids=["NVIDIA", "AMD", "mask", "float32", "CPU"],
)
def test_auto_is_cudnns_attention_where_there_is_one(monkeypatch, precision, has_mask, hip, has_gpu, chosen):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    lacks_float32 = lambda name, precision, is_gpu: "computes in 16 bits" if precision == "fp32" else None  # noqa: E731
    monkeypatch.setattr(speed, "attention_problem", lacks_float32)
    assert speed.resolve_attention("auto", precision, has_mask=has_mask) == chosen
    assert speed.resolve_attention("math", precision, has_mask=has_mask) == "math"


@pytest.mark.parametrize("hip", [None, "7.2"])
def test_on_an_amd_gpu_miopen_is_set_to_channels_last(monkeypatch, hip):
    monkeypatch.delenv("PYTORCH_MIOPEN_SUGGEST_NHWC", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    speed.use_channels_last(SimpleNamespace(denoiser=Small(), frozen={}, memory_format=torch.contiguous_format))
    assert os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") == (hip and "1")
    monkeypatch.delenv("PYTORCH_MIOPEN_SUGGEST_NHWC", raising=False)


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


def test_a_missing_compiler_is_named(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    problem = "compile: whole needs a C++ compiler, and there is no"
    assert refused(capsys, "compile=whole")[0].startswith(f"{problem} 'no-such-compiler'. ")
    monkeypatch.delenv("CXX")  # inductor does not look for another one than g++
    monkeypatch.setattr(speed.shutil, "which", lambda name: None if name == "g++" else f"/usr/bin/{name}")
    assert refused(capsys, "compile=whole")[0].startswith(f"{problem} 'g++'. ")
