# shellcheck shell=bash
# 1 node of 8 H100, 64 images each: global batch 512, yamls/mlperf_512.yaml. Nothing of it was measured here.
export DGXSYSTEM=DGXH100_01x08x64 DGXNNODES=1 DGXNGPU=8 BATCHSIZE=64 WALLTIME=08:00:00
