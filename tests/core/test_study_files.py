"""Studies as files: what one says, and what is refused at the door: with the file, the line and the nearest word."""

from pathlib import Path
from typing import Any

import pytest

from distbelief.cli.study import check
from distbelief.errors import UsageError
from distbelief.lab.study import definition

WHOLE = """\
title = "A study"
seeds = [0, 1]
tuning_seeds = [7]
targets = [0.9, 0.8]
[common]
epochs = 2
lr = 0.1
[cluster]
compute = "constant:1ms"
[[arms]]
name = "serial"
task = "digits"
strategy = "single"
[[arms]]
name = "downpour"
task = "digits"
strategy = "downpour"
place = "simulated"
without = ["lr"]
options = {optimizer = "adagrad"}
each = {replicas = [1, 4]}
grid = {lr = [0.01, 0.02]}
"""


def read(text: str, folder: Path) -> definition.Study:
    file = folder / "a.toml"
    file.write_text(text)
    study = definition.read(file)
    check(study, file)
    return study


def test_a_file_says_which_arms_there_are_and_what_each_is(tmp_path: Path) -> None:
    study = read(WHOLE, tmp_path)
    assert [arm.name for arm in study.arms] == ["serial", "downpour, replicas 1", "downpour, replicas 4"]
    assert study.arms[0].words == ("--epochs", "2", "--lr", "0.1")
    last = study.arms[2]
    assert " ".join(last.words) == "--compute constant:1ms --epochs 2 --optimizer adagrad --replicas 4"
    assert (last.tuned, last.grid, last.with_value(0.02)[-2:]) == ("--lr", (0.01, 0.02), ("--lr", "0.02"))
    assert (study.targets, study.baseline, study.tuning_seeds) == ((0.8, 0.9), "serial", (7,))


def test_a_file_from_windows_is_the_same_study(tmp_path: Path) -> None:
    assert read("\ufeff" + WHOLE.replace("\n", "\r\n"), tmp_path) == read(WHOLE, tmp_path)


def test_a_farm_divides_its_budget_among_its_members(tmp_path: Path) -> None:
    text = WHOLE.replace("epochs = 2", 'epochs = 2\nbudget = "3s"')
    text = text.replace('strategy = "single"', 'strategy = "single"\nmembers = 4', 1)
    study = read(text, tmp_path)
    assert [arm.members for arm in study.arms] == [4, 1, 1]
    assert [arm.words[arm.words.index("--budget") + 1] for arm in study.arms] == ["0.75s", "3s", "3s"]


def test_all_arms_may_begin_with_one_model(tmp_path: Path) -> None:
    """Which is of the study's place, and has the cluster's words where that is simulated."""
    text = START.replace("[start]", 'place = "simulated"\n[start]')
    [start] = read(text, tmp_path).starts
    assert (start.task, start.strategy, start.place) == ("digits", "single", "simulated")
    assert start.words == ("--compute", "constant:1ms", "--epochs", "1")
    assert read(WHOLE, tmp_path).starts == ()


PROBLEMS = """\
title = "Ways on problems"
seeds = [3, 4]
tuning_seeds = [7]
place = "simulated"
observed = "Adagrad"
[start]
strategy = "single"
options = {lr = 0.2}
[common]
batch-size = 8
[[problems]]
name = "small"
task = "digits"
loss = 0.5
options = {epochs = 3}
[[problems]]
name = "large"
task = "mnist"
loss = 0.2
[[arms]]
name = "L-BFGS"
strategy = "sandblaster"
without = ["batch-size"]
options = {iterations = 5}
each = {replicas = [2]}
[[arms]]
name = "Adagrad"
strategy = "single"
options = {optimizer = "adagrad"}
"""


def test_an_arm_without_a_task_is_one_on_each_problem(tmp_path: Path) -> None:
    """With the problem's task, options and loss, and a beginning of its task."""
    text = PROBLEMS.replace('without = ["batch-size"]', 'without = ["batch-size", "epochs"]')
    with pytest.raises(UsageError, match=r"arm 'L-BFGS': without 'epochs': \[common\] has no such option"):
        read(text, tmp_path)
    study = read(text.replace("[common]", "[common]\nepochs = 1"), tmp_path)
    assert [arm.name for arm in study.arms[:2]] == ["small: L-BFGS, replicas 2", "large: L-BFGS, replicas 2"]
    small, large = study.arms[2:]
    assert (small.problem, small.task, small.loss, large.problem, large.loss) == ("small", "digits", 0.5, "large", 0.2)
    assert " ".join(small.words) == "--epochs 3 --batch-size 8 --optimizer adagrad"
    assert [(start.name, start.task) for start in study.starts] == [
        ("start, small", "digits"),
        ("start, large", "mnist"),
    ]
    assert study.start(large) == study.starts[1]
    assert study.start(study.starts[1]) is None


