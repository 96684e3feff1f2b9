"""The model of a user's own loop: its tensors stay the user's, and what is fetched is copied into them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made import made
from torch import nn

from distbelief.core.optimizer import GroupOption, optim
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.runtime.server_optimizer import ServerOptimizer
from distbelief.server import optimizers
from distbelief.sharding.layout import Range
from distbelief.tasks import users_tensors
from distbelief.tasks.flat import FlatModule, layout_of


class Centred(nn.Module):
    """Assigns its buffers anew, and keeps a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.alias = self.two.weight.detach()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * inputs.mean(0)
        return self.two(self.one(inputs - self.mean).tanh())  # type: ignore[no-any-return]


def bound(model: nn.Module) -> tuple[FlatModule, torch.Tensor, torch.Tensor]:
    """A user's model, and the vectors that it is bound to: of gradients, and of what is fetched, as the model began."""
    flat = FlatModule(model, owned=True)
    slot, landing = (torch.zeros(flat.held.size, dtype=torch.uint8) for _ in range(2))
    flat.write(landing)
    flat.bind([slot], [landing])
    flat.swap(0)
    return flat, slot, landing


def test_what_is_fetched_is_copied_into_tensors_that_stay_and_whatever_refers_to_them_follows() -> None:
    model = Centred()
    held = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    flat, _, landing = bound(model)
    for weight in flat.trained_in(landing):
        weight.fill_(3.0)
    flat.swap(0)
    assert {name: (t, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()} == held
    assert (model.alias == 3.0).all()
    assert model.two.weight.untyped_storage().nbytes() == model.two.weight.nbytes


def test_a_step_between_forward_and_backward_is_seen_by_autograd() -> None:
    model = Centred()
    flat, *_ = bound(model)
    loss = model(torch.ones(4, 3)).sum()
    flat.swap(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_the_parts_that_have_come_are_copied() -> None:
    """Of several models that step in turn, what the others have computed may still be gone back from."""
    models = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    flat = FlatModule(models, layout=layout_of(models, several=True), owned=True)
    landing = torch.zeros(flat.held.size, dtype=torch.uint8)
    flat.bind([], [landing])
    flat.swap(0)
    for weight in flat.trained_in(landing):
        weight.fill_(3.0)
    flat.swap(0, [flat.layout.models[1]])
    assert [bool((one == 3.0).all()) for one in flat.trained] == [False, False, True, True]


def test_buffers_are_pushed_as_the_module_has_them() -> None:
    model = Centred()
    flat, slot, landing = bound(model)
    model(torch.ones(4, 3))
    flat.follow()
    flat.carry_buffers(0)
    [mean] = [slice(entry.start, entry.stop) for entry in flat.layout.entries if entry.tensor.name == "mean"]
    assert slot[mean].view(torch.float32).tolist() == [0.5] * 3
    before = model.mean
    landing[mean].view(torch.float32).fill_(7.0)
    flat.swap(0)
    assert model.mean is before
    assert model.mean.tolist() == [7.0] * 3


def test_a_push_covers_what_has_a_gradient_in_one_of_its_steps() -> None:
    model = Centred()
    flat, *_ = bound(model)
    entries = {entry.tensor.name: Range(entry.start, entry.stop) for entry in flat.layout.entries}
    whole = flat.layout.only.moving
    for first, names in ((True, ("one.weight", "two.bias")), (False, ("one.weight",)), (False, ("one.bias",))):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter) if name in names else None
        flat.accrue(0, first)
        assert flat.covered(0, whole) == whole.without(
            sorted(
                (span for name, span in entries.items() if name in {"one.bias", "two.weight"} - {*names}),
                key=lambda span: span.start,
            )
        )
    [part] = [entries["two.weight"]]
    assert flat.covered(0, part) == (Range(part.start, part.start),)
    flat.accrue(0, first=True)
    model.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    flat.accrue(0, first=True)
    assert flat.covered(0, whole) == (whole,)


def test_a_minibatch_without_a_step_leaves_its_statistics_to_the_next() -> None:
    model = Centred()
    flat, *_ = bound(model)
    model(torch.ones(4, 3))
    flat.follow()
    flat.hold_buffers()
    flat.swap(0)
    assert model.mean.tolist() == [0.5] * 3
    flat.carry_buffers(0)
    flat.swap(0)
    assert model.mean.tolist() == [0.0] * 3  # which is what the vector has


def test_a_gradient_is_pushed_without_what_it_was_made_of() -> None:
    model = Centred()
    flat, *_ = bound(model)
    with pytest.warns(UserWarning, match="create_graph"):
        model(torch.ones(4, 3)).square().sum().backward(create_graph=True)
    for first in (True, False):
        flat.accrue(0, first)
        assert [one.grad_fn for one in flat.gradients(0)] == [None] * 4
    for parameter in model.parameters():
        parameter.grad = None


def replaces(model: Any) -> None:
    model.one.weight = nn.Parameter(torch.zeros(3, 3))


def removes(model: Any) -> None:
    model.one.bias = None


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another parameter": (replaces, r"parameter 'one\.weight' was replaced"),
    "one less": (removes, r"parameter 'one\.bias' is gone"),
    "another dtype": (lambda model: model.double(), r"'one\.weight' is float64 \[3, 3\], and was float32 \[3, 3\]"),
    "a resized parameter": (
        lambda model: setattr(model.one.weight, "data", torch.zeros(2, 3)),
        r"is float32 \[2, 3\], and was float32 \[3, 3\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_made_another_is_refused_by_name(name: str) -> None:
    change, says = CHANGES[name]
    model = Centred()
    flat, *_ = bound(model)
    flat.follow()
    change(model)
    with pytest.raises(UsageError, match=f"^.*{says}: the model has changed since replica.optimizer\\(\\)"):
        flat.follow()


def test_what_is_not_saved_may_come_late() -> None:
    model = Centred()
    flat, *_ = bound(model)
    model.register_buffer("cache", torch.ones(1), persistent=False)
    flat.follow()
    model.get_buffer("cache").resize_(5)
    flat.follow()


def assigns(weight: Any) -> None:
    weight.data = weight.data * 2


def puts_back(weight: Any) -> None:
    before, weight.data = weight.data, weight.data * 2
    weight.data = before


def under_no_grad(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(2)


WRITES: dict[str, tuple[Callable[[Any], object], bool]] = {
    ".data": (lambda weight: weight.data.mul_(2), False),
    ".data =": (assigns, True),
    "numpy": (lambda weight: weight.detach().numpy().__imul__(2), False),
    "no_grad": (under_no_grad, True),
}
"""What writes, and whether it is seen in each step of a large model too."""


@pytest.mark.parametrize("way", WRITES)
def test_what_a_script_writes_to_a_parameter_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, at_once = WRITES[way]
    for small in (True, False):
        monkeypatch.setattr(users_tensors, "SMALL", 1 << 20 if small else 0)
        model = Centred()
        flat, *_ = bound(model)
        for _ in range(users_tensors.FIRST):
            assert flat.written() == []
        write(model.two.weight)
        steps = next(steps for steps in range(1, users_tensors.EVERY + 1) if flat.written())
        assert steps == (1 if small or at_once else users_tensors.EVERY - users_tensors.FIRST)
        assert flat.written() == ["two.weight"] or not small
        flat.swap(0)
        assert not model.two.weight.equal(2 * model.two.weight)
        assert flat.written() == []


def test_values_that_are_put_back_are_no_write_and_neither_are_buffers() -> None:
    model = Centred()
    flat, *_ = bound(model)
    puts_back(model.one.weight)
    model.mean += 1
    assert flat.written() == []
    with torch.no_grad():
        model.one.weight[0, 0] = torch.nan
    assert flat.written() == ["one.weight"]
    flat.initial(0)
    assert flat.gradients(0)[0][0, 0].isnan()


def test_a_local_step_is_no_write_of_the_script() -> None:
    model = Centred()
    flat, *_ = bound(model)
    model(torch.ones(4, 3)).sum().backward()
    flat.descend(0.1)
    assert flat.written() == []


def test_what_is_frozen_is_written_once_for_each_write() -> None:
    model = Centred()
    model.two.requires_grad_(False)
    flat, slot, _ = bound(model)
    model.two.weight.mul_(2)
    assert flat.written() == ["two.weight"]
    flat.initial(0)
    [frozen] = [slice(entry.start, entry.stop) for entry in flat.layout.entries if entry.tensor.name == "two.weight"]
    assert slot[frozen].view(torch.float32).equal(model.two.weight.flatten())
    assert flat.written() == []


def optimizer_of(name: str, settings: Settings = Settings(), **options: float) -> ServerOptimizer:  # noqa: B008  # frozen
    flat = FlatModule(nn.Linear(2, 2), owned=True)
    return ServerOptimizer(flat, None, settings, optimizers.defaults(optim(name, lr=0.1, **options)), bool)


def pushed_after(*minibatches: str) -> int:
    """The samples of a step in the last minibatch, of 1, 2, 4, ... samples, by what a script does in each."""
    flat = FlatModule(nn.Linear(2, 2), owned=True)
    optimizer = ServerOptimizer(flat, None, Settings(), optimizers.defaults(optim("sgd", lr=0.1)), bool)
    does = {
        "back": lambda: flat.module(torch.ones(1, 2)).sum().backward(),
        "twice": lambda: flat.module(torch.ones(1, 2)).square().sum().backward(create_graph=True),
        "overflows": lambda: (flat.module(torch.ones(1, 2)).sum() * math.inf).backward(),
        "zero": lambda: optimizer.zero_grad(),
        "zero in place": lambda: optimizer.zero_grad(set_to_none=False),
        "model zero": lambda: flat.module.zero_grad(),
        "model zero in place": lambda: flat.module.zero_grad(set_to_none=False),
    }
    for number, words in enumerate(minibatches):
        for word in filter(None, words.split(", ")):
            does[word]()
        if number < len(minibatches) - 1:
            optimizer.hold_over(1 << number)
    return optimizer.push_samples(1 << len(minibatches) - 1)


SKIPS: dict[str, tuple[list[str], int]] = {
    "accumulated": (["back", "back", "back"], 7),
    "accumulated beside one without a gradient": (["back", "", "back"], 5),
    "stepped where there is nothing to add": (["back", "back", ""], 3),
    "accumulated with a graph of the gradient": (["twice", "twice", "twice"], 7),
    "skipped": (["zero", "zero, back"], 2),
    "skipped with its gradient": (["back", "zero, back"], 2),
    "skipped with zeros": (["zero in place, back, zero in place", "back"], 2),
    "skipped, then zeroed in place": (["back", "zero in place, back"], 2),
    "skipped by the model": (["back", "model zero, back"], 2),
    "skipped by zeros of the model": (["back", "back, model zero in place", "back"], 4),
    "overflowed": (["overflows", "model zero in place, back"], 2),
    "accumulated onto what overflowed": (["back", "overflows", "model zero in place, back"], 4),
    "no gradient at all": ([""], 1),
}


@pytest.mark.parametrize("name", SKIPS)
@pytest.mark.filterwarnings("ignore:.*create_graph")
def test_a_step_has_the_samples_of_what_is_in_its_gradient(name: str) -> None:
    minibatches, samples = SKIPS[name]
    assert pushed_after(*minibatches) == samples


def test_what_was_pushed_is_in_no_later_step() -> None:
    flat = FlatModule(nn.Linear(2, 2), owned=True)
    optimizer = ServerOptimizer(flat, None, Settings(), optimizers.defaults(optim("sgd", lr=0.1)), bool)
    flat.module(torch.ones(1, 2)).sum().backward()
    assert optimizer.push_samples(4) == 4
    optimizer.hold_over(16)
    flat.module(torch.ones(1, 2)).sum().backward()
    assert optimizer.push_samples(2) == 2


def test_a_script_finds_the_options_of_the_jobs_optimizer_and_what_it_changes_goes_with_a_push() -> None:
    optimizer = optimizer_of("momentum", weight_decay=0.01)
    [group] = optimizer.param_groups
    assert group["momentum"] == 0.9
    assert optimizer.changes() == (1.0, ())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 10)
    group["weight_decay"] = 0.02
    rate, options = optimizer.changes()
    assert rate == pytest.approx(0.08)
    assert options == (GroupOption(0, "momentum", (0.95,)), GroupOption(0, "weight_decay", (0.02,)))
    adam = optimizer_of("adam")
    adam.param_groups[0]["betas"] = (0.8, 0.9)
    assert adam.changes() == (1.0, (GroupOption(0, "betas", (0.8, 0.9)),))


@pytest.mark.parametrize(
    ("name", "option", "value", "settings", "says"),
    [
        ("momentum", "nesterov", True, {}, "sets nesterov to True: it began as False, and only numbers can change"),
        ("adam", "betas", 0.9, {}, r"sets betas to 0.9: it began as \(0.9, 0.999\)"),
        ("adam", "eps", -1.0, {}, "sets eps to -1.0"),
        (
            "sgd",
            "momentum",
            0.9,
            {},
            "sets momentum to 0.9, but the job began without: launch with --optimizer momentum",
        ),
        (
            "adam",
            "eps",
            1e-6,
            {"strategy": "softsync"},
            "sets eps of .*softsync adds up pushes before a step: leave it",
        ),
        (
            "adam",
            "eps",
            1e-6,
            {"standby": 1},
            r"sets eps of .*a standby does not see the change \(--standby\): leave it",
        ),
    ],
)
def test_an_option_that_no_push_can_take_with_it_is_refused(
    name: str, option: str, value: object, settings: dict[str, Any], says: str
) -> None:
    optimizer = optimizer_of(name, made(**settings))
    optimizer.param_groups[0][option] = value
    with pytest.raises(UsageError, match=says):
        optimizer.changes()


@pytest.mark.parametrize(
    ("rates", "settings", "says"),
    [
        ((0.2, 0.2), Settings(lr_schedule="cosine"), r"and so does the job \(--lr-schedule, --warmup-epochs\)"),
        ((-0.1, -0.1), Settings(), "and must be 0 or more times that; start"),
    ],
)
def test_a_rate_that_no_push_can_take_with_it_is_refused(
    rates: tuple[float, float], settings: Settings, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        rates_of(rates, settings)


def rates_of(rates: tuple[float, float], settings: Settings = Settings()) -> object:  # noqa: B008  # frozen
    """What goes with a push where two groups, the second and third of all, have these rates."""
    model = nn.Linear(2, 2)
    groups = [{"params": [one]} for one in model.parameters()]
    flat = FlatModule(model, groups, owned=True)
    defaults = optimizers.defaults(optim("sgd", lr=0.1))
    optimizer = ServerOptimizer(flat, groups, settings, defaults, bool, first_group=1)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    return optimizer.changes()


def test_rates_of_groups_go_with_a_push_as_factors_of_what_they_were() -> None:
    assert rates_of((0.2, 0.2)) == (2.0, ())
    assert rates_of((0.2, 0.05)) == (1.0, (GroupOption(1, "lr", (2.0,)), GroupOption(2, "lr", (0.5,))))


def test_what_an_optimizer_keeps_is_neither_saved_nor_taken_without_a_word() -> None:
    optimizer, plain = optimizer_of("adam"), torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=0.3)
    held = optimizer.state_dict()
    assert held["param_groups"][0]["lr"] == 0.1
    with pytest.raises(UsageError, match=r"optimizer\.state\[\.\.\.\] has nothing: .*--resume"):
        _ = optimizer.state[optimizer.param_groups[0]["params"][0]]
    with pytest.raises(UsageError, match=r"state_dict\(\) has no state to save: .*--resume"):
        torch.save(held, io.BytesIO())
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    for one in plain.param_groups[0]["params"]:
        one.grad = torch.ones_like(one)
    plain.step()
    with pytest.raises(UsageError, match=r"load_state_dict\(\) of a state that is not empty: .*--resume"):
        optimizer.load_state_dict(plain.state_dict())
