"""Which engines hold a CPU's device now, as `python -m engine holders` tells whoever is about to start one more."""

from __future__ import annotations

import json

from engine.device_ledger import locked_ledger


def holders(device: str, *, as_json: bool) -> str:
    """Each process that has claimed memory of `device`, such as `cpu:0`: pid and bytes, the largest first.

    Raises:
        DeviceLedgerError: where it cannot be known.
    """
    with locked_ledger(device) as ledger:
        claims = sorted(ledger.others, key=lambda claim: -claim.num_bytes)
    if as_json:
        return json.dumps([{"device": device, "pid": claim.pid, "num_bytes": claim.num_bytes} for claim in claims])
    lines = [f"pid {claim.pid} holds {claim.num_bytes / 2**20:.0f} MiB of {device}" for claim in claims]
    return "\n".join(lines or [f"no engine holds {device}"])
