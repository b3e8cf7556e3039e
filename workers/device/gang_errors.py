"""What can be wrong with a gang of JAX processes: its members' devices, and how they are joined. In a module of its
own, since the driver tells these errors apart without JAX.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


class GangError(RuntimeError):
    """The JAX processes of a run do not share their devices as equals."""


class DeviceMissing(RuntimeError):
    """This machine does not give JAX the devices that the run asks for. Another machine may, or this one later."""


@contextmanager
def looking_for(platform: str) -> Iterator[None]:
    """The block is where JAX first looks for its devices, and they must be of this platform; empty takes any.

    Raises:
      DeviceMissing: it finds none.
    """
    import jax

    why = ""
    try:
        yield
        found = jax.local_devices()[0].platform if platform else ""
    except RuntimeError as error:
        # JAX has no type of its own for this.
        if not platform or f"initialize backend '{platform}'" not in str(error):
            raise
        # Its advice would let the process run on something else.
        found, why = "", str(error).partition(" (set JAX_PLATFORMS")[0]
    if found != platform:
        raise DeviceMissing(
            f"Found no {platform.upper()} for JAX on machine {socket.gethostname()} ({why or f'but {found}'}). "
            f"Expected the chips that Ray reserved there. Install jax[{platform}] (libtpu) on it, and see whether "
            'another process holds its chips. Machines that only pretend to have some need platform="cpu" '
            "(--platform cpu)."
        )
