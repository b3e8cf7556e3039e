"""The process of `podembed check-device`, with devices that are wrong: gradients that leave them packed are larger by a
thousandth, one check cannot be done, and one ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from podembed.jobs.check_device import child
from podembed.workers.device.transfers.ways import PackedTransfers

packed = PackedTransfers.packed


def wrong(self: PackedTransfers, gradients: Any) -> Any:
    return packed(self, tuple(1.001 * one for one in gradients))


def of_pieces(request: Mapping[str, Any], check: Mapping[str, Any]) -> Any:
    if not request["on_devices"]:
        return {}
    raise RuntimeError("Found no room in /home/someone/cache at 10.1.2.3:80. Expected some.\nMore words.")


def of_run(request: Mapping[str, Any], check: Mapping[str, Any]) -> Any:
    if check["name"] == "deepfm" and request["on_devices"]:
        os.abort()
    return runs(request, check)


runs = child._CHECKS["run"]
PackedTransfers.packed = wrong  # the CPU has no packed arrays
child._CHECKS.update(pieces=of_pieces, run=of_run)

if __name__ == "__main__":
    child.main()
