"""Hands batches, activations and gradients between the two processes of a host, without copies and without pickling.

The host process creates anonymous memory and serves it behind a door (`workers.device.doorway`). The device process of
the same host comes in and receives the memory's file descriptor. Large arrays stay in that memory; the socket carries
56-byte records that say what is ready. Neither the memory nor the socket has a name in a file system, so nothing is
left behind when both processes are killed. Each sees the death of the other at once, as end of file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from podembed.embedding.features.column_shape import ColumnShape
from podembed.embedding.lookup.activation_layout import BLOCK_ALIGNMENT_BYTES, ActivationLayout
from podembed.workers.device.doorway import ChannelLost, ChannelTimeout, DoorKey, Doorway
from podembed.workers.job.padding import ONE_ID, most_ids, rows_of_room

_RECORD = struct.Struct("<qqqddqq")
_LENGTHS, _NUM_DEVICES, _COLUMN = "lengths/", "num_devices/", "column/"
_ROWS, _BAGS, _WEIGHTS = "rows/", "row_bags/", "row_weights/"
_LEVELS, _RATES = "bag_levels/", "rates/"
_NO_RATES = np.zeros(0, np.float32)


class RecordKind(IntEnum):
    """Kinds of announcements."""

    TRAIN = 1  # host → device: a batch with activations; run a training step
    EVALUATE = 2  # host → device: a batch with activations; run the forward pass only
    DONE = 3  # device → host: the answer to either lies in the same buffer
    END = 4  # host → device: the window is over
    # Of tables on devices; `step` is the table. Each is answered by DONE.
    # `buffer` is the first of `levels[0]` buckets that follow each other. Their rows and slots lie in `row_memory`.
    GIVE_BUCKETS = 5  # host → device: take these buckets
    JOIN_BUCKETS = 6  # host → device: this host has given all of its own
    # `buffer` is how many changed rows were taken before. The answer says in `buffer` how many lie in `row_memory`, and
    # in `levels[0]` how many are left. Their int32 numbers come first, then the rows and each slot.
    TAKE_CHANGED = 7  # host → device: write the next rows that changed since they were taken last
    # `buffer` is how many rows. Their int32 numbers lie at the start of `row_memory`.
    TAKE_ROWS = 8  # host → device: write these rows and their slots in the place of the numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One announcement. `weight_sum` is the global batch's weight on the way to the device; `loss` is the global loss
    on the way to the host. `levels` say how much room the sequences of the step have (`workers.job.padding`).
    """

    kind: RecordKind
    step: int
    buffer: int = 0
    weight_sum: float = 0.0
    loss: float = 0.0
    levels: tuple[int, ...] = ()


