"""`SharedValues`: memory in which the two processes of a host leave activations and gradients for each other. Other
hosts of the machine work in it, too (`workers.host.same_machine`).

The host makes a file without a name and says where it holds it. Its device process, of the same user on the same
machine, opens the same file. Calls between the two then carry the number of a slot instead of arrays. Where the file
cannot be opened, values travel in the calls.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.workers.device.doorway import DoorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueMemory:
    """The place of the memory in a host.

    Attributes:
      process, descriptor, name: of the host process, of the file in it, and of the file alone.
      layout: layout of the largest batch that fits a slot.
      num_slots: batches that may be in flight at once.
    """

    process: int
    descriptor: int
    name: str
    layout: ActivationLayout
    num_slots: int

    @property
    def kind(self) -> str:
        """How the names of such memory begin."""
        return "podembed-values"

    @property
    def size_bytes(self) -> int:
        return max(mmap.PAGESIZE, 8 * self.num_slots * self.layout.memory_floats)

    def views(self, memory: mmap.mmap) -> tuple[Mapping[str, np.ndarray], ...]:
        """The flat activations and gradients of each slot."""
        shape = (2, self.num_slots, self.layout.memory_floats)
        activations, gradients = np.frombuffer(memory, np.float32, int(np.prod(shape))).reshape(shape)
        return tuple({"activations": a, "gradients": g} for a, g in zip(activations, gradients, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """How the device process of a host reaches its engine.

    Attributes:
      memory: where the two leave values for each other.
      door: door of the line for calls.
    """

    memory: ValueMemory
    door: DoorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Values that lie in a slot.

    Attributes:
      vectors: per feature, how many.
      slot_of_gradients: of activations, where the gradients belong that come next; None if that is not known yet.
      vectors_of_gradients: of activations, per feature the vectors of those gradients; empty if they are not known yet.
    """

    slot: int
    vectors: tuple[int, ...]
    slot_of_gradients: int | None = None
    vectors_of_gradients: tuple[int, ...] = ()


class SharedValues:
    """The slots, each with room for the activations of a batch and for their gradients. Mutable.

    Attributes:
      place: with which the other process opens them.
    """

    def __init__(self, place: ValueMemory, descriptor: int) -> None:
        self.place = place
        self._memory = mmap.mmap(descriptor, place.size_bytes)
        slots = place.views(self._memory)
        self._activations = [slot["activations"] for slot in slots]
        self._gradients = [slot["gradients"] for slot in slots]
        self._layout = place.layout

    @staticmethod
    def create(layout: ActivationLayout, *, num_slots: int) -> SharedValues:
        """New memory. A page of it takes room when it is first written."""
        name = f"podembed-values-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        place = ValueMemory(process=os.getpid(), descriptor=descriptor, name=name, layout=layout, num_slots=num_slots)
        os.ftruncate(descriptor, place.size_bytes)
        return SharedValues(place, descriptor)

    @staticmethod
    def open(place: ValueMemory) -> SharedValues | None:
        """The memory of the host process; None where this process cannot reach it."""
        path = f"/proc/{place.process}/fd/{place.descriptor}"
        try:
            # In another container the same numbers may stand for something else.
            if place.name not in os.readlink(path):
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return SharedValues(place, descriptor)
        finally:
            os.close(descriptor)

    def layout_of(self, vectors: Sequence[int]) -> ActivationLayout:
        """The layout of a batch with so many vectors a feature; in most steps that of the step before."""
        self._layout = self._layout.with_vectors(vectors)
        return self._layout

    def fits(self, layout: ActivationLayout) -> bool:
        """Whether a batch has room in a slot."""
        return 0 < layout.memory_floats <= self.place.layout.memory_floats

    def activations(self, slot: int, num_floats: int) -> np.ndarray:
        """float32 `[num_floats]` of a slot; what was there is lost."""
        return self._activations[slot % self.place.num_slots][:num_floats]

    def fresh_activations(self, slot: int) -> np.ndarray:
        """float32 of a whole slot. Views of it refer to this array, which has a reference count of its own."""
        num_floats, first = self.place.layout.memory_floats, slot % self.place.num_slots
        return np.frombuffer(self._memory, np.float32, num_floats, 4 * first * num_floats)

    def gradients(self, slot: int, num_floats: int) -> np.ndarray:
        """As `activations`, for gradients."""
        return self._gradients[slot % self.place.num_slots][:num_floats]

    def slot_of(self, activations: np.ndarray) -> int | None:
        """The slot in which an array lies; None if it lies elsewhere."""
        offsets = [activations.ctypes.data - slot.ctypes.data for slot in self._activations]
        found = (at for at, offset in enumerate(offsets) if 0 <= offset < self._activations[at].nbytes)
        return next(found, None)

    def close_descriptor(self) -> None:
        """Called by the process that made the memory: no other can open it from now on. The last view frees it."""
        os.close(self.place.descriptor)


class PlacedMemory:
    """The slots as the memory of an engine. Mutable.

    Attributes:
      is_read_by_others: whether other hosts of this machine look for gradients in the slots.
      lent: slots whose activations the device process may still read.
    """

    def __init__(self, values: SharedValues) -> None:
        self._values = values
        self.is_read_by_others = False
        self.lent: frozenset[int] = frozenset()

    def is_free(self, number: int) -> bool:
        return number % self._values.place.num_slots not in self.lent

    def activations(self, number: int, layout: ActivationLayout) -> np.ndarray:
        if not (self.is_free(number) and self._values.fits(layout)):
            return aligned_empty((layout.memory_floats,))
        return self._values.activations(number, layout.memory_floats)

    def gradients(self, number: int, given: Blocks) -> Blocks:
        """Copies gradients to their slot that came in a message."""
        if not self.is_read_by_others or not self._values.fits(given.layout):
            return given
        placed = Blocks.of(given.layout, self._values.gradients(number, given.layout.num_floats))
        for own, gradient in zip(placed.arrays, given.arrays, strict=True):
            if own.ctypes.data != gradient.ctypes.data:
                np.copyto(own, gradient)
        return placed


class DeviceValues:
    """The device process's side of a host's memory. Mutable.

    The user gets activations where the host left them, without a copy. As long as anything refers to them, which their
    reference count tells, their slot is lent: the host does not write there.
    """

    def __init__(self, values: SharedValues) -> None:
        self._values = values
        # The reference count, on this interpreter, of an array that only this dict holds.
        self._given: dict[int, np.ndarray] = {0: values.fresh_activations(0)}
        self._idle_count = self._references(0)

    def taken(self, placed: Placed) -> list[np.ndarray]:
        """The activations in a slot, `[vectors, width]` a feature. The caller may keep them."""
        layout = self._values.layout_of(placed.vectors)
        given = self._given[placed.slot] = self._values.fresh_activations(placed.slot)
        return list(layout.blocks(given))

    def lent(self) -> list[int]:
        """Slots whose activations something still refers to."""
        for slot in list(self._given):
            if self._references(slot) <= self._idle_count:
                del self._given[slot]
        return list(self._given)

    def _references(self, slot: int) -> int:
        return sys.getrefcount(self._given[slot])

    def put(self, gradients: Sequence[np.ndarray], slot: int) -> Placed | None:
        """Leaves gradients in the slot of their activations; None where they do not fit."""
        vectors = tuple(len(one) for one in gradients)
        layout = self._values.layout_of(vectors)
        if not self._values.fits(layout):
            return None
        blocks = layout.blocks(self._values.gradients(slot, layout.num_floats))
        for block, gradient in zip(blocks, gradients, strict=True):
            np.copyto(block, gradient)
        return Placed(slot=slot, vectors=vectors)
