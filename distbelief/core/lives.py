"""Lives: which incarnation of each role is there, which are gone, and who will not come back."""

from __future__ import annotations

from distbelief.errors import RemoteProtocolError


class Lives:
    """Lives of roles, numbered 0, 1, 2, ...; a role that died is started again up to `restarts` times.

    A death is heard of by more than one way, and in any order with the birth of the next life: the first word of it is
    news, the others are not.

    >>> lives = Lives(restarts=1)
    >>> lives.begin("replica 0", 0); lives.end("replica 0", 0, died=True), lives.end("replica 0", -1, died=True)
    (True, False)
    >>> lives.over
    set()
    >>> lives.begin("replica 0", 1); lives.end("replica 0", 0, died=True), lives.end("replica 0", 1,
    ...     died=True), lives.over
    (False, True, {'replica 0'})
    """

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._here: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        """The last life of each role that is over."""
        self.over: set[str] = set()
        """Roles that have left, or have died in their last life."""

    def begin(self, role: str, incarnation: int) -> None:
        """A role is there.

        Raises:
            RemoteProtocolError: this life of it is gone already.
        """
        if incarnation <= self.gone.get(role, -1):
            raise RemoteProtocolError(f"{role} comes as incarnation {incarnation}, which is gone")
        self._here[role] = incarnation

    def here(self, role: str) -> int:
        """Return the life of a role that is there, or was last."""
        return self._here.get(role, 0)

    def last(self, role: str) -> int:
        """Return the last life of a role that is gone; -1 where none is."""
        return self.gone.get(role, -1)

    def end(self, role: str, incarnation: int, died: bool) -> bool:
        """A life is over (-1: the one that is there, or the next where none is); whether that is news, and no later
        life is there.
        """
        # a link that breaks does not say whose life it was: it is that of which we know
        if incarnation < 0:
            incarnation = self._here.get(role, self.gone.get(role, -1) + 1)
        if incarnation <= self.gone.get(role, -1):
            return False
        self.gone[role] = incarnation
        if not died or incarnation >= self._restarts:
            self.over.add(role)
        return incarnation >= self._here.get(role, 0)