class BagArrays(NamedTuple):
    """The ids of a feature, those of one device after those of another.

    Attributes:
      rows: int32 `[n]`, -1 where there is none. Without `bags` one for each bag.
      bags: int32 `[n]`, rising on a device: the bag of each among those of its device, and behind them their number.
      weights: float32 `[n]`, or None.
    """

    rows: np.ndarray
    bags: np.ndarray | None
    weights: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsLayout:
    """Arrays by which a host feeds the tables on its devices: those of one batch, and room for rows.
    Empty without tables on devices.

    Attributes:
      num_bags: by feature that looks up in such a table, those of a host with padding.
      weighted: of these features, those whose ids have weights.
      of_positions: of these, those whose bags are positions of a sample, with one id at most.
      num_tables: how many there are.
      num_arrays: in how many arrays the sharded ones among them lie at most.
      row_floats: room for rows with their slots, at least for the largest bucket of any.
    """

    num_bags: Mapping[str, int] = field(default_factory=dict)
    weighted: frozenset[str] = frozenset()
    of_positions: frozenset[str] = frozenset()
    num_tables: int = 0
    num_arrays: int = 0
    row_floats: int = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name of an array. Pages that no step writes take no memory."""
        if not self.num_bags:
            return {}
        found: dict[str, tuple[int, ...]] = {
            _LEVELS: (len(self.num_bags) + self.num_arrays,),
            _RATES: (self.num_tables,),
        }
        for name, count in self.num_bags.items():
            kinds = (_ROWS, _WEIGHTS) if name in self.weighted else (_ROWS,)
            size = most_ids(count)
            if name in self.of_positions:
                size = count
            else:
                kinds += (_BAGS,)
            found |= {f"{kind}{name}": (size,) for kind in kinds}
        return found

    def dtypes(self) -> dict[str, str]:
        """Types of the arrays that are not float32."""
        return {_LEVELS: "int32"} | {f"{kind}{name}": "int32" for name in self.num_bags for kind in (_ROWS, _BAGS)}

    def bags_in(
        self, arrays: Mapping[str, np.ndarray], levels: Sequence[int], *, num_devices: int
    ) -> dict[str, BagArrays]:
        """The ids of a batch by feature, with the room of these levels."""
        found = {}
        for (name, count), level in zip(self.num_bags.items(), levels[: len(self.num_bags)], strict=True):
            size = count if level == ONE_ID else num_devices * ids_of_room(level, count, num_devices=num_devices)
            weights = arrays.get(f"{_WEIGHTS}{name}")
            found[name] = BagArrays(
                arrays[f"{_ROWS}{name}"][:size],
                None if level == ONE_ID else arrays[f"{_BAGS}{name}"][:size],
                None if weights is None else weights[:size],
            )
        return found

    def levels_in(self, arrays: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        """The padding level of each feature in a batch, and those of messages between devices."""
        return tuple(level for level in arrays[_LEVELS].tolist() if level >= 0) if self.num_bags else ()

    def say_levels(self, arrays: Mapping[str, np.ndarray], levels: Sequence[int]) -> None:
        """Writes what `levels_in` reads."""
        if self.num_bags:
            arrays[_LEVELS][:] = -1
            arrays[_LEVELS][: len(levels)] = levels

    def rates_in(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32, the learning rate of each table on devices in a step."""
        return arrays.get(_RATES, _NO_RATES)


