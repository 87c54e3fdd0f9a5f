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
from data import SyntheticBatches
from model import LatentDiffusion, build_model, step_seed, zero_states
from training import blocks, cost, speed
from training.checkpoint_content import take_moments
from training.speed import SpeedKeys
from zoo import load_family
from zoo.model_config import ModelConfig
from zoo.objectives import ObjectiveConfig

pytestmark = pytest.mark.timeout(300, func_only=True)

EAGER = [
    {"channels_last": True},
    {"attention": "flash"},
    {"attention": "math"},
    {"gradient_checkpointing": 0.5},
    {"gradient_checkpointing": 1.0, "channels_last": True},
]
COMPILED = [
    {"compile": "whole"},
    {"compile": "blocks"},
    {"compile": "whole", "channels_last": True, "attention": "flash", "gradient_checkpointing": 0.5},
    {"compile": "blocks", "channels_last": True, "gradient_checkpointing": 0.5},
]


@pytest.fixture
def graphs_alone(monkeypatch) -> Iterator[None]:
    """Compile as far as graphs, without kernels: these take a C++ compiler minutes."""
    monkeypatch.setattr(speed, "BACKEND", "aot_eager")
    yield from fresh_dynamo()


def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False, optimize_ddp=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def kernels() -> Iterator[None]:
    yield from fresh_dynamo()


