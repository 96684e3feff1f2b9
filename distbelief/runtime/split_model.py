"""A split model as a user's own loop has it: it is called as the whole one, and every partition's script is given what
that gives.

What the model does at a partition are actions, which the replica's story plays (`SplitCompute`): forward when the model
is called, back when autograd comes to what it gave. Every partition's script goes back from what it was given, and all
gradients are alike; only that of the partition which computed the output is used.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from distbelief.core.effects import Batch
from distbelief.core.records import Parted
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.replica.split_compute import ScriptedPart
from distbelief.schedules.pipeline import Action, Pass
from distbelief.sharding.layout import Layout
from distbelief.split.graph import SplitGraph
from distbelief.split.layers import LossFunction
from distbelief.split.options import Split, SplitSteps
from distbelief.split.plan import choose
from distbelief.split.play import cut_minibatch
from distbelief.split.program import build, mapped
from distbelief.split.tidying import Shape
from distbelief.split.tracing import trace
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.order import key

LayOut = Callable[[nn.Module, SplitGraph], Layout]
"""Makes the layout of a whole model that is split so."""


class Cut(NamedTuple):
    """Part of a model that is left at a partition."""

    part: ScriptedPart
    settings: Settings
    batch_size: int
    """Most samples of a call."""
    likes: list[object]
    """Kind of each argument of a call, as `_like` has it."""
    gives: object
    """The shapes of what a call gives."""
    inputs: int
    """Number of arguments with which the model was traced."""
    signature: inspect.Signature
    """Signature of the model's forward."""


