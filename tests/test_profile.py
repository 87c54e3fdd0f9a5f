"""callbacks/profile.py and profile_table.py: what is recorded, as what kind each piece counts, and that the kinds add up."""

from __future__ import annotations

import gzip
import json
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_RUN

import benchmark
from callbacks.profile import Profile, ProfileConfig
from callbacks.throughput import MeasureConfig, Throughput
from config import flat
from record import profile_table
from record.profile_table import Piece, counted, kind_of_kernel, kind_of_operator, tabulate
from training.adamw import UPDATE, SmallAdamW

pytestmark = [pytest.mark.timeout(120, func_only=True), pytest.mark.usefixtures("quick_estimate")]

# --- each moment counts once ---


def test_what_counts_equals_a_count_of_each_microsecond():
    draw = random.Random(1)
    for _ in range(50):
        begin, end = 10, 70
        pieces = []
        for at in range(draw.randrange(1, 12)):
            start = draw.randrange(0, 80)
            pieces.append(Piece(str(at), "other", start, start + draw.randrange(1, 20), draw.random() < 0.4))
        wanted = [0] * len(pieces)
        for moment in range(begin, end):
            running = [p for p in pieces if p.start <= moment < p.end]
            if running:  # in front before the background, then who began first, then who ends first
                first = min(running, key=lambda p: (p.in_background, max(p.start, begin) > moment, p.start, p.end))
                wanted[pieces.index(first)] += 1
        found = counted(pieces, begin, end)
        for in_background in (False, True):
            mine = [at for at, p in enumerate(pieces) if p.in_background == in_background]
            assert sum(found[at] for at in mine) == sum(wanted[at] for at in mine)
        assert sum(found) == sum(wanted)


def step(start: float, dur: float) -> dict:
    return {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": start, "dur": dur}


def event(cat: str, name: str, start: float, dur: float, number: int | None = None) -> dict:
    place = {"pid": 1, "tid": 1} if cat == "cpu_op" else {"pid": 0, "tid": 7}
    return {"ph": "X", "cat": cat, "name": name, **place, "ts": start, "dur": dur, "args": {"External id": number}}


ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >"
)


def test_a_gpu_s_idle_time_is_the_steps_without_any_kernel_and_a_hidden_copy_costs_nothing():
    trace = [
        step(0, 1000),
        event("cpu_op", "aten::native_group_norm_backward", 0, 100, 1),
        event("cpu_op", "aten::sum", 10, 20, 2),
        event("cpu_op", "aten::add", 200, 20, 3),
        event("kernel", "nvjet_tst_128x24_64x11_2x1_v_bz_TNT", 100, 200, 4),
        event("kernel", ELEMENTWISE, 300, 50, 2),  # launched inside the norm
        event("kernel", ELEMENTWISE, 350, 50, 3),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 150, 300, 5),  # 250 of it beside kernels
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 900, 300, 6),
    ]
    table = tabulate(trace)
    found = {kind: row["ms_per_step"] for kind, row in table["kinds"].items() if row["ms_per_step"]}
    assert found == pytest.approx(
        {"matrix_product": 0.2, "norm": 0.05, "pointwise": 0.05, "copy": 0.05, "communication": 0.1, "idle": 0.55}
    )
    assert table["of"] == "kernels" and table["step_ms"] == 1.0
    assert table["top"][0]["name"].startswith("nvjet") and table["top"][0]["calls_per_step"] == 1


def test_a_trace_without_a_step_has_no_table():
    with pytest.raises(ValueError, match="no recorded step"):
        tabulate([event("cpu_op", "aten::add", 0, 1)])


# --- kinds of kernels: names as public reports print them ---

