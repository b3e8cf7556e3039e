"""What can be wrong with a gang of JAX processes: its members' devices, and how they are joined. In a module of its
own, since the driver tells these errors apart without JAX.
"""

from __future__ import annotations

import glob
import importlib.util
import pkgutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# The driver of a TPU has one of them, by its generation.
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


class GangError(RuntimeError):
    """The JAX processes of a run do not share their devices as equals."""


class DeviceMissing(RuntimeError):
    """This machine does not give JAX the devices that the run asks for. Another machine may, or this one later."""


def _leave_out_absent_tpus() -> None:
    """JAX loads libtpu wherever it is installed, which complains at length on a machine without a TPU."""
    import jax

    is_asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if is_asked or importlib.util.find_spec("libtpu") is None or any(glob.glob(path) for path in _TPU_FILES):
        return
    # Plugins of other accelerators.
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None or not any(pkgutil.iter_modules(plugins.submodule_search_locations)):
        jax.config.update("jax_platforms", "cpu")


@contextmanager
def looking_for(platform: str) -> Iterator[None]:
    """The block is where JAX first looks for its devices, and they must be of this platform; empty takes any.

    Raises:
      DeviceMissing: it finds none.
      GangError: any would do, but for what JAX_PLATFORMS asks for that is not there.
    """
    import jax

    if not platform:
        _leave_out_absent_tpus()
    why = ""
    try:
        yield
        found = jax.local_devices()[0].platform if platform else ""
    except (AssertionError, RuntimeError) as error:
        # JAX has no type of its own for this. Where it has no plugin for `cuda`, it has no words either.
        asked = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
        is_bare = isinstance(error, AssertionError) and not str(error) and bool(asked)
        # Its advice would let the process run on something else.
        why = f"no plugin for {asked}" if is_bare else str(error).partition(" (set JAX_PLATFORMS")[0]
        if not platform and asked and (is_bare or "nable to initialize backend" in why):
            raise GangError(
                f"Found no devices for JAX with JAX_PLATFORMS={asked} on machine {socket.gethostname()} ({why}). "
                "Expected some of each platform that it names. Install JAX with its plugin there, such as jax[cuda13] "
                "or jax[tpu], or unset JAX_PLATFORMS."
            ) from error
        if not is_bare and (not platform or f"initialize backend '{platform}'" not in why):
            raise
        found = ""
    if found != platform:
        raise DeviceMissing(
            f"Found no {platform.upper()} for JAX on machine {socket.gethostname()} ({why or f'but {found}'}). "
            f"Expected the chips that Ray reserved there. Install jax[{platform}] (libtpu) on it, and see whether "
            'another process holds its chips. Machines that only pretend to have some need platform="cpu" '
            "(--platform cpu)."
        )
