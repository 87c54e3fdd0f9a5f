"""How a step is computed: memory format, attention back-end, activation checkpointing, compilation.

`apply` changes a model's networks once, in place, before the optimizer is built. Names in the state dict do not change, so
a checkpoint fits with any of these keys on or off. Results change only by rounding (tests/test_speed.py).

Layouts: NCHW is (B, C, H, W) with W fastest, NHWC is the same tensor with C fastest ("channels_last").
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import getpass
import importlib.util
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from common.errors import ConfigError
from common.log import EVERY_RANK, log
from common.private_api import require_private_api
from common.value_types import limited
from families.spec import transformer_blocks

Attention = Literal["auto", "flash", "cudnn", "efficient", "math", "xformers"]
BACKEND = "inductor"  # tests that count graphs use aot_eager, which compiles no kernels
BACK_ENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_A_CPU = ("auto", "flash", "math")
ON_A_GPU = ("cuda_graphs", "cudnn_benchmark")
NOT_COMPILED = {"compile": "off", "compile_mode": "default", "cuda_graphs": False}
IN_16_BITS = ("flash", "cudnn")  # on a GPU they do not support float32
# cuDNN before 9.15.1 reads out of bounds if a length is not a multiple of this (pytorch issue 169849).
CUDNN_LENGTH = 128
# Limits on graphs. A whole network: training, and each batch size tried for evaluation. Blocks: one per shape, too.
GRAPHS_OF_WHOLE, GRAPHS_OF_BLOCKS = 16, 128

LIMITS = ("config.fail_on_recompile_limit_hit", "config.recompile_limit", "config.optimize_ddp", "utils.counters")
require_private_api("torch._dynamo", *LIMITS, why="compile: graphs are counted, and too many are an error")


@dataclass(frozen=True)
class SpeedKeys:
    """How a step is computed: speed and memory."""

    compile: Literal["off", "whole", "blocks"] = "off"
    """torch.compile. whole: the denoiser as one graph. blocks: block by block, which compiles faster."""
    compile_mode: Literal["default", "max-autotune"] = "default"
    """max-autotune: choose kernels by trial; starts minutes later."""
    cuda_graphs: bool = False
    """Replay kernels from CUDA graphs, for small batches. Needs compile=whole."""
    channels_last: bool = False
    """Use NHWC tensors for convolutions."""
    attention: Attention = "auto"
    """Attention kernel. auto: cudnn on NVIDIA GPUs without masks, else torch's choice; float32 on a CPU, unless compiled."""
    gradient_checkpointing: float = limited(0.0, 0.0, 1.0)
    """Fraction of the denoiser's blocks that are recomputed in the backward pass."""
    sharding: Literal["off", "full", "hybrid"] = "off"
    """Shard weights, gradients and optimizer states: full over all ranks, hybrid within each machine."""
    async_loss: bool = False
    """Read each loss while the next batch is computed."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms at the first step."""

    def problems_of_speed(self, precision: str | None) -> list[tuple[str, str]]:
        """(key, message) for every invalid value, on this machine.

        Args:
            precision: of the run; None: the device's own, bf16 on a GPU.
        """
        is_gpu = torch.cuda.is_available()
        problems = []
        if not is_gpu and precision in ("fp16", "tf32"):
            problems.append(("precision", f"{precision} needs a GPU. Possible on a CPU: fp32, bf16, bf16_params."))
        if self.compile == "off" and self.compile_mode != "default":
            problems.append(("compile_mode", f"{self.compile_mode}, but compile=off. Set compile=whole."))
        if self.compile != "off" and (text := compiler_problem(is_gpu)):
            problems.append(("compile", f"{self.compile} {text}"))
        if self.cuda_graphs and self.compile != "whole":
            text = f"true, but compile={self.compile}, which has several graphs. Set compile=whole, or leave it out."
            problems.append(("cuda_graphs", text))
        wanted = [key for key in ON_A_GPU if getattr(self, key) and not is_gpu]
        problems += [(key, "true needs a GPU. Leave it out on a CPU.") for key in wanted]
        if text := attention_problem(self.attention, precision, is_gpu):
            problems.append(("attention", f"{self.attention} {text}"))
        elif self.attention == "xformers" and self.compile != "off":
            text = f"xformers: its operators break the graph of compile={self.compile}. Use attention=auto, or compile=off."
            problems.append(("attention", text))
        return problems