def test_a_study_is_run_with_more_seeds_and_other_numbers_of_replicas_where_asked(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(WHOLE)
    study = definition.read(file, 4, [2, 8, 16])
    assert study.seeds == (0, 1, 2, 3)
    assert [arm.name for arm in study.arms] == ["serial", *(f"downpour, replicas {number}" for number in (2, 8, 16))]
    with pytest.raises(UsageError, match="seed 7 is in seeds and in tuning_seeds"):
        definition.read(file, 8)
    file.write_text(WHOLE.replace("each = {replicas = [1, 4]}\n", ""))
    with pytest.raises(UsageError, match="--replicas: no arm has several numbers of replicas"):
        definition.read(file, 0, [2])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('observed = "Adagrad"', 'observed = "Adagrat"'), "unknown way that is observed 'Adagrat'; did you mean 'Ad"),
        (('observed = "Adagrad"\n', ""), "unknown way that is observed ''"),
        (("loss = 0.5", "loss = 0.0"), r"Expected `float` > 0.0 - at `\$.problems\[0\].loss`"),
        (("loss = 0.5", "los = 0.5"), r"unknown key of problems\[0\] 'los'; did you mean 'loss'"),
        (('"digits"', '"digitz"'), "arm 'small: L-BFGS, replicas 2': unknown task 'digitz'"),
    ],
)
def test_a_wrong_problem_is_refused_with_its_place(change: tuple[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        read(PROBLEMS.replace(*change), tmp_path)


@pytest.mark.parametrize("name", definition.names())
@pytest.mark.long
def test_the_packages_own_studies_can_be_run(name: str) -> None:
    file = definition.find(name)
    study = definition.read(file)
    check(study, file)
    assert study.question


BEGIN = '\ntask = "digits"\nstrategy = "single"\noptions = {epochs = 1}\n'
START = WHOLE.replace("[common]", f"[start]{BEGIN}[common]")

WRONG = {
    "an unknown key": (("seeds =", "seedz ="), r"a\.toml: unknown key of a study 'seedz'; did you mean 'seeds'"),
    "an unknown option": (("optimizer =", "optimiser ="), r"a\.toml: .*no option --optimiser; did you mean --opt"),
    "an option of another strategy": (
        ('"single"', '"single"\noptions = {push-every = 2}'),
        r"a\.toml: arm 'serial': .*no option --push-every: it belongs to strategy downpour",
    ),
    "a value out of bounds": (("epochs = 2", "epochs = 0"), r"a\.toml: arm 'serial': --epochs 0: must be 1 or more"),
    "an unknown place": (('"simulated"', '"simulatd"'), r"a\.toml: arm 'downpour': unknown place 'simulatd'"),
    "a wrong word of the cluster": (("constant:1ms", "constant:1mz"), r"a\.toml: arm 'downpour, replicas 1': .*mz"),
    "a seed twice": (("[0, 1]", "[1, 1]"), r"a\.toml: seeds: one seed is listed twice"),
    "tuned on the same seeds": (("[7]", "[1]"), r"a\.toml: seed 1 is in seeds and in tuning_seeds"),
    "a grid, and no seeds for it": (("tuning_seeds = [7]", ""), r"a\.toml: arm 'downpour, .*name tuning_seeds"),
    "a target that is no fraction": (("[0.9, 0.8]", "[97]"), "target 97.0: is neither a test accuracy from 0 to 1"),
    "a baseline that is no arm": (("[common]", 'baseline = "serail"\n[common]'), r"a\.toml: .*did you mean 'serial'"),
    "without what nobody has": (('["lr"]', '["lrr"]'), r"a\.toml: arm 'downpour': without 'lrr'"),
    "an option that is the study's": (
        ("lr = 0.1", "lr = 0.1\nseed = 3"),
        r"a\.toml: arm 'serial': --seed: the study sets it itself",
    ),
    "two arms of one name": (
        ("[[arms]]", '[[arms]]\nname = "serial"\ntask = "digits"\nstrategy = "single"\n[[arms]]', 1),
        r"a\.toml: two arms are called 'serial'",
    ),
    "compressing no arm": (
        ("[[arms]]", '[[arms]]\nname = "small"\ncompress = "cereal"\n[[arms]]', 1),
        r"a\.toml: arm 'small': unknown arm to compress 'cereal'",
    ),
    "a farm's budget that is no time": (
        ('strategy = "single"', 'strategy = "single"\nmembers = 2\noptions = {budget = "soon"}'),
        r"a\.toml: arm 'serial': --budget 'soon': is a time such as 45s",
    ),
    "compressing a farm": (
        ('strategy = "single"', 'strategy = "single"\nmembers = 2\n[[arms]]\nname = "b"\ncompress = "serial"'),
        r"a\.toml: arm 'b': unknown arm to compress 'serial'",
    ),
    "no TOML": (("seeds = [0, 1]", "seeds = [0, 1"), r"a\.toml is no TOML: .*line"),
}


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused_with_its_place_and_the_nearest_word(
    change: tuple[Any, ...], told: str, tmp_path: Path
) -> None:
    text = WHOLE.replace(*change)
    assert text != WHOLE
    with pytest.raises(UsageError, match=told):
        read(text, tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            ('task = "digits"\nstrategy = "single"\noptions', "strategy = 'single'\noptions"),
            r"a\.toml: arm 'serial': its task is not that of \[start\], which names none",
        ),
        (("options = {epochs = 1}", "options = {epocs = 1}"), r"a\.toml: arm 'start': .*did you mean --epochs"),
        (("options = {epochs = 1}", "optionz = {epochs = 1}"), r"a\.toml: unknown key of start 'optionz'"),
        (('task = "digits"', 'task = "mnist"', 1), r"a\.toml: arm 'serial': its task is not that of \[start\], mnist"),
        (("lr = 0.1", 'lr = 0.1\ninit-from = "a"'), r"a\.toml: arm 'serial': init-from: all begin with the model"),
        (('name = "serial"', 'name = "start"'), r"a\.toml: two arms are called 'start'"),
    ],
)
def test_a_wrong_beginning_is_refused_with_its_place(change: tuple[Any, ...], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        read(START.replace(*change), tmp_path)


def test_grids_are_of_equal_size(tmp_path: Path) -> None:
    text = WHOLE.replace('strategy = "single"', 'strategy = "single"\nwithout = ["lr"]\ngrid = {lr = [0.1]}')
    with pytest.raises(
        UsageError, match=r"a\.toml: .*its grid has 2 values, but that of 'serial' has 1: give all the same number"
    ):
        read(text, tmp_path)
