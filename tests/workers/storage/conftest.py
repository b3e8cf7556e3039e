"""Protocols of the filesystems that tests of the store use."""

from __future__ import annotations

import fsspec
import pytest

from tests.workers.storage.file_systems import CloudFileSystem, PlainFileSystem


@pytest.fixture(scope="session", autouse=True)
def _filesystems():
    fsspec.register_implementation("abfss", CloudFileSystem, clobber=True)
    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)
