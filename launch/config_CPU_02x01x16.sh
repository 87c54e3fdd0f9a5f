# shellcheck shell=bash
# 2 nodes with a CPU rank each, 16 images: the miniature (make miniature has its data). It was run here, on two nodes of one machine.
export DGXSYSTEM=CPU_02x01x16 DGXNNODES=2 DGXNGPU=1 BATCHSIZE=16 WALLTIME=01:00:00 YAML=yamls/shapes.yaml
