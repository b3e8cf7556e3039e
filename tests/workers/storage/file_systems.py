"""Filesystems for tests of the store: a service with conditional puts and scripted faults, and one that decides no
race.
"""

from __future__ import annotations

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from podembed.workers.storage.retry import RetryClock

NO_WAIT = RetryClock(sleep=lambda _: None)


def key_of(path: str) -> str:
    """The name of an object without the protocol."""
    return path.split("://", 1)[-1].strip("/")


class CloudFileSystem(AsyncFileSystem):
    """Objects in a dictionary behind fsspec's asynchronous calls, with conditional puts and scripted faults."""

    protocol = "abfss"
    cachable = False
    objects: dict[str, bytes] = {}  # noqa: RUF012  # shared by instances, as a service is
    faults: list[tuple[str, str, Exception]] = []  # noqa: RUF012

    @classmethod
    def reset(cls, *faults: tuple[str, str, Exception]) -> None:
        """Faults are (method, "before" or "after" its effect, error), each used once."""
        cls.objects, cls.faults = {}, list(faults)

    def _fault(self, method: str, when: str) -> None:
        for fault in self.faults:
            if fault[:2] == (method, when):
                self.faults.remove(fault)
                raise fault[2]

    async def _pipe_file(self, path, value, mode="overwrite", **_):
        path = key_of(path)
        self._fault("pipe", "before")
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(value)
        self._fault("pipe", "after")

    async def _cat_file(self, path, start=None, end=None, **_):
        self._fault("cat", "before")
        return (await self._object(path))[start:end]

    async def _info(self, path, **_):
        self._fault("info", "before")
        path = key_of(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(path + "/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path, detail=True, **_):
        self._fault("ls", "before")
        path = key_of(path)
        below = {name[len(path) + 1 :].split("/")[0] for name in self.objects if name.startswith(path + "/")}
        if not below:
            raise FileNotFoundError(path)
        entries = [await self._info(f"{path}/{name}") for name in sorted(below)]
        return entries if detail else [entry["name"] for entry in entries]

    async def _rm_file(self, path, **_):
        await self._object(path)
        del self.objects[key_of(path)]

    async def _object(self, path):
        try:
            return self.objects[key_of(path)]
        except KeyError:
            raise FileNotFoundError(path) from None


class PlainFileSystem(AbstractFileSystem):
    """A filesystem that only offers fsspec's common calls, so nothing in it decides a race."""

    protocol = "plain"
    cachable = False
    files: dict[str, bytes] = {}  # noqa: RUF012

    def pipe_file(self, path, value, mode="overwrite", **_):
        self.files[key_of(path)] = bytes(value)

    def cat_file(self, path, start=None, end=None, **_):
        return self.files[key_of(path)][start:end]

    def info(self, path, **_):
        path = key_of(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.files[path]), "type": "file"}
