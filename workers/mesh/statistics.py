"""What exchanges between hosts cost: bytes and seconds, as a value that adds up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStatistics:
    """What exchanges cost, for one or summed over many.

    Attributes:
      num_exchanges: how many are summed here.
      bytes_sent, bytes_received: payloads, without headers.
      seconds_blocked: spent waiting with nothing to move.
      seconds_total: from `begin` to the end of `finish`.
    """

    num_exchanges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_blocked: float = 0.0
    seconds_total: float = 0.0

    def __add__(self, other: ExchangeStatistics) -> ExchangeStatistics:
        return ExchangeStatistics(
            num_exchanges=self.num_exchanges + other.num_exchanges,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
            seconds_blocked=self.seconds_blocked + other.seconds_blocked,
            seconds_total=self.seconds_total + other.seconds_total,
        )
