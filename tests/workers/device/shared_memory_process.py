"""The device end of a channel in a process of its own. Says on stdout what happened.

Usage: python -m tests.workers.device.shared_memory_process INVITATION MODE, the invitation as JSON. Modes: `serve`
answers every batch with gradients that are twice the activations, until the window ends; `wait` waits for a record that
never comes; `idle` connects and sleeps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from podembed.embedding.lookup.activation_layout import ActivationLayout
from podembed.workers.device.doorway import ChannelError
from podembed.workers.device.shared_memory import (
    ChannelEnd,
    ChannelLayout,
    Invitation,
    Record,
    RecordKind,
)

PATIENCE_S = 120.0


def channel_layout(num_samples: int, num_dense: int, widths: Sequence[int], num_buffers: int = 1) -> ChannelLayout:
    """Of features that are all pooled where they are used."""
    activations = ActivationLayout(num_samples=num_samples, widths=tuple(widths), owners=(-1,) * len(widths))
    return ChannelLayout(num_dense=num_dense, activations=activations, num_buffers=num_buffers)


def to_json(invitation: Invitation, **changes: Any) -> str:
    """An invitation as an argument of this program, with some of its fields replaced."""
    layout = invitation.layout
    fields = {
        "address": invitation.address,
        "secret": invitation.secret.hex(),
        "generation": invitation.generation,
        "layout": [layout.num_samples, layout.num_dense, list(layout.activations.widths), layout.num_buffers],
    }
    return json.dumps(fields | changes)


def from_json(text: str) -> Invitation:
    fields = json.loads(text)
    return Invitation(
        address=fields["address"],
        secret=bytes.fromhex(fields["secret"]),
        generation=fields["generation"],
        layout=channel_layout(*fields["layout"]),
    )


def serve(end: ChannelEnd) -> None:
    while (record := end.receive(timeout_s=PATIENCE_S)).kind is not RecordKind.END:
        arrays = end.buffers[record.buffer]
        arrays["gradients"][...] = 2 * arrays["activations"]
        end.send(Record(kind=RecordKind.DONE, step=record.step, buffer=record.buffer, loss=record.weight_sum))


def main() -> None:
    try:
        end = from_json(sys.argv[1]).connect(timeout_s=PATIENCE_S)
        print("connected", flush=True)
        match sys.argv[2]:
            case "serve":
                serve(end)
            case "wait":
                end.receive(timeout_s=PATIENCE_S)
            case "idle":
                time.sleep(PATIENCE_S)
        print("done", flush=True)
    except ChannelError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
