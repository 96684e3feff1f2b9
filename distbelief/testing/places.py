"""Conformance suite of places: the promises of `distbelief.places.place`, checked on lives of real roles."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic
from typing import NamedTuple

from distbelief.places.place import Ended, Event, Place, Unable

PATIENCE_SECONDS = 60.0
"""Longest time until something happens, while `pump` is called."""
IDLE_PUMPS = 20
"""Calls of `pump` after which no more events are expected."""

Life = tuple[str, int]


class Site(NamedTuple):
    """Place without lives, and functions with which a test acts on it."""

    place: Place
    roles: tuple[str, str]
    """Two roles that it can start; their lives last until they are ended."""
    strike: Callable[[str, int], None]
    """Function that ends a life without the place, as kill -9 does."""
    there: Callable[[], Collection[Life]]
    """Function that lists the running lives, as the machine sees them and not the place."""
    pump: Callable[[], None]
    """Function that lets the place handle events, and returns soon."""
    close: Callable[[], None]
    """Function that ends the place with all lives."""


MakeSite = Callable[[Callable[[Event], None]], Site]
"""Function that makes a fresh site, whose place calls the given function with its events."""


class _Watch:
    """Site, with the ends that its place has reported."""

    def __init__(self, make_site: MakeSite) -> None:
        self.ends: list[Ended] = []
        self.site = make_site(self._take)
        self.one, self.other = self.site.roles
        self._closed = False

    def _take(self, event: Event) -> None:
        assert not isinstance(event, Unable), f"it reports that it cannot go on: {event.error}"
        if isinstance(event, Ended):
            self.ends.append(event)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.site.close()

    def start(self, *lives: Life) -> None:
        for life in lives:
            self.site.place.start(*life)
        self.until(lambda: {*lives} <= {*self.site.there()}, f"{lives} were started but are not running")

    def until(self, reached: Callable[[], object], what: str) -> None:
        end = monotonic() + PATIENCE_SECONDS
        while not reached():
            self.site.pump()
            assert reached() or monotonic() < end, (
                f"{what}; running: {[*self.site.there()]}, reported ends: {self.ends}"
            )

    def told(self, *lives: Life) -> None:
        """Check that the ends of some lives are reported once each, and no others."""
        self.until(lambda: len(self.ends) >= len(lives), f"the ends of {lives} are not reported")
        for _ in range(IDLE_PUMPS):
            self.site.pump()
        ends = [(end.role, end.incarnation) for end in self.ends]
        assert sorted(ends) == sorted(lives), f"the ends of {lives} must be reported once each; reported: {ends}"


def check_place(make_site: MakeSite) -> None:
    """Check what a supervisor relies on.

    A place starts lives. It reports the end of each exactly once, and whether it was killed. It ends lives on request,
    even if asked twice or after their end. It leaves none behind.

    Raises:
        AssertionError: a promise is broken; the message names it.
    """
    for check in (_starts, _tells_of_each_end, _ends_what_is_to_be_ended, _starts_the_next_life, _leaves_nobody):
        watch = _Watch(make_site)
        try:
            check(watch)
        finally:
            watch.close()


def _starts(watch: _Watch) -> None:
    """Check that each started role runs once, and no other."""
    watch.start((watch.one, 0), (watch.other, 0))
    assert sorted(watch.site.there()) == sorted([(watch.one, 0), (watch.other, 0)]), (
        f"other lives are running: {watch.site.there()}"
    )
    watch.told()


def _tells_of_each_end(watch: _Watch) -> None:
    """Check that the end of a killed life is reported once, as killed."""
    watch.start((watch.one, 0), (watch.other, 0))
    watch.site.strike(watch.other, 0)
    watch.told((watch.other, 0))
    [end] = watch.ends
    assert end.killed, f"{watch.other} was killed, but is not reported as killed: {end}"
    assert not end.done, f"{watch.other} was killed before it was done: {end}"
    assert (watch.one, 0) in watch.site.there(), f"{watch.one} has ended with {watch.other}"


def _ends_what_is_to_be_ended(watch: _Watch) -> None:
    """Check that a life can be ended, and that a second order to end it does nothing."""
    watch.start((watch.one, 0), (watch.other, 0))
    watch.site.place.end(watch.one, 0)
    watch.site.place.end(watch.one, 0)
    watch.until(lambda: (watch.one, 0) not in watch.site.there(), f"{watch.one} was to be ended, but still runs")
    watch.told((watch.one, 0))
    assert watch.ends[0].killed, f"{watch.one} was killed, but is not reported as killed: {watch.ends}"
    watch.site.place.end(watch.one, 0)
    watch.told((watch.one, 0))
    assert (watch.other, 0) in watch.site.there(), f"{watch.other} has ended with {watch.one}"


def _starts_the_next_life(watch: _Watch) -> None:
    """Check that a role's next life can begin, and that an order to end the previous life does not end it."""
    watch.start((watch.one, 0))
    watch.site.strike(watch.one, 0)
    watch.told((watch.one, 0))
    watch.start((watch.one, 1))
    watch.site.place.end(watch.one, 0)
    for _ in range(IDLE_PUMPS):
        watch.site.pump()
    assert (watch.one, 1) in watch.site.there(), f"life 0 of {watch.one} was to be ended, but life 1 was"
    watch.site.place.end(watch.one, 1)
    watch.told((watch.one, 0), (watch.one, 1))


def _leaves_nobody(watch: _Watch) -> None:
    """Check that no life is left after the end of a place."""
    watch.start((watch.one, 0), (watch.other, 0))
    watch.close()
    assert not watch.site.there(), f"it was closed, but these still run: {[*watch.site.there()]}"