def values_of(keys: SpeedKeys) -> dict[str, Any]:
    """Return the keys of speed and their values, for a record."""
    return {key.name: getattr(keys, key.name) for key in dataclasses.fields(SpeedKeys)}


OF_TRAINING = ("gradient_checkpointing", "sharding", "async_loss")
"""The keys that do not affect an evaluation."""


def compiler_problem(is_gpu: bool) -> str | None:
    """Say what torch.compile lacks here, or None."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as inductor chooses it
    if not shutil.which(compiler):
        return f"needs a C++ compiler, and there is no '{compiler}'. Install it, set CXX, or set compile=off."
    if is_gpu and importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed. pip install triton, or set compile=off."
    return None


def xformers_problem() -> str | None:
    """Say why xformers' kernels do not load, or None. Its version file tells; an import would print six lines."""
    spec = importlib.util.find_spec("xformers")
    if spec is None or spec.origin is None:
        return "is not installed: it has no release for every torch. Use attention=auto."
    built = json.loads(Path(spec.origin).with_name("cpp_lib.json").read_text())["version"]
    its_cuda, own_cuda = int(built["cuda"] or 0) // 100, int((torch.version.cuda or "0").partition(".")[0])
    if built["torch"].partition("+")[0] == torch.__version__.partition("+")[0] and its_cuda == own_cuda:
        return None
    return f"does not load: it is built for torch {built['torch']}, here is {torch.__version__}. Use attention=auto."


def resolve_attention(attention: Attention, precision: str | None, *, has_mask: bool) -> Attention:
    """Return the attention kernel that `auto` stands for on this machine; `auto` itself stands for torch's choice.

    Args:
        has_mask: the family's attention takes a mask, for which cuDNN has no kernel.
    """
    # ROCm has no cuDNN; torch chooses AOTriton's flash attention there.
    if attention != "auto" or has_mask or not torch.cuda.is_available() or torch.version.hip is not None:
        return attention
    return "auto" if attention_problem("cudnn", precision, is_gpu=True) else "cudnn"


def attention_problem(attention: str, precision: str | None, is_gpu: bool) -> str | None:
    """Say why an attention back-end is not possible here, or None. On a GPU it is tried on a small input."""
    if attention == "auto":
        return None
    if not is_gpu:
        if attention in ON_A_CPU:
            return None
        return f"needs a GPU. Possible on a CPU: {', '.join(ON_A_CPU)}."
    if attention == "xformers":
        return xformers_problem()
    if attention in IN_16_BITS and precision not in (None, "bf16", "fp16", "bf16_params"):
        return f"computes in 16 bits, the run in {precision}. Use precision=bf16, or attention=efficient."
    dtype = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}.get(precision or "", torch.bfloat16)
    numbers = torch.zeros(1, 2, CUDNN_LENGTH, 64, device="cuda", dtype=dtype, requires_grad=True)
    try:
        with sdpa_kernel(BACK_ENDS[attention]):
            nn.functional.scaled_dot_product_attention(numbers, numbers, numbers).sum().backward()
    except RuntimeError as error:
        return f"does not run on this GPU ({str(error).splitlines()[0].rstrip('.')}). Use attention=auto."
    return None


class SpeedModel(Protocol):
    """The interface of a model for `apply`, e.g. `model.LatentDiffusion`."""

    denoiser: nn.Module
    autocast_dtype: torch.dtype | None
    memory_format: torch.memory_format
    replays_graphs: bool

    @property
    def frozen(self) -> Mapping[str, nn.Module]: ...


