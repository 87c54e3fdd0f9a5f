#!/usr/bin/env bash
# What a run needs on a bare machine with Debian or Ubuntu; launch/Dockerfile, Dockerfile.rocm and skypilot.yaml run it.
#
#   launch/install.sh VENV                     # packages of the system, then `make env`
#   launch/install.sh rocm                     # for AMD's images: into their Python, beside the torch that they have
#
# Python 3.11, 3.12 or 3.13 is the system's. The wheels bring CUDA; the driver is the host's. torch.compile needs a compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# != 1 ]; then
  echo "launch/install.sh: $# words given. Possible: one, the folder of the environment or rocm. Run: launch/install.sh /opt/easel" >&2
  exit 2
fi
root=(env DEBIAN_FRONTEND=noninteractive)
[ "$(id -u)" = 0 ] || root=(sudo "${root[@]}")
apt=("${root[@]}" apt-get -qq -o DPkg::Lock::Timeout=300)  # a machine that has just started may still hold apt's lock
packages=(ca-certificates g++ gcc git libc6-dev make procps util-linux)  # procps: pkill, for launch/ranks.sh
[ "$1" = rocm ] || packages+=(python3 python3-dev python3-venv)

"${apt[@]}" update
"${apt[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null
"${root[@]}" rm -rf /var/lib/apt/lists

export PIP_NO_CACHE_DIR=1
python=$1/bin/python
if [ "$1" = rocm ]; then
  python=python3
  grep -vE '^(torch|torchvision|triton|xformers|nvidia-[a-z0-9-]+|cuda-[a-z]+)==' requirements.lock |
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-deps -q -r /dev/stdin
else
  make env VENV="$1"
fi
"$python" -c 'import sys, torch; print("launch/install.sh: torch", torch.__version__, "in", sys.prefix)'