def model_of(keys: dict, family: str = "shapes", *, precision: str = "fp32") -> LatentDiffusion:
    size = (32, 32) if family == "shapes" else (64, 64)
    config = ModelConfig(family=family, preset="tiny", weights="random")
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=1)
    model.place(torch.device("cpu"), precision)
    speed.apply(model, SpeedKeys(**keys), None)
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
    model.place(torch.device("cpu"), "fp32")
    speed.apply(model, SpeedKeys(**keys), None)
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
    speed.apply(network, SpeedKeys(**keys), None)
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
    assert train(fast, 4, "images") == pytest.approx(train(plain, 4, "images"), rel=1e-4)
    torch.testing.assert_close(generate(fast), generate(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600, func_only=True)  # kernels are compiled by gcc
def test_blocks_compiled_to_kernels_keep_the_loss_curve(kernels):
    """Of a small network: those of the miniature's take a compiler minutes, see compile=whole in test_miniature_speed.py."""
    plain, fast = little({}), little({"compile": "blocks", "channels_last": True, "gradient_checkpointing": 0.5})
    assert train(fast, 6) == pytest.approx(train(plain, 6), rel=1e-4)


# --- compilation ---


@pytest.mark.slow
def test_one_graph_trains_and_nothing_is_compiled_after_the_first_step(graphs_alone):
    model = little({"compile": "whole"})
    train(model, 1)
    assert speed.num_graphs() == 2  # denoiser, text encoder
    assert torch._dynamo.utils.counters["graph_break"] == {}
    train(model, 3, first=1)
    assert speed.num_graphs() == 2
    generate(model)
    at_first = speed.num_graphs()
    assert at_first == 2 + 4  # denoiser, text encoder at two batch sizes (the empty caption is one row), VAE's decoder
    train(model, 1, first=4)
    generate(model)
    assert speed.num_graphs() == at_first


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux", "mochi", "hunyuan_video", "wan"])
def test_the_other_families_are_one_graph_too_without_a_break(graphs_alone, family):
    config, size = ModelConfig(family=family, preset="tiny", weights="random"), with_frames(family, (64, 64))
    empty = zero_states(load_family(family, "tiny", "stock"), size)
    model = build_model(config, ObjectiveConfig(), size=size, normalize="symmetric", seed=1, empty_states=empty)
    model.place(torch.device("cpu"), "fp32")
    speed.apply(model, SpeedKeys(compile="whole"), None)
    columns = model.family.columns("moments", size, stored_text=True)
    for number in range(3):
        batch = next(iter(SyntheticBatches(columns, 2, torch.device("cpu"), number)))
        drawn = model.draw(batch, torch.Generator().manual_seed(number))
        model.loss(model(drawn), drawn).backward()
        assert speed.num_graphs() == 1 and torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.slow
def test_blocks_are_compiled_by_themselves_and_only_once(graphs_alone):
    model = little({"compile": "blocks", "gradient_checkpointing": 1.0})
    train(model, 1)
    first = speed.num_graphs()
    assert first >= 4
    train(model, 2, first=1)
    assert speed.num_graphs() == first


def test_too_many_shapes_are_an_error_and_no_silent_return_to_eager(graphs_alone, monkeypatch):
    monkeypatch.setattr(speed, "GRAPHS_OF_WHOLE", 3)
    network = denoiser_of({"compile": "whole"}, Small())
    with pytest.raises(Exception, match="recompile_limit"):
        for size in range(1, speed.GRAPHS_OF_WHOLE + 2):
            network.denoiser(torch.zeros(size, 1, 2, 2))


def test_inductors_options_are_those_of_the_keys():
    assert speed.inductor_options(SpeedKeys(compile="whole")) == {}
    keys = SpeedKeys(compile="whole", compile_mode="max-autotune", channels_last=True, cuda_graphs=True)
    options = speed.inductor_options(keys)
    assert options == {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "force_layout_optimization": True,
        "triton.cudagraphs": True,
    }
    from torch._inductor import config, list_mode_options

    assert set(options) <= set(config.get_config_copy())
    assert list_mode_options("max-autotune-no-cudagraphs").items() <= options.items()


# --- memory format ---


class Convolutions(TorchDispatchMode):
    """Notes for each convolution whether its input lies in NHWC."""

    def __init__(self):
        super().__init__()
        self.is_nhwc: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.is_nhwc.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return func(*args, **(kwargs or {}))


def nhwc_fraction(model: LatentDiffusion) -> float:
    batch = batch_of(model, 0)
    model.train()
    with Convolutions() as seen:
        model(batch)
    assert len(seen.is_nhwc) == 64, len(seen.is_nhwc)
    return sum(seen.is_nhwc) / len(seen.is_nhwc)


def test_every_convolution_of_a_training_step_is_given_nhwc():
    """With model and input alone in NHWC many are not: diffusers goes back at each transformer."""
    assert nhwc_fraction(model_of({"channels_last": True}, "sd2")) == 1.0
    half = model_of({}, "sd2")
    half.memory_format = torch.channels_last
    half.denoiser.to(memory_format=torch.channels_last)
    assert nhwc_fraction(half) < 0.7


def test_other_models_keep_their_classes():
    model_of({"channels_last": True, "gradient_checkpointing": 1.0}, "sd2")
    names = {type(module).__name__ for module in model_of({}, "sd2").denoiser.modules()}
    assert {"Conv2d", "Transformer2DModel", "ResnetBlock2D", "BasicTransformerBlock"} <= names
    assert not {"NhwcConv2d", "NhwcTransformer2DModel"} & names


def test_the_state_of_an_optimizer_in_another_layout_is_laid_out_anew():
    weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    plain = torch.arange(108.0).view(4, 3, 3, 3)
    optimizer = torch.optim.AdamW([weight])
    take_moments(optimizer, {**optimizer.state_dict(), "state": {0: {"step": torch.tensor(3.0), "exp_avg": plain}}})
    state = optimizer.state[weight]
    assert state["exp_avg"].stride() == weight.stride() and torch.equal(state["exp_avg"], plain)
    assert state["step"] == 3.0


# --- attention ---


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("attention", "fused"), [("auto", True), ("flash", True), ("math", False)])
def test_the_back_end_that_is_asked_for_attends(attention, fused):
    model = model_of({"attention": attention}, "sd2")
    batch = batch_of(model, 0)
    with Calls() as seen:
        model(batch)
    of_denoiser = sum("_scaled_dot_product_flash_attention_for_cpu" in name for name in seen.names)
    assert of_denoiser >= 32 if fused else of_denoiser <= 2  # the text encoder keeps torch's choice


@pytest.mark.parametrize(
    ("attention", "lengths", "chosen"),
    [
        ("cudnn", (4096, 4096), "cudnn"),
        ("cudnn", (256, 256), "cudnn"),
        ("cudnn", (4096, 77), "flash"),
        ("cudnn", (64, 64), "flash"),
        ("flash", (64, 77), "flash"),
        ("efficient", (4096, 77), "efficient"),
    ],
)
def test_cudnn_attends_where_each_of_its_versions_is_right(attention, lengths, chosen):
    assert speed.back_end_for(attention, lengths) == chosen


# --- activation checkpointing ---


@pytest.mark.parametrize(("fraction", "num"), [(0.0, 0), (0.25, 9), (0.5, 19), (1.0, 38)])
def test_a_fraction_of_the_blocks_is_computed_again(fraction, num):
    """22 residual and 16 transformer blocks of SD2's denoiser."""
    assert blocks.checkpoint_blocks(model_of({}, "sd2").denoiser, fraction) == num


