"""Model of a network between the roles of a simulated cluster: its links, and when they are cut."""

from __future__ import annotations

from distbelief.core.values import CheckedStruct
from distbelief.errors import UsageError


class Outage(CheckedStruct, frozen=True):
    """From `start` until `stop`, in seconds, the roles of one side cannot reach those of the other."""

    start: float
    stop: float
    side: tuple[str, ...]
    """The roles of one side; all others are on the other one."""

    def check(self) -> None:
        """Refuse an impossible outage.

        Raises:
            UsageError: naming the value.
        """
        if not 0 <= self.start < self.stop < float("inf"):
            raise UsageError(
                f"network outage from {self.start} s until {self.stop} s: it must begin at 0 or later, last, and end"
            )
        if not self.side:
            raise UsageError(
                f"network outage from {self.start} s until {self.stop} s: nobody is on its side; name a role, such as "
                "'replica 1'"
            )


class NetworkModel(CheckedStruct, frozen=True):
    """Model of a network. Times in seconds, rates in bytes per second."""

    latency: float = 50e-6
    bandwidth: float = 1.25e9
    jitter: float = 0.0
    """Each message takes up to this fraction of the latency longer, uniformly."""
    delay_chance: float = 0.0
    """Chance that a message is delayed by `delay` more, as by loss and retransmission."""
    delay: float = 0.0
    reduction: float = 0.0
    """Seconds per byte of a gradient that is added to another where it arrives."""
    local_latency: float = 0.0
    """Latency between two roles of one host; 0 is that of all links, or on `Hosts` that of shared memory."""
    local_bandwidth: float = 0.0
    """Bandwidth between two roles of one host; 0 is that of all links; in the memory of `Hosts` nothing is sent."""
    outages: tuple[Outage, ...] = ()
    """When who cannot reach whom."""

    def check(self) -> None:
        """Refuse a network that cannot be.

        Raises:
            UsageError: naming the value.
        """
        for name in ("latency", "jitter", "delay", "reduction", "local_latency"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"network {name} {getattr(self, name)} must be 0 or more, and finite")
        if not self.local_bandwidth >= 0:
            raise UsageError(f"network local_bandwidth {self.local_bandwidth} must be 0 or more")
        if not self.bandwidth > 0:
            raise UsageError(f"network bandwidth {self.bandwidth} must be more than 0")
        if not 0 <= self.delay_chance <= 1:
            raise UsageError(f"network delay chance {self.delay_chance} must be between 0 and 1")
        for outage in self.outages:
            outage.check()