def ids_of_room(level: int, num_bags: int, *, num_devices: int) -> int:
    """The ids of a feature that each device of a host has room for, if the host has so many bags."""
    return min(rows_of_room(level), most_ids(num_bags) // num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLayout:
    """The place of each array of a batch in the shared memory.

    Attributes:
      num_dense: dense inputs a sample.
      activations: activations of the features' blocks within `activations` and within `gradients`; also says how many
        samples there are.
      num_buffers: batches that may be in flight at once.
      sequences: features whose samples differ in length; each has an array `lengths/<feature>`.
      columns: named columns, as `InputData.column_shapes`; each has an array `column/<name>`.
      num_scores: of a sample, as `JobConfig.num_scores`.
      on_devices: of the tables on devices.
    """

    num_dense: int
    activations: ActivationLayout
    num_buffers: int = 1
    sequences: tuple[str, ...] = ()
    columns: Mapping[str, ColumnShape] = field(default_factory=dict)
    num_scores: int = 0
    on_devices: IdsLayout = IdsLayout()  # frozen

    @property
    def kind(self) -> str:
        """The prefix of names of such memory."""
        return "podembed-channel"

    @property
    def num_samples(self) -> int:
        """Rows of every array: the host's share of the batch with its padding."""
        return self.activations.num_samples

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Arrays of one buffer, all of 4-byte numbers: lengths and the number of devices are int32, named columns as
        they say, all others float32.
        """
        n = self.num_samples
        named: dict[str, tuple[int, ...]] = {_NUM_DEVICES: (1,)}
        named |= {f"{_LENGTHS}{name}": (n,) for name in self.sequences}
        named |= {f"{_COLUMN}{name}": (n, *shape.inner) for name, shape in self.columns.items()}
        return named | {
            "dense": (n, self.num_dense),
            "labels": (n,),
            "weights": (n,),
            "activations": (self.activations.memory_floats,),
            "gradients": (self.activations.num_floats,),
            "scores": (n, self.num_scores) if self.num_scores else (n,),
            **self.on_devices.shapes(),
        }

    @property
    def buffer_bytes(self) -> int:
        return sum(_aligned(4 * int(np.prod(shape))) for shape in self.shapes().values())

    @property
    def size_bytes(self) -> int:
        return max(mmap.PAGESIZE, self.num_buffers * self.buffer_bytes + 4 * self.on_devices.row_floats)

    def views(self, memory: mmap.mmap) -> tuple[Mapping[str, np.ndarray], ...]:
        """The arrays of every buffer as views of `memory`."""
        buffers, offset = [], 0
        dtypes = {_NUM_DEVICES: "int32"} | {f"{_LENGTHS}{name}": "int32" for name in self.sequences}
        dtypes |= {f"{_COLUMN}{name}": shape.dtype for name, shape in self.columns.items()}
        dtypes |= self.on_devices.dtypes()
        for _ in range(self.num_buffers):
            arrays = {}
            for name, shape in self.shapes().items():
                count = int(np.prod(shape))
                arrays[name] = np.frombuffer(memory, dtypes.get(name, "float32"), count, offset).reshape(shape)
                offset += _aligned(4 * count)
            buffers.append(arrays)
        return tuple(buffers)

    def row_memory(self, memory: mmap.mmap) -> np.ndarray:
        """float32 `[on_devices.row_floats]`, behind the buffers."""
        return np.frombuffer(memory, np.float32, self.on_devices.row_floats, self.num_buffers * self.buffer_bytes)

    def lengths_in(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The lengths of each feature with sequences in the arrays of a buffer: int32 `[num_samples]`."""
        return {name: arrays[f"{_LENGTHS}{name}"] for name in self.sequences}

    def columns_in(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The columns in the arrays of a buffer, by name: `[num_samples, ...]`."""
        return {name: arrays[f"{_COLUMN}{name}"] for name in self.columns}


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES


@dataclass(slots=True)
class ChannelEnd:
    """One end of the channel: shared arrays and the record socket. Mutated by `close` only, and by waiting.

    Attributes:
      row_memory: memory for rows of tables on devices, on their way from and to the host.
      is_waiting: whether a thread is in `receive`.
    """

    layout: ChannelLayout
    buffers: tuple[Mapping[str, np.ndarray], ...]
    _socket: socket.socket
    _memory: mmap.mmap
    _partner: str
    _pending: bytes = field(default=b"")
    is_waiting: bool = False
    row_memory: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.row_memory = self.layout.row_memory(self._memory)

    @property
    def num_devices(self) -> int:
        """Parts of the samples in the device process, which writes the number."""
        return max(1, int(self.buffers[0][_NUM_DEVICES][0]))

    def say_num_devices(self, count: int) -> None:
        """Tells the host over how many devices its samples are spread."""
        for arrays in self.buffers:
            arrays[_NUM_DEVICES][0] = count

    def send(self, record: Record) -> None:
        """Announces a record.

        Raises:
          ChannelLost: the other process is gone.
        """
        levels = record.levels or (0, 0)
        packed = _RECORD.pack(record.kind, record.step, record.buffer, record.weight_sum, record.loss, *levels)
        try:
            self._socket.sendall(packed)
        except OSError as error:
            raise ChannelLost(self._lost(str(error))) from error

    def receive(self, *, timeout_s: float, keep_waiting: Callable[[], None] | None = None) -> Record:
        """Waits for the next record.

        Args:
          timeout_s: seconds until the wait fails.
          keep_waiting: called about every 100 ms; raises to end the wait early.

        Raises:
          ChannelLost: the other process is gone.
          ChannelTimeout: nothing came within `timeout_s`.
        """
        self.is_waiting = True
        try:
            self._fill(time.monotonic() + timeout_s, timeout_s, keep_waiting)
        finally:
            self.is_waiting = False
        packed, self._pending = self._pending[: _RECORD.size], self._pending[_RECORD.size :]
        kind, step, buffer, weight_sum, loss, *levels = _RECORD.unpack(packed)
        return Record(
            kind=RecordKind(kind), step=step, buffer=buffer, weight_sum=weight_sum, loss=loss, levels=tuple(levels)
        )

    def has_record(self) -> bool:
        """Whether `receive` would return, or raise that the other process is gone, without a wait."""
        watch = select.poll()
        watch.register(self._socket, select.POLLIN)
        return len(self._pending) >= _RECORD.size or bool(watch.poll(0))

    def _fill(self, deadline: float, timeout_s: float, keep_waiting: Callable[[], None] | None) -> None:
        """Reads until a whole record is there."""
        while len(self._pending) < _RECORD.size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelTimeout(
                    f"The {self._partner} process sent nothing for {timeout_s:.0f} s. Expected its record within that "
                    "time. See its log; raise the step deadline if a step is really that slow."
                )
            # poll, since select knows no descriptor above 1023.
            watch = select.poll()
            watch.register(self._socket, select.POLLIN)
            if watch.poll(1000 * min(left, 0.1)):
                self._pending += self._read()
            elif keep_waiting is not None:
                keep_waiting()

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(4096)
        except OSError as error:
            raise ChannelLost(self._lost(str(error))) from error
        if not data:
            raise ChannelLost(self._lost("end of file"))
        return data

    def _lost(self, reason: str) -> str:
        return (
            f"The {self._partner} process of this host is gone ({reason}). Its log says why; the driver starts a new "
            "generation."
        )

    def close(self) -> None:
        """Closes the socket and lets the memory go with its last view. Safe to call twice."""
        self._socket.close()
        self.buffers, self.row_memory = (), np.zeros(0, np.float32)
        # numpy or JAX may still hold a view; the mapping then goes when they do.
        with contextlib.suppress(BufferError):
            self._memory.close()


class ChannelServer:
    """The host's side before its device process has connected."""

    def __init__(self, layout: ChannelLayout, *, generation: int) -> None:
        self._layout = layout
        self._door = Doorway(generation=generation)
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory, from `accept` to `close_descriptor`; for other hosts on this machine."""
        if self._descriptor is None:
            raise RuntimeError("Found no shared memory. Expected accept first.")
        return self._descriptor

    def close_descriptor(self) -> None:
        """Leaves the memory to those who have mapped it. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def invitation(self) -> Invitation:
        """What the device process needs to connect; passed on by the driver."""
        key = self._door.key
        return Invitation(address=key.address, secret=key.secret, generation=key.generation, layout=self._layout)

    def accept(self, *, timeout_s: float, keep_waiting: Callable[[], None] | None = None) -> ChannelEnd:
        """Waits for the device process and gives it the memory.

        Args:
          keep_waiting: called about every 100 ms; raises to end the wait early.

        Raises:
          ChannelTimeout: no process with the right secret connected in time.
          ChannelLost: it connected and died.
        """
        try:
            return self._pass_memory(self._door.admit(timeout_s=timeout_s, keep_waiting=keep_waiting))
        finally:
            self._door.close()

    def _pass_memory(self, peer: socket.socket) -> ChannelEnd:
        descriptor, size = os.memfd_create("podembed-channel", os.MFD_CLOEXEC), self._layout.size_bytes
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            peer.close()
            raise ChannelLost(
                f"Found no room for {size:,} bytes of addresses that host and device process share ({error}). Expected "
                "as many; pages that stay unused take no memory. Raise the limit (ulimit -v), make batches smaller, or "
                "keep tables of features with many ids on the hosts (place='host')."
            ) from error
        try:
            socket.send_fds(peer, [b"m"], [descriptor])
        except OSError as error:
            os.close(descriptor)
            peer.close()
            raise ChannelLost(
                f"The device process of this host died as it joined ({error}). Its log says why."
            ) from error
        self._descriptor = descriptor
        peer.settimeout(None)
        return ChannelEnd(self._layout, self._layout.views(memory), peer, memory, "device")

    def close(self) -> None:
        self._door.close()
        self.close_descriptor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation(DoorKey):
    """Address and secret with which a device process joins its host, and what lies in the memory that it gets."""

    layout: ChannelLayout

    def connect(self, *, timeout_s: float) -> ChannelEnd:
        """Joins the host process.

        Raises:
          ChannelLost: the host is gone or refused us.
          ChannelTimeout: it did not answer within `timeout_s`.
        """
        link = self.enter(timeout_s=timeout_s)
        try:
            answer, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        except TimeoutError as error:
            link.close()
            raise ChannelTimeout(f"The host process did not answer within {timeout_s:.0f} s. See its log.") from error
        except OSError as error:
            link.close()
            raise ChannelLost(f"The host process is gone ({error}). See its log.") from error
        if answer != b"m" or len(descriptors) != 1:
            link.close()
            raise ChannelLost(
                "The host process refused this device process. Expected the secret of its own generation."
            )
        try:
            memory = mmap.mmap(descriptors[0], self.layout.size_bytes)
        finally:
            os.close(descriptors[0])
        link.settimeout(None)
        return ChannelEnd(self.layout, self.layout.views(memory), link, memory, "host")