def test_what_is_kept_for_the_backward_pass_falls_with_the_fraction_and_the_compute_of_an_image_does_not():
    config, ways = ModelConfig(family="shapes", preset="tiny"), dict(stage="moments", size=(32, 32), precision="fp32")
    costs = [
        cost.measure_cost(config, ObjectiveConfig(), **ways, gradient_checkpointing=fraction)
        for fraction in (0.0, 0.5, 1.0)
    ]
    kept = [cost.activation_gib_per_image for cost in costs]
    assert kept[0] > kept[1] > kept[2] > 0.0 and kept[2] < 0.4 * kept[0]
    assert len({cost.flops_per_image for cost in costs}) == 1


# --- whole runs ---


def run(folder: Path, name: str, *words: str) -> dict:
    own = [f"run_folder={folder}", f"run_name={name}", "data.synthetic=true", "data.stage=moments"]
    own += ["model.family=shapes", "image_size=32"]
    assert benchmark.main([*TINY_RUN, *own, *words]) == 0
    return json.loads((folder / name / "summary.json").read_text())


def losses(folder: Path, name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_checkpoint_that_was_written_with_the_keys_goes_on_without_them_and_the_other_way(tmp_path, capsys):
    fast = ["channels_last=true", "gradient_checkpointing=0.5", "attention=math"]
    save = ["save.every_images=16", "--use_ema", "measure.warmup_batches=0"]
    run(tmp_path, "unbroken", *save, "max_duration=4ba")
    for name, first, then in (("off", fast, []), ("on", [], fast)):
        run(tmp_path, name, *save, *first, "max_duration=2ba")
        assert run(tmp_path, name, *save, *then, "max_duration=4ba")["starts"] == 2
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "unbroken"), rel=1e-4)


@pytest.mark.usefixtures("quick_estimate")
def test_a_speed_is_that_of_the_keys_which_the_summary_names(tmp_path, capsys):
    """The first start's windows, without the keys, are no windows of the second."""
    plain = ["measure.warmup_batches=0", "measure.window_batches=1", "save.every_images=8"]
    run(tmp_path, "a", *plain, "max_duration=4ba")
    assert run(tmp_path, "a", *plain, "max_duration=5ba")["windows"] == 5
    for number, keys in enumerate(
        (["channels_last=true"], ["channels_last=true", "device_train_microbatch_size=4"]), 6
    ):
        summary = run(tmp_path, "a", *plain, *keys, f"max_duration={number}ba")
        assert (summary["windows"], summary["batches"]) == (1, number)


@pytest.mark.usefixtures("quick_estimate")
def test_the_summary_names_the_keys_and_the_time_of_the_first_step(tmp_path, capsys):
    summary = run(tmp_path, "a", "gradient_checkpointing=0.25", "channels_last=true")
    assert (summary["compile"], summary["gradient_checkpointing"], summary["channels_last"]) == ("off", 0.25, True)
    assert summary["first_step_seconds"] > 0.0 and summary["compiled_graphs"] is None


@pytest.mark.slow
def test_a_compiled_run_with_evaluations_compiles_nothing_twice(tmp_path, capsys, graphs_alone):
    prompts = tmp_path / "prompts.tsv"
    prompts.write_text("image_id\tid\tcaption\n" + "".join(f"{n}\t{n}\ta red square {n}\n" for n in range(1, 6)))
    words = ["compile=whole", "eval.when=in_training", f"eval.prompts={prompts}", "eval.steps=3", "eval.batch_size=2"]
    words += ["eval.every_images=16", "eval.clip=random", "max_duration=6ba", "save.every_images=0", "--use_ema"]
    summary = run(tmp_path, "a", *words)
    assert (summary["compiled_graphs"], summary["batches"]) == (6, 6)


# --- what cannot be ---


def refused(capsys, *words: str) -> list[str]:
    assert benchmark.main([*TINY_RUN, "data.synthetic=true", *words]) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["attention=cudnn"],
            "attention: cudnn needs a GPU. Possible on a CPU: auto, flash, math.",
        ),
        (
            ["attention=xformers"],
            "attention: xformers needs a GPU. Possible on a CPU: auto, flash, math.",
        ),
        (
            ["compile_mode=max-autotune"],
            "compile_mode: max-autotune, but compile=off. Say compile=whole.",
        ),
        (
            ["cudnn_benchmark=true"],
            "cudnn_benchmark: true needs a GPU. Leave it out on a CPU.",
        ),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_starts(capsys, words, text):
    assert refused(capsys, *words) == [text]