NAMES = {
    "convolution": [
        # NVIDIA/TensorRT issue 3583
        "xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1_g1",
        # pytorch/pytorch issue 34977
        "void wgrad2d_grouped_direct_kernel<__half, float, float, cudnnTensorFormat_t=1>(cudnnTensorStruct, __half const *)",
        "void conv2d_grouped_direct_kernel<__half, __half, __half, float, float, bool=1, bool=0, int=1>(cudnnTensorStruct)",
        # apache/mxnet issue 14684
        "void cudnn::detail::implicit_convolve_sgemm<float, float, int=512, int=6, int=8, int=3, int=3, int=5>",
        "void cudnn::detail::dgrad2d_alg1_1<float, int=0, int=6, int=7, int=5, int=4, int=5, bool=0, bool=1>(int, int)",
        "volta_scudnn_128x128_stridedB_splitK_xregs_large_nn_v1",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x64x8_wt64x16x4_ws1x1_wr2x2",  # AMD's MIOpen
    ],
    "matrix_product": [
        "nvjet_tst_128x24_64x11_2x1_v_bz_TNT",  # sgl-project/sglang pull request 22353
        "nvjet_tst_64x24_64x16_4x1_v_bz_splitK_TNT",
        "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn",  # karpathy/nanochat pull request 105
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8",  # TensorRT 3583
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1",  # neuralmagic/nm-vllm 332
        "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1",  # AMD's hipBLASLt
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128_4x1x1_kernel0_0",  # meta-pytorch/tritonbench issue 41
        # pytorch/pytorch, the kernels of its FlashAttention and of its memory-efficient attention
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        *("attn_fwd", "bwd_kernel_dk_dv", "bwd_kernel_dq", "bwd_preprocess"),  # AMD's AOTriton
    ],
    "norm": [
        # pytorch/pytorch, aten/src/ATen/native/cuda/group_norm_kernel.cu and layer_norm_kernel.cu
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float, float const*, float*, float*)",
        "void at::native::(anonymous namespace)::ComputeInternalGradientsCUDAKernel<float>(long, float const*)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel1<float>(long, long, long)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
        "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*)",  # neuralmagic/nm-vllm pull request 332
        # names that torch.compile gives: the operators that were fused
        "triton_red_fused_native_group_norm_backward_2",
        "triton_per_fused_add_native_layer_norm_7",
        "triton_poi_fused_convolution_native_group_norm_silu_12",
    ],
    "optimizer": [
        # pytorch/pytorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh, fused_adam_utils.cuh, ForeachReduceOp.cu
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
    ],
    "copy": [
        # pytorch/pytorch issue 54324
        "void nchwToNhwcKernel<__half, __half, float, true, true, (cudnnKernelDataType_t)0>(int, int, int)",
        "void cudnn::ops::genericTranspose_kernel<float, __half, float, true, (cudnnKernelDataType_t)0>",
        "void at::native::unrolled_elementwise_kernel<at::native::copy_device_to_device(at::TensorIterator&, bool)>",
        # sgl-project/sglang pull request 22353
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>",
        # vllm-project/vllm-omni pull request 553
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>>",
        "triton_poi_fused__to_copy_clone_4",
    ],
    "communication": ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],  # NCCL's own name
    "pointwise": [
        ELEMENTWISE,
        # vllm-project/vllm-omni pull request 553, neuralmagic/nm-vllm pull request 332
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>",
        "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned int, 2, 2, -2>",
        "triton_poi_fused_gelu_mul_9",
        "triton_poi_fused_convolution_3",  # adds its bias: the convolution itself is a kernel of its own
    ],
    "other": ["void somebody::else_s_kernel<float>(float*)"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernel_s_name_says_its_kind(kind, name):
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        ("norm", ["autograd::engine::evaluate_function: NativeGroupNormBackward0", "aten::native_group_norm_backward"]),
        ("convolution", ["aten::convolution", "aten::cudnn_convolution", "aten::add_"]),
        ("optimizer", ["Optimizer.step#AdamW.step", "aten::_foreach_norm", "aten::add"]),
        ("optimizer", ["Optimizer.step#SmallAdamW.step", UPDATE, "aten::lerp_"]),
        ("pointwise", ["Optimizer.step#AdamW.step", "aten::add"]),  # Composer takes the whole step in it
    ],
)
def test_a_kernel_whose_name_says_nothing_belongs_to_what_launched_it(kind, around):
    assert kind_of_kernel(ELEMENTWISE, around) == kind
    assert kind_of_kernel("nchwToNhwcKernel", around) == ("optimizer" if kind == "optimizer" else "copy")


# --- kinds of operators: known work, recorded ---


def test_what_moves_no_number_is_told_from_what_computes():
    assert [kind_of_operator(f"aten::{name}") for name in ("gelu_backward", "add_", "embedding")] == ["pointwise"] * 3
    engine = "autograd::engine::evaluate_function: GeluBackward0"
    assert [kind_of_operator(name) for name in (engine, "GeluBackward0", "aten::view", "aten::t")] == ["other"] * 4


def record(tmp_path, work) -> dict:
    """Profile two calls of some work after one that warms up; return the table."""
    path = tmp_path / "trace.json.gz"
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,  # else torch 2.11 warns
    ) as profiler:
        for _ in range(3):
            work()
            profiler.step()
    with gzip.open(path, "rt") as file:
        return tabulate(json.load(file)["traceEvents"])


