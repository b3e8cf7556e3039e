"""Which keys of a table somebody means who writes ids as they stand in the data: numbers or texts.

A number is its own key and a text the 64 bits of its hash. Features with the mode `hash` hash both once more, each with
its salt. So what is written may stand for several keys, one for each way in which features of the table read it.
"""

from __future__ import annotations

import json
import re

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.input_record import read_input
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.columns.id_columns import hashed_key, key_of_text
from podembed.workers.storage.store import Store


class WrittenKeys:
    """Reads what is written for one table. Immutable."""

    def __init__(self, store: Store, table: TableFiles) -> None:
        self._table = table
        # Where the run does not say how its features read ids, values are keys.
        meaning = read_input(store).meaning if table.is_dynamic else None
        features = [one for one in meaning.features if one.table == table.name] if meaning else []
        salts = {json.loads(one.settings["salt"]) for one in features if one.settings.get("mode") == '"hash"'}
        self._salts = sorted(salts)

    def of(self, written: int | str) -> tuple[int, ...]:
        """The keys that may be meant, of which the number itself or the hash of the text is the first; or the number of
        a row.

        Raises:
          ConfigurationError: a text for a table whose ids are the numbers of its rows, or no number of 64 bits.
        """
        key = self._plain(str(written))
        if self._table.is_dynamic and not -1 << 63 <= key < 1 << 63:
            raise ConfigurationError(
                f"Found key {key} for table '{self._table.name}'. Expected integers of 64 bits. Pass one of its keys."
            )
        return (key, *(hashed_key(key, salt) for salt in self._salts))

    def _plain(self, text: str) -> int:
        if re.fullmatch(r"-?\d+", text):
            number = int(text)
            # Unsigned keys are those of the same bits.
            is_unsigned = self._table.is_dynamic and 1 << 63 <= number < 1 << 64
            return number - (1 << 64) if is_unsigned else number
        if not self._table.is_dynamic:
            raise ConfigurationError(
                f"Found {text!r} for table '{self._table.name}'. Expected numbers of rows, 0 to "
                f"{self._table.num_rows - 1}. Pass numbers, after any hashing of raw ids."
            )
        return key_of_text(text.removeprefix("text:"))