def test_xformers_that_does_not_load_is_named_without_an_import(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").write_text("raise SystemExit('it was imported')")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for theirs, cuda, said in (
        (
            "2.1.0+cu128",
            1300,
            "does not load: it is built for torch 2.1.0+cu128, here is 2.10.0+cu130.",
        ),
        (
            "2.10.0+cu128",
            1208,
            "does not load: it is built for torch 2.10.0+cu128, here is 2.10.0+cu130.",
        ),
        ("2.10.0+cu130", 1300, None),
        ("2.10.0", 1305, None),
    ):
        (tmp_path / "cpp_lib.json").write_text(json.dumps({"version": {"cuda": cuda, "torch": theirs}}))
        assert speed.attention_problem("xformers", "bf16", True) == (said and f"{said} Use attention=auto.")


def test_what_a_gpu_lacks_for_an_attention_is_said(monkeypatch):
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
    assert speed.attention_problem("xformers", "bf16", True).startswith("is not installed: it has no release for every")
    for attention in ("flash", "cudnn"):
        said = speed.attention_problem(attention, "fp32", True)
        assert said == "computes in 16 bits, the run in fp32. Use precision=bf16, or attention=efficient."


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
def test_on_an_amd_gpu_miopen_is_told_of_channels_last(monkeypatch, hip):
    monkeypatch.delenv("PYTORCH_MIOPEN_SUGGEST_NHWC", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    speed.use_channels_last(SimpleNamespace(denoiser=Small(), frozen={}, memory_format=torch.contiguous_format))
    assert os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") == (hip and "1")
    monkeypatch.delenv("PYTORCH_MIOPEN_SUGGEST_NHWC", raising=False)


def test_a_back_end_that_fails_on_this_gpu_is_named_with_its_reason(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no kernel image is available.\nCUDA kernel errors might be")

    monkeypatch.setattr(speed.torch, "zeros", lambda *shape, device, **more: torch.ones(*shape, **more))
    monkeypatch.setattr(speed.nn.functional, "scaled_dot_product_attention", fail)
    said = speed.attention_problem("cudnn", "bf16", True)
    assert said == "does not run on this GPU (no kernel image is available). Use attention=auto."


def test_graphs_of_cuda_want_one_compiled_graph(capsys):
    said = refused(capsys, "cuda_graphs=true")
    assert said[0] == (
        "cuda_graphs: true, but compile=off, which has several graphs. Say compile=whole, or leave it out."
    )


@pytest.mark.parametrize("microbatch", ["4", "auto"])
def test_graphs_of_cuda_want_the_device_batch_in_one_pass(capsys, microbatch):
    said = refused(capsys, "cuda_graphs=true", "compile=whole", f"device_train_microbatch_size={microbatch}")
    assert said[0] == (
        f"cuda_graphs: true, but device_train_microbatch_size={microbatch}: a graph's gradients cannot be added to those of "
        "another pass (pytorch issue 169545). Leave out one of the two: the microbatch is then the device batch."
    )
    one_pass = refused(capsys, "cuda_graphs=true", "compile=whole", "device_train_microbatch_size=8")
    assert one_pass == ["cuda_graphs: true needs a GPU. Leave it out on a CPU."]


def test_what_is_given_to_a_graph_of_cuda_or_kept_from_it_is_no_graphs_own(monkeypatch):
    compiled = {}
    monkeypatch.setattr(nn.Module, "compile", lambda module, **ways: compiled.update({module: ways["options"]}))
    model = model_of({}, "sd2")
    speed.apply(model, SpeedKeys(compile="whole", cuda_graphs=True), None)
    assert compiled.pop(model.denoiser) == {"triton.cudagraphs": True}
    assert len(compiled) == 3 and not any(compiled.values())  # text encoder, both halves of the autoencoder
    kept = torch.zeros(1)
    monkeypatch.setattr(type(model.family), "denoise", lambda *_: kept)
    assert model._denoise(torch.zeros(1, 4, 8, 8), torch.zeros(1), {}) is not kept


def test_a_missing_compiler_is_named(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = "Install it, set CXX, or say compile=off."
    start = "compile: whole needs a C++ compiler, and there is no"
    assert refused(capsys, "compile=whole") == [f"{start} 'no-such-compiler'. {said}"]
    monkeypatch.delenv("CXX")  # inductor does not look for another one than g++
    monkeypatch.setattr(speed.shutil, "which", lambda name: None if name == "g++" else f"/usr/bin/{name}")
    assert refused(capsys, "compile=whole") == [f"{start} 'g++'. {said}"]
