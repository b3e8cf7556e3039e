"""`Seal`: proof that a message on a line is the next one of its other end, and was not changed on its way.

Calls of a `PodStrategy` carry a program's own functions, so they are pickled. Whoever could write into a connection
could run what he likes. So each message on a network ends with a keyed hash (BLAKE2b, RFC 7693) over its number and
content. It is checked before the message is looked at. So is that of its size, before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from podembed.workers.device.doorway import ChannelLost

TAG_BYTES = 16
SALT_BYTES = 16
_NUMBER_BYTES = 16


class Seal:
    """One direction of a line. Mutated: it counts, so that no message can be repeated, left out or swapped.

    Args:
      key: key of this connection alone.
      side: who writes; at most 16 bytes.
    """

    def __init__(self, key: bytes, side: bytes) -> None:
        self._key, self._side = key, side
        self._number = 0

    def tag(self, content: bytes | bytearray | memoryview) -> bytes:
        """The tag of the next message, `TAG_BYTES` long."""
        salt = self._number.to_bytes(_NUMBER_BYTES, "big")
        self._number += 1
        found = hashlib.blake2b(content, digest_size=TAG_BYTES, key=self._key, salt=salt, person=self._side)
        return found.digest()

    def check(self, content: bytes | bytearray | memoryview, tag: bytes | bytearray) -> None:
        """Raises ChannelLost if this is not the next message of the other side."""
        if not hmac.compare_digest(self.tag(content), bytes(tag)):
            raise ChannelLost(
                f"Found a message of {len(content):,} bytes that the other process did not write. Expected the next "
                "one of this line. Nothing of it was used. See who else can write into this network."
            )


@dataclass(frozen=True, slots=True)
class Seals:
    """Both directions of a line."""

    outgoing: Seal
    incoming: Seal

    @staticmethod
    def of(token: bytes, *, driver_salt: bytes, process_salt: bytes, is_driver: bool) -> Seals:
        """The seals of one connection. Salts of both sides make its key differ from that of any other connection.

        Args:
          token: secret of the pod, at most 64 bytes.
        """
        key = hashlib.blake2b(driver_salt + process_salt, digest_size=32, key=token).digest()
        sides = (b"driver", b"process") if is_driver else (b"process", b"driver")
        return Seals(*(Seal(key, side) for side in sides))
