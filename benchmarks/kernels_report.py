"""What every shipped kernel takes of the chips it is shipped for: `python -m benchmarks.kernels_report`, no GPU needed.

Writes docs/kernels.md, and ends with 1 where a kernel spills registers or wants more shared memory than the chip has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from kernels import kv_write, paged_attention, rms_norm, rope, sample, silu_mul
from kernels.ahead_of_time import CHIPS, compiled
from kernels.variants import Variant

KERNELS = (rms_norm, rope, silu_mul, kv_write, paged_attention, sample)
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"

HEAD = f"""# What the kernels take of a chip

Made by `make kernels-report`: each kernel in each dtype and tile that is shipped, compiled ahead of time by Triton
{version("triton")} for {", ".join(chip.name for chip in CHIPS)}. No GPU was needed, and none was used: these are the
compiler's figures, no times. Registers are a thread's; spilled are bytes of its local memory, which is slow; shared
memory is a program's. Tiles are chosen for sm_80 and sm_90, where nothing may spill; gfx942 shows that they compile
and fit there.
"""


def main() -> int:
    """Compile, write the page, name what does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    page: Path = parser.parse_args().page
    faults: list[str] = []
    lines = [HEAD]
    for module in KERNELS:
        lines.append(f"## {module.__name__.removeprefix('kernels.')}\n")
        lines += _table(module.shipped(), faults)
    page.write_text("\n".join(lines), encoding="utf-8")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _table(variants: Iterator[Variant], faults: list[str]) -> Iterator[str]:
    chips = "".join(f" {chip.name}: registers | spilled | shared |" for chip in CHIPS)
    yield f"| kernel | warps |{chips}"
    yield "| --- | --- |" + " --- | --- | --- |" * len(CHIPS)
    for variant in variants:
        taken = [compiled(variant, chip) for chip in CHIPS]
        for chip, each in zip(CHIPS, taken, strict=True):
            if (each.spilled_bytes and not chip.may_spill) or each.shared_bytes > chip.shared_bytes:
                faults.append(f"{variant.name} does not fit {chip.name}: {each}")
        cells = "".join(f" {each.registers} | {each.spilled_bytes} | {each.shared_bytes} |" for each in taken)
        yield f"| {variant.name} | {variant.num_warps} |{cells}"
    yield ""


if __name__ == "__main__":
    sys.exit(main())
