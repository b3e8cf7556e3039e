"""What can go wrong between the system and its storage, as types with fields.

Every error says what was found, what was expected and what to do. None of them is raised for a wrong checksum or a
wrong manifest. Those belong to the modules that know what the bytes should have been (`chunks`, `strict_json`).
"""

from __future__ import annotations


class StorageError(Exception):
    """Base of everything the storage layer raises on purpose.

    Attributes:
      may_pass: whether a later save may work although nothing in this program changes. False where the run's own rules
        are broken: a name that is taken, a store that two writers can win.
    """

    may_pass = True


def may_pass(error: BaseException) -> bool:
    """Whether a save that failed so is worth another one later. Whatever the system says of a file may be mended from
    outside: a disk that is full, a mount that is gone, rights or credentials that ran out.
    """
    return error.may_pass if isinstance(error, StorageError) else isinstance(error, OSError)


class UnsafeName(StorageError):
    """A name that could leave the store's root, or that no writer of ours would have made."""

    may_pass = False

    def __init__(self, name: str, reason: str):
        shown = repr(name if len(name) <= 120 else name[:117] + "...")
        super().__init__(
            f"Name {shown} {reason}. Names are relative: segments of letters, digits, '.', '_' and '-' that start with "
            "a letter, a digit "
            "or '_', joined by '/'. If it was read from a file, that file is damaged or not ours: do not use it."
        )
        self.name = name
        self.reason = reason


class NameNotFound(StorageError):
    """Nothing is stored under this name."""

    def __init__(self, name: str, location: str):
        super().__init__(
            f"'{name}' is missing in {location}; a file was expected there. Restore it from a copy, or load an older "
            "commit."
        )
        self.name = name
        self.location = location

    @property
    def found(self) -> str:
        """A phrase for messages that say the rest themselves."""
        return "no file"


class NameTaken(StorageError):
    """A write that must not replace anything met an existing file."""

    may_pass = False

    def __init__(self, name: str, location: str):
        super().__init__(
            f"'{name}' already exists in {location}, but files are written once and never replaced. Two writers use "
            "one generation, or the same save ran twice: start a new generation."
        )
        self.name = name
        self.location = location


class NotAPlainFile(StorageError):
    """A symbolic link, a folder, a device or a pipe stands where a file or folder of ours should be."""

    def __init__(self, name: str, location: str, found: str):
        super().__init__(
            f"'{name}' in {location} is or passes through {found}; plain files and folders are expected, links are not "
            "followed. Replace it by a real file, or make the link the root of the store."
        )
        self.name = name
        self.location = location
        self.found = found


class NotAFolder(StorageError):
    """The root of a store is a file, or lies in one."""

    def __init__(self, message: str):
        super().__init__(message)

    @staticmethod
    def at(root: str, culprit: str) -> NotAFolder:
        return NotAFolder(
            f"{culprit} is no folder; one is expected there, since {root} is to hold a run's files. Choose another "
            "place (--storage, RunConfig(storage_path=...)), or correct the path of the run."
        )


class AccessRefused(StorageError, PermissionError):
    """The system or the service does not let this user at a file of the storage. Rights may be given from outside, so a
    later save may work.
    """

    @staticmethod
    def of(what: str, error: PermissionError) -> AccessRefused:
        return AccessRefused(
            f"{what} was refused: {error.strerror or error}. The right to read and write there is expected for the "
            "user of this program. Give it, or choose another place (--storage, RunConfig(storage_path=...))."
        )


class SystemRefused(StorageError, OSError):
    """The system failed at a file for a reason of its own, such as a folder that cannot be made. It may pass.

    Attributes:
      reason: the system's words.
    """

    reason = ""

    @staticmethod
    def of(what: str, error: OSError) -> SystemRefused:
        reason = error.strerror or str(error) or type(error).__name__
        refused = SystemRefused(
            f"{what} failed: {reason}. A place is expected where folders and files can be made. Correct the path, or "
            "choose another place (--storage, RunConfig(storage_path=...))."
        )
        refused.reason = reason
        return refused


class SyncRefused(StorageError):
    """A mount cannot make files or folders durable."""

    may_pass = False

    def __init__(self, location: str, reason: str):
        super().__init__(
            f"{location} lies on a mount whose fsync fails ({reason}), but a commit counts only once its files are "
            "durable. Use a local disk, NFS, or, in the place of a mounted bucket, its URL (s3://, gs://, abfs://)."
        )
        self.location = location
        self.reason = reason


class WrongSize(StorageError):
    """A file is longer or shorter than the reader expects. Raised before anything is allocated."""

    def __init__(self, name: str, *, found_bytes: int, expected: str):
        super().__init__(
            f"'{name}' holds {found_bytes} bytes; {expected} expected. The file is torn or not the one meant: load an "
            "older commit."
        )
        self.name = name
        self.found_bytes = found_bytes

    @property
    def found(self) -> str:
        """A phrase for messages that say the rest themselves."""
        return f"{self.found_bytes} bytes"


class StoreUnavailable(StorageError):
    """The storage kept failing with errors that usually pass. The last one is the cause."""

    def __init__(self, what: str, *, attempts: int, elapsed_s: float, last: BaseException):
        super().__init__(
            f"{what} failed {attempts} times in {elapsed_s:.1f} s, last with {type(last).__name__}: {last}. An answer "
            "within the deadline "
            "was expected: check the service and the network, then run again; committed state is not affected."
        )
        self.what = what
        self.attempts = attempts
        self.elapsed_s = elapsed_s


class StorageFull(StorageError):
    """A disk or a quota has no room left. What was written of the file is removed."""

    def __init__(self, what: str, error: OSError):
        super().__init__(
            f"{what} failed: {error.strerror or error}. Room for one more commit is expected beside those that are "
            "kept: free some, keep fewer commits, or use another storage. Committed state is not affected."
        )
        self.what = what


class ServiceRefused(StorageError):
    """The client of an object store raised something that trying again does not mend, such as missing credentials."""

    def __init__(self, location: str, error: BaseException):
        super().__init__(
            f"{location} cannot be used: {type(error).__name__}: {error}. A service that this process may read and "
            "write is expected. "
            "Check address, credentials and region in the environment of the program and of Ray's processes."
        )
        self.location = location


class StoreCannotCreateExclusively(StorageError):
    """Two writers could both believe that they created a file, so two drivers could both commit."""

    may_pass = False

    def __init__(self, location: str, found: str):
        super().__init__(
            f"{location} {found}; exactly one of several writers may create a name. Use a local disk, or s3://, gs:// "
            "or abfs:// with a current s3fs, gcsfs or adlfs; or, if you see to it that only one driver ever runs, "
            "--single-writer (RunConfig(single_writer=True))."
        )
        self.location = location
        self.found = found


class SingleWriterStore(UserWarning):
    """This store cannot create exclusively, and the user said that one driver runs: what protects a run from a second
    one is gone.
    """

    def __init__(self, location: str, found: str):
        super().__init__(
            f"{location} {found}. It is used for a single writer: a second driver on this run, also one that was "
            "thought dead, is not stopped. Both would commit, steps that one of them acknowledged may be lost, and it "
            "may delete files that the other needs."
        )
        self.location = location
        self.found = found
