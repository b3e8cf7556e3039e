"""Machines as namespaces: a hub and hosts behind one switch, each with its own network, process numbers, host name,
memory files and local disk; tests cut the links and the power.

Needs root and `ip`. Nothing of it has a name outside: a machine lives as long as the process that holds it, and all its
processes end with that one. A cut teaches one side a wrong hardware address for the other, so packets leave and reach
nobody, as with a broken cable or a lost route; no connection is closed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 120
NOWHERE = "02:00:00:00:00:fe"


@dataclass(frozen=True)
class Machine:
    """A hub or a host. `init` is its first process, as this namespace numbers it; `address` its own on the switch."""

    init: int
    address: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs inside, in the root folder."""
        return ["nsenter", "--target", str(self.init), "--net", "--uts", "--mount", "--pid", *arguments]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> dict[int, str]:
        """What runs inside: process numbers, as this namespace has them, and command lines."""
        found = {}
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{self.init}/ns/pid")
            for entry in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    # Of one that has ended and waits for its parent the command line is empty.
                    if os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                        text = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found |= {int(entry): text} if text else {}
        return found


@dataclass(frozen=True)
class Network:
    """The hub, which is machine 0, and the hosts."""

    machines: Sequence[Machine]

    def cut(self, sender: int, receiver: int) -> None:
        """What `sender` says to `receiver` is lost from now on."""
        address = self.machines[receiver].address
        self.machines[sender].run(
            *("ip", "neigh", "replace", address, "lladdr", NOWHERE, "nud", "permanent", "dev", "port")
        )

    def cut_off(self, number: int) -> None:
        """A host hears nobody and is heard by nobody."""
        for other in range(len(self.machines)):
            if other != number:
                self.cut(number, other)
                self.cut(other, number)

    def heal(self) -> None:
        """All links work again."""
        for sender in self.machines:
            for receiver in self.machines:
                if receiver is not sender:
                    with contextlib.suppress(RuntimeError):
                        sender.run("ip", "neigh", "del", receiver.address, "dev", "port")

    def lose_power(self, number: int) -> None:
        """All processes of a host end at once, and its kernel closes no connection any more."""
        self.machines[0].run("ip", "link", "set", f"to{number}", "down")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.machines[number].init, signal.SIGKILL)


def why_not() -> str | None:
    """Why there can be no such network here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "nsenter", "mount", "hostname"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    try:
        with network(1) as found:
            found.cut_off(1)
            found.heal()
            return None
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {error}"


@contextlib.contextmanager
def network(num_hosts: int, *, local_disk: Path | None = None) -> Iterator[Network]:
    """A hub with a switch and so many hosts.

    Args:
      local_disk: a folder that each machine has for itself, in memory; all else of the disk they share.
    """
    addresses = [f"10.77.0.{number + 1}" for number in range(num_hosts + 1)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pn-")))
        hosts = folder / "hosts"
        names = "".join(f"{address} machine{number}\n" for number, address in enumerate(addresses))
        hosts.write_text(f"127.0.0.1 localhost\n{names}")
        own = "".join(f" && mount -t tmpfs machine {path}" for path in ("/dev/shm", local_disk) if path is not None)
        machines = [
            Machine(
                init=_init_of(stack, f"hostname machine{number} && mount --bind {hosts} /etc/hosts{own}"),
                address=address,
            )
            for number, address in enumerate(addresses)
        ]
        hub = machines[0]
        hub.run("ip", "link", "add", "port", "type", "bridge")
        for number, machine in enumerate(machines):
            machine.run("ip", "link", "set", "lo", "up")
            if number:
                # In the hub's namespace, so that the peer is named from inside of it; then it moves.
                hub.run("ip", "link", "add", f"to{number}", "type", "veth", "peer", "name", f"of{number}")
                _move(hub, f"of{number}", machine)
                machine.run("ip", "link", "set", f"of{number}", "name", "port")
                hub.run("ip", "link", "set", f"to{number}", "master", "port", "up")
            machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", "port")
            machine.run("ip", "link", "set", "port", "up")
        yield Network(machines)


def _move(hub: Machine, link: str, machine: Machine) -> None:
    """Gives a link of the hub to a machine; from outside of the hub's process numbers, which do not know the
    machine.
    """
    command = ["nsenter", "--target", str(hub.init), "--net", "ip", "link", "set", link, "netns", str(machine.init)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _init_of(stack: contextlib.ExitStack, prepare: str) -> int:
    """Makes a machine's namespaces. Returns the process number of its first process; when that goes, all of the
    machine's processes do.
    """
    kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # A shell that goes on takes in the remains of processes whose parents ended before them.
    holder = subprocess.Popen(
        ["unshare", *kinds, "sh", "-c", f"{prepare} && echo ready && while sleep 5; do :; done"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stack.callback(_end, holder)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"ready\n":
        raise RuntimeError(f"unshare made no machine: {holder.stderr.read().decode().strip()}")
    return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait(PATIENCE_S)
    for stream in (holder.stdout, holder.stderr):
        if stream is not None:
            stream.close()