def known_work() -> dict:
    big, square = torch.randn(8, 32, 64, 64), torch.randn(700, 700)
    # Not a leaf of its own history: backward reaches it alone.
    wants, weight = big.clone().requires_grad_(), torch.randn(32, 32, 3, 3, requires_grad=True)
    states, layers = torch.randn(2, 4, 512, 64), [torch.nn.Linear(1000, 1000) for _ in range(4)]
    parameters = [p for layer in layers for p in layer.parameters()]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return {
        "convolution": lambda: F.conv2d(big, weight, padding=1).sum().backward(),
        "matrix_product": lambda: F.linear(square, square).relu(),
        "attention": lambda: F.scaled_dot_product_attention(states, states, states),
        "norm": lambda: F.group_norm(wants, 8).sum().backward(),
        "optimizer": optimizer.step,
        "pointwise": lambda: [F.gelu(big) for _ in range(3)],
        "copy": lambda: [big.contiguous(memory_format=torch.channels_last) for _ in range(3)],
    }


@pytest.mark.parametrize(
    "kind", ["convolution", "matrix_product", "attention", "norm", "optimizer", "pointwise", "copy"]
)
def test_known_work_is_counted_as_its_kind_and_the_kinds_add_up(tmp_path, kind):
    table = record(tmp_path, known_work()[kind])
    work = {name: row["ms_per_step"] for name, row in table["kinds"].items() if name not in ("idle", "other")}
    assert work[kind] > 0.0
    assert table["steps"] == 2 and table["of"] == "operators"
    assert sum(row["ms_per_step"] for row in table["kinds"].values()) == pytest.approx(table["step_ms"], rel=1e-9)
    assert sum(row["frac"] for row in table["kinds"].values()) == pytest.approx(1.0)
    assert all(row["ms_per_step"] >= -1e-9 for row in table["kinds"].values())


def test_all_that_small_adamw_computes_is_the_optimizers(tmp_path):
    weight = torch.nn.Parameter(torch.randn(100, 100).bfloat16())
    weight.grad = torch.ones_like(weight)
    optimizer = SmallAdamW([{"params": [weight]}], lr=0.1, betas=(0.9, 0.99), eps=1e-8, states="bf16")
    kinds = record(tmp_path, optimizer.step)["kinds"]
    assert {kind for kind, row in kinds.items() if row["calls_per_step"]} <= {"optimizer", "other"}
    assert kinds["optimizer"]["calls_per_step"] > 10


def test_time_of_an_operator_is_without_that_of_those_inside_it(tmp_path):
    """Against the profiler's own figures."""
    x, weight = torch.randn(4, 16, 32, 32), torch.randn(16, 16, 3, 3)
    trace = tmp_path / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        F.group_norm(F.conv2d(x, weight), 4)
    profiler.export_chrome_trace(str(trace))
    mine: dict[str, float] = {}
    for piece in profile_table.pieces_of(json.loads(trace.read_text())["traceEvents"]):
        mine[piece.name] = mine.get(piece.name, 0.0) + piece.end - piece.start
    theirs = {row.key: row.self_cpu_time_total for row in profiler.key_averages()}
    assert mine == pytest.approx({name: theirs[name] for name in mine}, abs=0.01) and "aten::conv2d" in mine


# --- a run ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of eight batches of which the fourth and fifth are recorded."""
    folder = tmp_path_factory.mktemp("runs")
    words = [*TINY_RUN, "model.family=shapes", "image_size=32", "--use_synth_data", "max_duration=8ba"]
    words += ["measure.window_batches=1", f"run_folder={folder}"]
    assert benchmark.main([*words, "run_name=a", "profile.batches=2", "profile.start_batch=3"]) == 0
    return folder / "a"


