"""Kernels run on a CPU here, interpreted.

Triton asks whether they are as it is imported, and again for each kernel's file; nothing but the tests here imports
either. Processes that tests start are not told.
"""

from __future__ import annotations

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    import triton

triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True
