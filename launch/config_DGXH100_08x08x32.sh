# shellcheck shell=bash
# 8 nodes of 8 H100, 32 images each: global batch 2048, yamls/mlperf_2048.yaml. Nothing of it was measured here.
export DGXSYSTEM=DGXH100_08x08x32 DGXNNODES=8 DGXNGPU=8 BATCHSIZE=32 WALLTIME=04:00:00