def test_a_run_leaves_a_trace_and_a_table_of_the_steps_that_were_asked_for(run):
    with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert sum(each["name"].startswith("ProfilerStep#") for each in trace["traceEvents"]) == 2
    table = json.loads((run / "profile" / "table.json").read_text())
    about = table.pop("about")
    assert about["start"] == 1 and about["batches"] == [4, 5] and about["device"].startswith("CPU")
    assert {"commit", "async_loss", "compile", "device_train_microbatch_size"} <= about.keys()
    assert table == tabulate(trace["traceEvents"])
    assert table["steps"] == 2 and set(table["kinds"]) == set(profile_table.KINDS)
    assert sum(row["frac"] for row in table["kinds"].values()) == pytest.approx(1.0)
    assert all(
        table["kinds"][kind]["frac"] > 0.0
        for kind in ("convolution", "matrix_product", "attention", "norm", "optimizer")
    )
    assert [row["ms_per_step"] for row in table["top"]] == sorted(
        (r["ms_per_step"] for r in table["top"]), reverse=True
    )
    assert len(table["top"]) == profile_table.NUM_TOP
    head, text = (run / "profile" / "table.txt").read_text().split("\n\n", 1)
    assert text == profile_table.text(table) and "batches: [4, 5]" in head


def test_windows_of_recorded_batches_are_no_measured_ones(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["profiled"] for line in lines] == [False, False, True, True, True, False, False, False]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["batches"] == 8 and summary["windows"] == 3  # two of warming up, the profiler's own, two recorded
    speeds = sorted(line["images_per_sec"] for line in lines if not (line["warmup"] or line["profiled"]))
    assert summary["images_per_sec"] == pytest.approx(speeds[1], rel=1e-4)


def test_a_disturbed_window_is_written_and_not_counted():
    throughput = Throughput(MeasureConfig(), flops_per_image=1.0, peak=None)
    figures = dict(window_batches=10, train_sec=1.0, data_wait_sec=0.0, peak_mem_gib=1.0, images_per_sec_wall=1.0)
    line = {"warmup": False, "batch": 10, **figures}
    throughput.windows = [{**line, "profiled": True, "images_per_sec": 1.0}, {**line, "images_per_sec": 5.0}]
    assert throughput.result()["images_per_sec_min"] == 5.0  # lines of before the key was there have none


def test_a_run_that_ends_before_its_profile_says_so(tmp_path, capsys, stage):
    """Epochs are counted in batches only when the stage is read, so that the check of the configuration cannot know."""
    words = [*TINY_RUN, f"data.remote={stage}", "model.weights=random", "data.workers=0", "max_duration=1ep"]
    words += ["global_batch_size=48", "device_train_microbatch_size=8", f"run_folder={tmp_path}", "run_name=a"]
    assert benchmark.main([*words, "profile.batches=2", "measure.warmup_batches=0"]) == 0
    said = "profile: nothing was recorded: 1 batches were trained here, 3 would have been needed. Lower profile.start_batch."
    assert said in capsys.readouterr().err.splitlines()
    assert not (tmp_path / "a" / "profile" / "table.json").exists()


def test_a_start_too_short_for_its_profile_leaves_an_earlier_one_and_says_whose_it_is(tmp_path, capsys):
    profile = Profile(ProfileConfig(batches=2), tmp_path, about={}, warmup_batches=3, disturb=lambda: None)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "table.json").write_text("{}")
    profile.fit_start(SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=30))), None)
    assert profile.about["batches"] == [34, 35]
    profile.fit_end(None, None)
    said = f"Lower profile.start_batch. {tmp_path / 'profile'} is of an earlier start, as its table says."
    assert said in capsys.readouterr().err
    assert (tmp_path / "profile" / "table.json").read_text() == "{}"


# --- its keys ---


def test_nothing_is_recorded_unless_it_is_asked_for():
    assert flat(benchmark.RunConfig())["profile.batches"] == 0
    assert ProfileConfig().problems(1, 10) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["profile.batches=-1"], "command line: profile.batches is -1. Possible: 0 and up."),
        (
            ["profile.start_batch=5"],
            "profile.start_batch: 5, but profile.batches=0. Say profile.batches=3.",
        ),
        (
            ["profile.batches=1", "profile.start_batch=0"],
            "command line: profile.start_batch is 0. Possible: 1 and up or null.",
        ),
        (
            ["profile.batches=3", "profile.start_batch=6"],
            "profile.batches: 3 after 6, but the run has 8 batches. Lower it or profile.start_batch, or raise max_duration.",
        ),
    ],
)
def test_impossible_profiles_are_named_before_the_run(words, text, capsys):
    command = [*TINY_RUN, "--use_synth_data", "max_duration=64sp", *words]
    assert benchmark.main(command) == 2
    assert text in capsys.readouterr().err


def test_the_last_batches_can_be_recorded():
    assert ProfileConfig(batches=3).problems(5, 2) == []
    assert ProfileConfig(batches=3).problems(4, 2) != [] and ProfileConfig(batches=3).problems(None, 2) == []