def apply(model: SpeedModel, keys: SpeedKeys, *, num_sizes: int = 1) -> None:
    """Change a model's networks as the keys say. Call it once, on their device, before the optimizer is built.

    Args:
        num_sizes: of images in training; each has separate graphs.
    """
    if keys.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if keys.channels_last:
        use_channels_last(model)
    is_float32 = attends_in_float32(keys, model.autocast_dtype)
    if is_float32 or keys.attention != "auto":
        for attention in attentions(model.denoiser):
            kind: Any = type(attention.processor)
            attention.processor = attention_processor("float32" if is_float32 else keys.attention, kind)
    checkpoint_blocks(model.denoiser, keys.gradient_checkpointing)
    if keys.compile != "off":
        compile_networks(model, keys, num_sizes)


# --- memory format ---


def use_channels_last(model: SpeedModel) -> None:
    """Use NHWC for weights, inputs and all tensors between the denoiser's convolutions.

    diffusers 0.39 returns to NCHW at the end of each transformer, and in training at each shortcut of a residual block.
    So the classes of these layers in this model are replaced. Names do not change, and other models are not affected.
    """
    model.memory_format = torch.channels_last
    if torch.version.hip is not None:
        # Without it torch converts each input to NCHW for MIOpen (pytorch pull request 63617).
        os.environ.setdefault("PYTORCH_MIOPEN_SUGGEST_NHWC", "1")
    for network in (model.denoiser, *model.frozen.values()):
        if any(parameter.dim() == 5 for parameter in network.parameters()):
            continue  # an autoencoder of videos, as Qwen-Image has one
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types leave it out
    from diffusers.models import Transformer2DModel

    for module in model.denoiser.modules():
        if type(module) is Transformer2DModel:
            module.__class__ = _nhwc_transformer()
        elif type(module) is nn.Conv2d:
            module.__class__ = NhwcConv2d


