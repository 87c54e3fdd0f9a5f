#!/usr/bin/env bash
# make test-image: launch/Dockerfile built by buildah, which needs no daemon, and three things that its container has to do.
# The base is a bare Debian from debootstrap, where debian:trixie-slim cannot be pulled: Debian's minimal set of packages, too.
# Some 30 GB under TMPDIR, removed at the end. As root.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot BUILDAH_LAYERS=false
engine="buildah --root $work/store --runroot $work/run"
trap 'rm -rf "$work"' EXIT

debootstrap --variant=minbase trixie "$work/debian" >"$work/debootstrap.log" || { tail "$work/debootstrap.log"; exit 1; }
# A mirror may have a certificate of its own: what this machine trusts, one a file.
mkdir -p "$work/debian/usr/local/share/ca-certificates"
awk -v into="$work/debian/usr/local/share/ca-certificates" '/BEGIN CERT/ {n++} {print > (into "/" n ".crt")}' /etc/ssl/certs/ca-certificates.crt
base=$($engine from scratch)
$engine add -q "$base" "$work/debian" / >/dev/null
$engine commit -q "$base" docker.io/library/debian:trixie-slim >/dev/null
$engine rm "$base" >/dev/null
rm -rf "$work/debian"

make build_docker DOCKER="$engine" IMAGE=easel-test
container=$($engine from easel-test)
run="benchmark.py model.preset=tiny image_size=64 global_batch_size=8 max_duration=4ba data.synthetic=true loggers.progress_bar=false"

echo "--- without GPUs: one line, and exit code 2"
code=0
said=$($engine run "$container" -- composer $run 2>&1) || code=$?
echo "$said"
[ "$code" = 2 ] && grep -q 'started without --gpus all' <<<"$said"

echo "--- asked for a CPU: the run goes on"
$engine run --env CUDA_VISIBLE_DEVICES= --env RANKS_PER_NODE=2 "$container" -- launch/ranks.sh $run run_name=image | tee "$work/said"
grep -q '^images_per_sec=' "$work/said"

echo "--- the record names the commit; torch.compile finds its compiler"
$engine run "$container" -- grep '"commit"' runs/image/environment.json
$engine run --env CUDA_VISIBLE_DEVICES= "$container" -- python -c 'import torch; print(torch.compile(lambda x: (x + 1).sin())(torch.zeros(3)))'
$engine images