class SplitModel(nn.Module):
    """A model of which this process holds one part, once the first minibatch is asked for: its parameters are those of
    the part, by the names that the whole one has for them.

    Args:
        whole: the model.
        split: how.
        loss: of its output and the targets, as `loss(output, targets)`: the mean over the minibatch. Then the model is
            called with the targets after its own arguments, and gives the loss.
        example: the arguments of a call, of two samples or more, in the order in which the model's forward names them,
            with the targets behind them where there is a loss; None where that is a sample's first part (and, for a
            loss, its second).
        minibatch: the one at hand; raises where there is none.
        play: has actions of this partition played; False where the job went on without them.
        device: to which the part of a model that lies in the host's memory is moved.
    """

    def __init__(
        self, whole: nn.Module, split: Split, loss: LossFunction | None, example: tuple[object, ...] | None,
        minibatch: Callable[[], Batch], play: Callable[[Sequence[Action]], bool],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:  # fmt: skip
        super().__init__()
        self._whole = [whole]  # in a list, as this is no child
        self._split, self._loss, self._example = split, loss, example
        self._minibatch, self._play, self._device = minibatch, play, device
        self._here: Cut | None = None
        self._called: Batch | None = None
        """The minibatch of the last call."""
        self._goes_back = False
        """True until something has gone back from that."""
        self._anchor = torch.zeros((), requires_grad=True)
        """Leaf that autograd must reach, so that it goes back through what a call gives."""
        self._adopt(whole)

    @property
    def whole(self) -> nn.Module:
        """The whole model, which is there until it is cut."""
        return self._whole[0]

    def cut(
        self, partition: int, sample: Callable[[], object], settings: Settings, batch_size: int, lay_out: LayOut,
        tell: Callable[[Parted], None] | None,
    ) -> tuple[FlatModule, ScriptedPart]:  # fmt: skip
        """Keep what a partition has of the model, and drop the rest.

        Args:
            partition: of this process.
            sample: loads some samples, as the loop has them.
            settings: of the job.
            batch_size: most samples of a minibatch.
            lay_out: makes the layout of the whole model.
            tell: is told what the split is.

        Raises:
            UsageError: the model cannot be traced, or not be split so.
        """
        whole = self._whole.pop()
        arguments = self._of_sample(sample()) if self._example is None else self._example
        inputs, targets = (arguments, None) if self._loss is None else (arguments[:-1], arguments[-1])
        whole.train()
        traced = trace(whole, inputs, self._split.modules)
        steps = SplitSteps(batch_size=batch_size, schedule=settings.pipeline, microbatches=settings.microbatches)
        chosen = choose(self._split, traced, self._loss, targets, steps, everywhere=True)
        if tell:
            tell(Parted(chosen.split.text, chosen.told))
        graph = chosen.graph
        here = next(whole.parameters()).device
        device = self._device if here.type == "cpu" else here
        layout, program = lay_out(whole, graph), build(graph, partition, whole, device)
        self._adopt(program.module)
        part = ScriptedPart(program, settings, batch_size)
        likes = [_like(leaf) for leaf in pytree.tree_leaves(arguments)]
        gives = mapped(graph.outputs[partition], graph.shapes.__getitem__)
        signature = inspect.signature(whole.forward)
        self._here = Cut(part, settings, batch_size, likes, gives, len(inputs), signature)
        return FlatModule(program.module, layout=layout, partition=partition), part

    def _of_sample(self, sample: object) -> tuple[object, ...]:
        """The arguments of a call, as most loops make them of a minibatch."""
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        wanted = 1 if self._loss is None else 2
        if len(parts) < wanted:
            raise UsageError(
                "split(loss=...): a sample has one part, and what the model is called with cannot be told from it: "
                "give the arguments of a call, of two samples, as split(..., example=(inputs, targets))"
            )
        return tuple(parts[:wanted])

    def _adopt(self, module: nn.Module) -> None:
        """Have the tensors of another module, by the names that they have there."""
        vars(self).update(_parameters=module._parameters, _buffers=module._buffers, _modules=module._modules)

    # a call

    def forward(self, *arguments: object, **named: object) -> object:
        """Compute the output of the whole model, at every partition; with a loss, compute that.

        Raises:
            UsageError: there is no minibatch, it was called in it before, or with other arguments than it was traced
                with; nothing is to go back from it.
        """
        here = self._check_moment()
        inputs, targets = (arguments, ()) if self._loss is None else (arguments[:-1], arguments[-1:])
        if named:
            inputs = _placed(here, inputs, named)
        arguments = (*inputs, *targets)
        names = [*here.signature.parameters][: len(inputs)] + ["targets"] * len(targets)
        self._check_arguments(here, arguments, ", ".join(names) if named else "...")
        batch = self._called = self._minibatch()
        self._goes_back, part = True, here.part
        count = len(part.cut(_samples(arguments)))
        chance = key(here.settings.seed, batch.epoch, batch.index)
        part.compute(cut_minibatch(inputs, targets[0] if targets else None, count, chance))
        with _chance_kept(part.device):
            return self._output(here) if self._loss is None else self._of_loss(part)

    def _output(self, here: Cut) -> object:
        """The output of the model, from which the gradient goes back through its partitions."""
        part, passes = here.part, here.part.passes
        went = self._play(part.actions(Pass.FORWARD))
        leaves, structure = pytree.tree_flatten(passes.outputs[0] if went else _zeros(here))
        values = pytree.tree_leaves(part.program.outputs)
        floating = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]

        def back(gradients: Sequence[torch.Tensor | None]) -> None:
            known = zip(floating, gradients, strict=True)
            passes.begins = {values[at].value: gradient for at, gradient in known if gradient is not None}
            self._go_back(went, part.actions(Pass.BACKWARD))

        handed = self._hand_out(back, [leaves[at] for at in floating])
        for at, leaf in zip(floating, handed, strict=True):
            leaves[at] = leaf
        return pytree.tree_unflatten(leaves, structure)

    def _of_loss(self, part: ScriptedPart) -> torch.Tensor:
        """The loss of the minibatch: its gradient is known with it, and is the parameters' when the script goes
        back.
        """
        before = [parameter.grad for parameter in part.parameters]
        for parameter in part.parameters:
            parameter.grad = None
        went = self._play(part.actions())
        gradients = [parameter.grad for parameter in part.parameters]
        for parameter, gradient in zip(part.parameters, before, strict=True):
            parameter.grad = gradient

        def back(scales: Sequence[torch.Tensor | None]) -> None:
            self._go_back(went, ())
            for parameter, gradient in zip(part.parameters, gradients, strict=True):
                if went and gradient is not None and scales[0] is not None:
                    own = gradient * scales[0]
                    parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)

        batches, outputs = part.passes.batches, part.passes.outputs
        losses = [batch.weight * outputs[number] for number, batch in enumerate(batches)] if went else []
        [loss] = self._hand_out(back, [torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)])
        return loss

    def _hand_out(
        self, back: Callable[[Sequence[torch.Tensor | None]], None], given: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Tensors from which autograd comes to `back`, with their gradients."""
        handed: tuple[torch.Tensor, ...] = _HandedOut.apply(self._anchor, back, given)  # type: ignore[no-untyped-call]  # of torch
        return handed

    def _go_back(self, went: bool, actions: Sequence[Action]) -> None:
        if not self._goes_back or self._minibatch() is not self._called:
            raise UsageError(
                "backward() from what a split model gave before: each minibatch goes back once, before its "
                "optimizer.step()"
            )
        self._goes_back = False
        if went and actions:
            self._play(actions)

    def _check_moment(self) -> Cut:
        """Refuse a call that is not the one of a minibatch."""
        if self._here is None:
            raise UsageError("a split model is called in a minibatch of replica.batches(), and not before")
        if self._minibatch() is self._called or not torch.is_grad_enabled():
            raise UsageError(
                "a split model is called once in a minibatch, with its backward pass: evaluate the whole one, with "
                "the model.safetensors that the job leaves"
            )
        return self._here

    def _check_arguments(self, here: Cut, arguments: tuple[object, ...], example: str) -> None:
        """Refuse a call that the partitions cannot compute."""
        leaves = pytree.tree_leaves(arguments)
        given, wanted = [_like(leaf) for leaf in leaves], here.likes
        if given != wanted:
            raise UsageError(
                f"a split model was traced with {', '.join(map(str, wanted))}, and is called with "
                f"{', '.join(map(str, given))}: name what it is called with, split(..., example=({example}))"
            )
        if _samples(arguments) > here.batch_size:
            raise UsageError(
                f"a split model is called with {_samples(arguments)} samples: what crosses has room for those of a "
                f"minibatch, {here.batch_size}"
            )
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise UsageError("a split model is called with a tensor that needs a gradient, which stays here: detach it")

    # what is of whole models

    def train(self, mode: bool = True) -> SplitModel:
        """Nothing: it is in training.

        Raises:
            UsageError: it is to be evaluated.
        """
        if not mode:
            self._refuse("eval()", "evaluates")
        return self

    def state_dict(self, *_: object, **__: object) -> NoReturn:
        """Refused.

        Raises:
            UsageError: with what to do instead.
        """
        self._refuse("state_dict()", "saves")

    def load_state_dict(self, *_: object, **__: object) -> NoReturn:
        """Refused.

        Raises:
            UsageError: with what to do instead.
        """
        self._refuse("load_state_dict()", "loads")

    def _refuse(self, what: str, does: str) -> NoReturn:
        raise UsageError(
            f"{what} of a split model: this process holds a part of it, and nobody the whole. Load weights before "
            f"replica.split(), or with --init-from; a script that {does} it does so with model.safetensors, which the "
            "job leaves"
        )


class _HandedOut(torch.autograd.Function):
    """Function whose outputs a script is given, and whose backward pass calls `back`."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, back: Callable[..., None], given: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        ctx.set_materialize_grads(False)
        return tuple(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.back(gradients)
        return None, None, None


def _placed(here: Cut, inputs: tuple[object, ...], named: Mapping[str, object]) -> tuple[object, ...]:
    """The arguments of a call in the order in which the model's forward names them: as many as it was traced with, and
    those behind them that are not the defaults, which it was traced with too.
    """
    try:
        call = here.signature.bind(*inputs, **named)
    except TypeError as error:
        raise UsageError(f"a split model is called as forward{here.signature}: {error}") from None
    call.apply_defaults()
    for name, parameter in reversed([*here.signature.parameters.items()]):
        if len(call.arguments) > here.inputs and _like(call.arguments[name]) == parameter.default:
            del call.arguments[name]
        else:
            break
    return *call.args, *call.kwargs.values()


@contextlib.contextmanager
def _chance_kept(device: torch.device) -> Iterator[None]:
    """Leave the script's own chance as it is: what nodes draw has keys of its own, and each partition draws
    otherwise.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        yield


def _zeros(here: Cut) -> object:
    """Make zeros in the form of an output that nobody computes any more."""

    def zeros(shape: object) -> object:
        if not isinstance(shape, Shape):
            return shape
        return torch.zeros(shape.at(here.part.samples[0]), dtype=shape.dtype, device=here.part.device)

    return pytree.tree_map(zeros, here.gives)


def _samples(arguments: object) -> int:
    """Return the number of samples of the first tensor that has any."""
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return len(leaf)
    raise UsageError("a split model is called without a tensor that has samples in its first dimension")


def _like(leaf: object) -> object:
    """Return the part of an argument that does not differ between minibatches: of a tensor its dtype and the sides of a
    sample.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return f"{str(leaf.dtype).removeprefix('torch.')} {['n', *leaf.shape[1:]] if leaf.ndim else []}"
