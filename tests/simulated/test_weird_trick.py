"""One weird trick, simulated: by samples it goes on paying at 8 workers, by neurons alone it never does."""

import pytest
import recipe


@pytest.mark.long
def test_by_samples_workers_pay_as_they_did_in_the_paper() -> None:
    trick = recipe.load("one_weird_trick.py")
    found = {workers: trick.speedup(workers) for workers in trick.PAPER}
    for workers, speedup in found.items():
        assert speedup == pytest.approx(trick.PAPER[workers], rel=0.15)
    each = [speedup / workers for workers, speedup in found.items()]
    assert 1 > min(each[:2]) > each[2] > 0.75
    assert trick.speedup(8, "neurons") < 1.2 < trick.speedup(8, "filters") < found[8]
