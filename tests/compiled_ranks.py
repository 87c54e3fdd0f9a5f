"""benchmark.py with graphs that are compiled without kernels, for tests on several ranks: kernels take a CPU minutes.

composer -n 2 tests/compiled_ranks.py model.preset=tiny compile=whole ...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import benchmark
from training import speed

if __name__ == "__main__":
    speed.BACKEND = "aot_eager"
    sys.exit(benchmark.main(sys.argv[1:]))
