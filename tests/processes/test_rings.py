"""A long ring of tests goes on where it was."""

from pathlib import Path

import pytest
import rings
from rings import Step


def test_a_ring_that_was_interrupted_goes_on_behind_its_last_line_and_tells_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    steps = [
        Step(name, ("sh", "-c", f"echo {name} >> {tmp_path}/run; exit {status}"))
        for name, status in (("a", 0), ("b", 1), ("c", 0))
    ]
    monkeypatch.setattr(rings, "ROOT", tmp_path)
    monkeypatch.setattr(rings, "steps_of_all", lambda: steps)
    run = rings.run

    def interrupted(step: Step, log: rings.Log, folder: str) -> None:
        if step.name == "b":
            raise KeyboardInterrupt
        run(step, log, folder)

    monkeypatch.setattr(rings, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rings.main("all")
    monkeypatch.setattr(rings, "run", run)
    assert rings.main("all") == 1
    assert (tmp_path / "run").read_text().split() == ["a", "b", "c"]
    assert rings.main("all") == 1, "what has failed is not forgotten"
    log = rings.Log("test-all")
    assert (log.names("passed"), log.names("FAILED")) == ({"a", "c"}, {"b"})
    (tmp_path / "tests" / "new.py").touch()
    assert not rings.Log("test-all").names(), "of other sources nothing is known"
