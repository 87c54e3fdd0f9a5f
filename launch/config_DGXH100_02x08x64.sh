# shellcheck shell=bash
# 2 nodes of 8 H100, 64 images each: global batch 1024, yamls/mlperf_1024.yaml. Nothing of it was measured here.
export DGXSYSTEM=DGXH100_02x08x64 DGXNNODES=2 DGXNGPU=8 BATCHSIZE=64 WALLTIME=04:00:00
