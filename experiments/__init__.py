"""Studies, benchmarks, and what they share.

NumPy and its OpenBLAS choose instructions by processor. Their last digits differ, and with them a pixel here and there
of a figure. So that `--redraw` gives equal files on every x86-64 processor with AVX2, they use no newer ones here.
"""

import os
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")
if _PROCESSORS.exists() and " avx2 " in _PROCESSORS.read_text():  # both are read when NumPy is imported
    os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")
    os.environ.setdefault("NPY_DISABLE_CPU_FEATURES", "X86_V4 AVX512_ICL AVX512_SPR")
