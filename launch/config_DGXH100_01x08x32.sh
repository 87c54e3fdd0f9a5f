# shellcheck shell=bash
# 1 node of 8 H100, 32 images each: global batch 256, yamls/mlperf_256.yaml. Nothing of it was measured here.
export DGXSYSTEM=DGXH100_01x08x32 DGXNNODES=1 DGXNGPU=8 BATCHSIZE=32 WALLTIME=08:00:00
