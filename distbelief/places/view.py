"""View of a job while it runs."""

from __future__ import annotations

from distbelief.core.values import CheckedStruct


class View(CheckedStruct, frozen=True):
    """View of a job while it runs."""

    quiet: bool = True
    json: bool = False
    title: str = ""
    """Description of the job, shown as it starts."""

    def show_start(self) -> None:
        """Print what begins, at once, since importing torch comes next and takes seconds."""
        if self.title and not (self.quiet or self.json):
            print(f"starting {self.title}", flush=True)


UNSEEN = View()