class NhwcConv2d(nn.Conv2d):
    """A convolution that converts its input to NHWC."""

    def forward(self, input: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C', H', W')
        return super().forward(input.contiguous(memory_format=torch.channels_last))


@functools.cache
def _nhwc_transformer() -> type[nn.Module]:
    """Return diffusers' transformer on images, without the copy to NCHW at its end."""
    from diffusers.models import Transformer2DModel

    require_private_api(
        Transformer2DModel, "_get_output_for_continuous_inputs", why="channels_last: its end stays in NHWC"
    )

    class NhwcTransformer2DModel(Transformer2DModel):
        def _get_output_for_continuous_inputs(
            self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
        ) -> Tensor:
            # (B, H W, C) is already an image in NHWC: a view is enough. The projection is a linear layer (before the
            # view) or a 1 x 1 convolution (after it).
            if self.use_linear_projection:
                hidden_states = self.proj_out(hidden_states)
            image = hidden_states.unflatten(1, (height, width)).movedim(-1, 1)
            return (image if self.use_linear_projection else self.proj_out(image)) + residual

    return NhwcTransformer2DModel


# --- attention ---


def attends_in_float32(keys: SpeedKeys, autocast_dtype: torch.dtype | None) -> bool:
    """True where a CPU in bf16 computes attention in float32, since torch's backward pass in bf16 is slow there.

    Not in a compiled network: dynamo of torch 2.10 cannot trace Float32Attention around FLUX.1's attention.
    """
    is_free = keys.attention == "auto" and keys.compile == "off"
    return is_free and autocast_dtype == torch.bfloat16 and not torch.cuda.is_available()


def attentions(denoiser: nn.Module) -> list[Any]:
    """Return a denoiser's attention layers, each with its `processor`; not every class of diffusers lists them itself."""
    return [module for module in denoiser.modules() if hasattr(module, "processor")]


@functools.cache
def attention_processor(attention: str, theirs: Any) -> Any:
    """Return a diffusers attention processor for one back-end, or float32. `theirs`: the class that the network has."""
    from diffusers.models.attention_processor import AttnProcessor2_0, XFormersAttnProcessor

    if attention == "xformers":
        if theirs is not AttnProcessor2_0:
            raise ConfigError(["attention: xformers has no kernel for this network in diffusers. Use attention=auto."])
        return XFormersAttnProcessor()

    class ChosenAttention(theirs):
        @functools.wraps(theirs.__call__)  # diffusers looks there for what a processor takes, and leaves out the rest
        def __call__(
            self,
            attn: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor | None = None,
            *rest: Any,
            **more: Any,
        ) -> Tensor:
            text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
            own = hidden_states.shape[1]
            # Where image and text attend to each other, the sum of their lengths is a multiple if both are.
            back_end = back_end_for(attention, (own, text or own))
            with Float32Attention() if back_end == "float32" else sdpa_kernel(BACK_ENDS[back_end]):
                return super().__call__(attn, hidden_states, encoder_hidden_states, *rest, **more)

    return ChosenAttention()


class Float32Attention(TorchFunctionMode):
    """Computes attention in float32, forward and backward, also under a CPU's autocast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))

        def wide(value: Any) -> Any:
            return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

        with torch.autocast("cpu", enabled=False):
            return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def back_end_for(attention: str, lengths: tuple[int, int]) -> str:
    """Return the back-end for these numbers of queries and keys: cudnn only where all its versions are correct."""
    if attention == "cudnn" and any(length % CUDNN_LENGTH for length in lengths):
        return "flash"
    return attention


# --- compilation ---


def compile_networks(model: SpeedModel, keys: SpeedKeys, num_sizes: int = 1) -> None:
    """Compile denoiser and encoders in place, for training, evaluation and sampling; names do not change.

    Shapes are static: at a second shape inductor would make the graph dynamic, which also turns off its NHWC pass. If a
    function has too many graphs, dynamo would fall back to eager with a warning; here that is an error.
    """
    import torch._dynamo

    if BACKEND == "inductor":
        remove_unfinished_libraries()
        log.info("compile: the first step compiles the network, which takes minutes.")
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = num_sizes * (
        GRAPHS_OF_WHOLE if keys.compile == "whole" else GRAPHS_OF_BLOCKS
    )
    if keys.gradient_checkpointing > 0.0:
        # dynamo splits graphs at the ends of DDP's buckets, which fails inside dynamo with checkpointed blocks.
        torch._dynamo.config.optimize_ddp = False
    model.replays_graphs = keys.cuda_graphs
    for part in denoiser_parts(model.denoiser, keys.compile):
        arguments = _compile_arguments(keys)
        if keys.sharding == "off":
            part.compile(fullgraph=True, **arguments)
        else:  # weights are gathered and freed around the graph, not in it
            part.forward = torch.compile(part.forward, fullgraph=True, **arguments)
    # No CUDA graphs here: the denoiser's input would be a graph's memory, which torch refuses (pytorch issue 152887).
    without_graphs = dataclasses.replace(keys, cuda_graphs=False)
    for network in model.frozen.values():
        for part in _frozen_parts(network):
            part.compile(**_compile_arguments(without_graphs))


def _compile_arguments(keys: SpeedKeys) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dynamic": False, "backend": BACKEND}
    return {**arguments, "options": inductor_options(keys) or None} if BACKEND == "inductor" else arguments


def inductor_options(keys: SpeedKeys) -> dict[str, Any]:
    """Return inductor's settings for these keys."""
    options: dict[str, Any] = {}
    if keys.compile_mode == "max-autotune":
        options |= {"max_autotune": True, "coordinate_descent_tuning": True}
    if keys.channels_last:
        # Without it the NHWC pass skips this type of network, because some convolutions have few output channels.
        options["force_layout_optimization"] = True
    if keys.cuda_graphs:
        options["triton.cudagraphs"] = True
    return options


def _frozen_parts(network: nn.Module) -> list[nn.Module]:
    """Return the parts of a frozen network that are compiled; an autoencoder is called by its halves."""
    halves = [getattr(network, name, None) for name in ("encoder", "decoder")]
    return [half for half in halves if isinstance(half, nn.Module)] if all(halves) else [network]


def num_graphs() -> int:
    """Return the number of graphs that dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


# --- A denoiser's blocks ---


def blocks_of(denoiser: nn.Module, of_unet: type[nn.Module] | None = None) -> list[nn.Module]:
    """Return a denoiser's residual blocks, its UNet's transformers, and the blocks of a transformer.

    Args:
        of_unet: which transformers of a UNet; None: diffusers' Transformer2DModel, which holds several blocks.
    """
    from diffusers.models import Transformer2DModel
    from diffusers.models.resnet import ResnetBlock2D

    own = Transformer2DModel if of_unet is None else of_unet
    matches = [module for module in denoiser.modules() if isinstance(module, (ResnetBlock2D, own))]
    return matches or transformer_blocks(denoiser)


def denoiser_parts(denoiser: nn.Module, how: str) -> list[nn.Module]:
    """Return the parts of a denoiser that are compiled one by one: all of it, or its residual blocks and transformers."""
    return [denoiser] if how == "whole" else blocks_of(denoiser)


def checkpoint_blocks(denoiser: nn.Module, fraction: float) -> int:
    """Recompute a fraction of the denoiser's blocks in the backward pass; return their number.

    Blocks are residual blocks and transformer blocks. The chosen ones are spread evenly: the first and the last are the
    largest. We replace their classes and do not use diffusers' own switch: that one wraps the call from outside the
    compiled block (compile=blocks), where dynamo does not see it.
    """
    if fraction <= 0.0:
        return 0
    from diffusers.models.attention import BasicTransformerBlock

    blocks: list[Any] = blocks_of(denoiser, BasicTransformerBlock)
    chosen = [block for n, block in enumerate(blocks) if int((n + 1) * fraction) > int(n * fraction)]
    for block in chosen:
        block.__class__ = _checkpointed(block.__class__)
    return len(chosen)


@functools.cache
def _checkpointed(block: Any) -> type[nn.Module]:  # block: a class of modules
    class CheckpointedBlock(block):
        def forward(self, *args: Any, **more: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args, **more)
            return checkpoint(super().forward, *args, use_reentrant=False, **more)

    CheckpointedBlock.__name__ = f"CheckpointedBlock{block.__name__}"
    return CheckpointedBlock


# --- inductor's cache on disk ---
#
# torch 2.10 has g++ write each library to its final name (`CppBuilder.build`), and never looks at one that is there
# (`_worker_compile_cpp`). If the process was killed then, every later start ends with "file too short" or
# "invalid ELF header". A probe of the CPU's vector instructions that is cut off is worse: it counts as "not supported",
# and the kernels are slow without a word.


def remove_unfinished_libraries() -> None:
    """Remove the libraries that are cut off; inductor builds them again. Each rank calls it before it compiles.

    Inductor's lock of a library is held during that. A library whose lock another process holds is skipped.
    """
    # torch's own default: https://docs.pytorch.org/docs/2.10/user_guide/torch_compiler/torch.compiler_faq.html
    cache_dir = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folder = Path(cache_dir or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    for path in folder.rglob("*.so"):
        if _is_whole(path):
            continue
        with contextlib.suppress(OSError):  # held, another user's, or removed by another rank
            (folder / "locks").mkdir(exist_ok=True)
            with FileLock(folder / "locks" / f"{path.name.partition('.')[0]}.lock", timeout=0):
                if not _is_whole(path):
                    path.unlink()
                    text = f"{path} was cut off when an earlier process was killed. It is removed, and compiled again."
                    log.warning(f"compile: {text}", extra=EVERY_RANK)


def _is_whole(library: Path) -> bool:
    """True for an ELF file with its table of sections, which linkers write last; True where it cannot be read."""
    try:
        size = library.stat().st_size
        with open(library, "rb") as file:
            header = file.read(64)
    except OSError:
        return True
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (table,), (entry_bytes, num_entries) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(table + entry_bytes * num_entries <= size)
