"""`LinkPoll`: which links can move, as the kernel says.

It stands on `select.epoll` itself. The `selectors` of Python make an object for every event, which costs as much as the
event.
"""

from __future__ import annotations

import select

from podembed.workers.mesh.aborting import AbortSignal
from podembed.workers.mesh.link import READ, WRITE, Link


class LinkPoll:
    """Waits for links, and for a request to stop. Mutated: `watched` of the links.

    Args:
      abort_signal: wakes every wait once it is set.
    """

    def __init__(self, abort_signal: AbortSignal) -> None:
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}
        self._epoll.register(abort_signal.fileno(), select.EPOLLIN)

    def watch(self, link: Link) -> None:
        """From now on waits for what the link can do next."""
        interest = link.interest
        if interest == link.watched:
            return
        descriptor = link.connection.fileno()
        # A connection of which nothing is wanted is left out, since the end of one is reported all the time.
        if not interest:
            self._epoll.unregister(descriptor)
            del self._links[descriptor]
        elif not link.watched:
            self._epoll.register(descriptor, interest)
            self._links[descriptor] = link
        else:
            self._epoll.modify(descriptor, interest)
        link.watched = interest

    def ready(self, wait_s: float) -> list[tuple[Link | None, bool, bool]]:
        """Links that can move, at the latest after so long: each with whether it can read, and write. None is the
        request to stop.
        """
        found = self._epoll.poll(wait_s, len(self._links) + 1)
        # A broken connection shows as neither; both ways then find out what is wrong.
        return [
            (self._links.get(descriptor), bool(events & ~WRITE), bool(events & ~READ)) for descriptor, events in found
        ]

    def close(self) -> None:
        """Frees the descriptor."""
        self._epoll.close()
