"""The published rows that the law of scaling is fitted to, and what is known of how each series was run.

The rows are those of reports/scaling_published.csv, one source a row. Steady images/s where the log's blocks have it
(is_steady = 1), else those of the whole run, start and checkpoints included; where both are known they differ by 3 % at most.
What a source does not say is in ASSUMED, not in the file.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preflight.scaling_law import CLUSTER_LINKS, NODE_LINKS, Setup

PUBLISHED = Path(__file__).resolve().parent.parent / "reports/scaling_published.csv"
PARAMETERS_SD2 = 865_910_724
FLOAT32_GB, FLOAT16_GB = 4e-9 * PARAMETERS_SD2, 2e-9 * PARAMETERS_SD2
FLUX_TFLOP, FLUX_GB = 20.3, 2e-9 * 11.9e9  # an image and step at 256 px; gradients in bf16
A100 = (NODE_LINKS["nvlink3"], CLUSTER_LINKS["infiniband_hdr"])
H100 = (NODE_LINKS["nvlink4"], CLUSTER_LINKS["infiniband_ndr"])
B200 = (NODE_LINKS["nvlink5"], CLUSTER_LINKS["infiniband_ndr"])
ICI = 600.0  # GB/s of a TPU v5p, 4,800 Gbit/s (Google's documentation); a pod is one domain
TFLOP_256 = 2.41 * 36.25 / 137.5  # by MosaicML's own two rates on 8 A100: attention shrinks with the square

SETUPS = {
    "mosaicml_online_512": Setup("plain", FLOAT32_GB, A100[0], "mosaicml_online", 8, microbatch=4),
    # SHARD_GRAD_OP: a reduce-scatter in float32, and the weights gathered once in half of that
    "mosaicml_latents_256": Setup(
        "plain", FLOAT32_GB, A100[0], "mosaicml_latents", 8, microbatch=16, volume=1.5, tflop=TFLOP_256
    ),
    "mosaicml_latents_512": Setup("plain", FLOAT32_GB, A100[0], "mosaicml_latents", 8, microbatch=16, volume=1.5),
    "nemo_a100": Setup("plain", FLOAT32_GB, *A100, 8),
    "nemo_h100": Setup("plain", FLOAT32_GB, *H100, 8),
    "mlperf_h100_v31": Setup("plain", FLOAT16_GB, *H100, 8),
    "mlperf_h100_v40": Setup("graphs", FLOAT16_GB, *H100, 8),
    "mlperf_h100_v41": Setup("graphs", FLOAT16_GB, *H100, 8),
    "mlperf_h200_v41": Setup("graphs", FLOAT16_GB, *H100, 8),
    "mlperf_h200_google": Setup("graphs", FLOAT16_GB, *H100, 8),
    "mlperf_b200_v50": Setup("graphs", FLOAT16_GB, *B200, 8),
    "mlperf_gb200": Setup("graphs", FLOAT16_GB, *B200, 72),
    "mlperf_tpu_v5p": Setup("tpu", FLOAT32_GB, ICI, ICI, 10**6),
    "flux_b200": Setup("flux", FLUX_GB, *B200, 8, tflop=FLUX_TFLOP),
    "flux_gb200": Setup("flux", FLUX_GB, *B200, 72, tflop=FLUX_TFLOP),
    "flux_gb300": Setup("flux", FLUX_GB, *B200, 72, tflop=FLUX_TFLOP),
    "flux_gb300_v60": Setup("flux", FLUX_GB, *B200, 72, tflop=FLUX_TFLOP),
}
"""Series -> how it exchanges gradients, as far as its source says; NVIDIA's in fp16, autocast's in fp32."""
ASSUMED = {
    "nemo_a100": 32,
    "nemo_h100": 32,
}
"""Series -> images a device where a row has no global batch: NeMo's row of 4 nodes has 32."""
TITLES = {
    "mosaicml_online_512": "MosaicML, A100, 512 px, encoders in the step, DDP",
    "mosaicml_latents_256": "MosaicML, A100, 256 px, latents, SHARD_GRAD_OP",
    "mosaicml_latents_512": "MosaicML, A100, 512 px, latents, SHARD_GRAD_OP",
    "nemo_a100": "NeMo, A100",
    "nemo_h100": "NeMo, H100",
    "mlperf_h100_v31": "MLPerf 3.1, H100",
    "mlperf_h100_v40": "MLPerf 4.0, H100",
    "mlperf_h100_v41": "MLPerf 4.1, H100",
    "mlperf_h200_v40": "MLPerf 4.0, H200",
    "mlperf_h200_v41": "MLPerf 4.1 and 5.0, H200",
    "mlperf_h200_google": "MLPerf 5.0, H200, Google Cloud",
    "mlperf_b200_v41": "MLPerf 4.1, B200",
    "mlperf_b200_v50": "MLPerf 5.0, B200",
    "mlperf_gb200": "MLPerf 5.0, GB200",
    "mlperf_tpu_v5p": "MLPerf 4.1, TPU v5p",
    "mlperf_tpu_trillium": "MLPerf 5.0, TPU Trillium",
    "mlperf_gaudi2": "MLPerf 3.1, Gaudi2",
    "mlperf_l40s": "MLPerf 4.0, L40S",
    "flux_b200": "MLPerf 5.1, FLUX.1, B200",
    "flux_gb200": "MLPerf 5.1, FLUX.1, GB200",
    "flux_gb300": "MLPerf 5.1, FLUX.1, GB300",
    "flux_gb300_v60": "MLPerf 6.0, FLUX.1, GB300",
}


@dataclass(frozen=True)
class Row:
    """One published figure."""

    series: str
    system: str
    device: str
    num: int
    batch: int | None
    images_per_sec: float | None
    minutes: float | None
    images: int | None
    source: str
    tensor: int
    note: str

    @property
    def place(self) -> tuple[str, int]:
        """Series and devices: rows of one place are left out together."""
        return self.series, self.num


def read_rows(path: Path = PUBLISHED) -> list[Row]:
    """Return all published rows, in the file's order."""
    with path.open(newline="") as file:
        return [
            Row(
                each["series"],
                each["system"],
                each["device"],
                int(each["num_devices"]),
                int(each["global_batch_size"]) if each["global_batch_size"] else None,
                float(each["images_per_sec"]) if each["images_per_sec"] else None,
                float(each["minutes_to_target"]) if each["minutes_to_target"] else None,
                int(each["images_to_target"]) if each["images_to_target"] else None,
                each["source"],
                int(each["tensor_parallel"] or 1),
                each["note"],
            )
            for each in csv.DictReader(file)
        ]


def fitted(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that say something of scaling: of a series with a setup, measured once, the batch known or assumed."""
    return [
        row
        for row in rows
        if row.series in SETUPS and row.images_per_sec and "not counted twice" not in row.note and batch_of(row)
    ]


def setup_of(row: Row) -> Setup:
    """Return how a row's run exchanges gradients: its series' way, by as many devices for a layer."""
    return dataclasses.replace(SETUPS[row.series], tensor=row.tensor)


def batch_of(row: Row) -> int | None:
    """Return a row's global batch, as published or assumed."""
    return row.batch or (row.num * ASSUMED[row.series] if row.series in ASSUMED else None)
