"""A split model in a script: it is called like the whole one, and gives every partition's script the same result.

A call consists of actions that the replica's client plays (`SplitCompute`): forward in the call, backward when autograd
reaches its result. Every partition's script goes back from that result, with the same gradients; only those of the
partition that computed the output are used.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Makes the layout of a whole model from its split."""


@dataclass(frozen=True)
class SplitCall:
    """A script's call of `Replica.split`, where its arguments are described."""

    split: Split
    loss: LossFunction | None = None
    example: tuple[object, ...] | None = None


class Cut(NamedTuple):
    """A partition's part of a split model."""

    part: ScriptedPart
    settings: Settings
    batch_size: int
    """Most samples of a call."""
    likes: list[object]
    """Form of each argument of a call; see `_like`."""
    gives: object
    """Shapes of a call's result."""
    inputs: int
    """Number of arguments when the model was traced."""
    signature: inspect.Signature
    """Signature of the model's forward."""


class SplitModel(nn.Module):
    """A model of which this process holds one part, from the first minibatch on.

    The parameters of the part keep the names that they have in the whole model.

    Args:
        minibatch: returns the current minibatch; raises an error if there is none.
        play: plays actions of this partition; returns False if the job went on without them.
        device: to which the part moves, if the model is on the host.
    """

    def __init__(
        self,
        whole: nn.Module,
        call: SplitCall,
        minibatch: Callable[[], Batch],
        play: Callable[[Sequence[Action]], bool],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        super().__init__()
        self._whole = [whole]  # in a list, or its parameters would count as this module's
        self._split, self._loss, self._example = call.split, call.loss, call.example
        self._minibatch, self._play, self._device = minibatch, play, device
        self._here: Cut | None = None
        self._called: Batch | None = None
        """Minibatch of the last call."""
        self._goes_back = False
        """True until the backward pass of the last call."""
        self._anchor = torch.zeros((), requires_grad=True)
        """Leaf that requires a gradient, so that autograd goes back through a call's result."""
        self._adopt(whole)

    @property
    def whole(self) -> nn.Module:
        """The whole model, until it is cut."""
        return self._whole[0]

    def cut(
        self,
        partition: int,
        sample: Callable[[], object],
        settings: Settings,
        batch_size: int,
        lay_out: LayOut,
        tell: Callable[[Parted], None] | None,
    ) -> tuple[FlatModule, ScriptedPart]:
        """Keep a partition's part of the model, and drop the rest.

        A model that cannot be traced, or cannot be split so, is refused. `sample` loads some samples, as the loop gets
        them. `batch_size` is the most samples in a minibatch. `tell` takes the record of the split.
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
        """Return the arguments of a call, as most loops take them from a minibatch."""
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        wanted = 1 if self._loss is None else 2
        if len(parts) < wanted:
            raise UsageError(
                "split(loss=...): a sample has only one part, which does not show the arguments of a call: pass those, "
                "of two samples, as split(..., example=(inputs, targets))"
            )
        return tuple(parts[:wanted])

    def _adopt(self, module: nn.Module) -> None:
        """Take another module's tensors and names as this one's."""
        vars(self).update(_parameters=module._parameters, _buffers=module._buffers, _modules=module._modules)

    # a call

    def forward(self, *arguments: object, **named: object) -> object:
        """Return the output of the whole model, or its loss, at every partition.

        A minibatch has one call, with arguments like those of the trace, and with gradients on. Any other call raises a
        `UsageError`.
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
        """Return the model's output, whose backward pass goes back through the partitions."""
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
        """Return the loss. Its gradients are computed with it; the script's backward pass hands them on."""
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
                    scaled = gradient * scales[0]
                    parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)

        batches, outputs = part.passes.batches, part.passes.outputs
        losses = [batch.weight * outputs[number] for number, batch in enumerate(batches)] if went else []
        [loss] = self._hand_out(back, [torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)])
        return loss

    def _hand_out(
        self, back: Callable[[Sequence[torch.Tensor | None]], None], outputs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs as tensors whose backward pass calls `back` with their gradients."""
        handed: tuple[torch.Tensor, ...] = _HandedOut.apply(self._anchor, back, outputs)  # type: ignore[no-untyped-call]  # of torch
        return handed

    def _go_back(self, went: bool, actions: Sequence[Action]) -> None:
        if not self._goes_back or self._minibatch() is not self._called:
            raise UsageError(
                "backward() from an earlier result of a split model: each minibatch has one backward pass, before its "
                "optimizer.step()"
            )
        self._goes_back = False
        if went and actions:
            self._play(actions)

    def _check_moment(self) -> Cut:
        """Refuse a call outside of a minibatch, or a second one in it."""
        if self._here is None:
            raise UsageError("a split model can be called only in a minibatch of replica.batches()")
        if self._minibatch() is self._called or not torch.is_grad_enabled():
            raise UsageError(
                "a split model is called once in each minibatch, with a backward pass: evaluate the whole model, with "
                "the job's model.safetensors"
            )
        return self._here

    def _check_arguments(self, here: Cut, arguments: tuple[object, ...], example: str) -> None:
        """Refuse arguments that the partitions cannot compute with."""
        leaves = pytree.tree_leaves(arguments)
        likes, traced = [_like(leaf) for leaf in leaves], here.likes
        if likes != traced:
            raise UsageError(
                f"a split model was traced with {', '.join(map(str, traced))}, and is called with "
                f"{', '.join(map(str, likes))}: show the arguments of a call, split(..., example=({example}))"
            )
        if _samples(arguments) > here.batch_size:
            raise UsageError(
                f"a split model is called with {_samples(arguments)} samples, and its buffers have room for those of a "
                f"minibatch, {here.batch_size}"
            )
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise UsageError("a split model is called with a tensor that requires a gradient: detach it")

    # methods that only a whole model has

    def train(self, mode: bool = True) -> SplitModel:
        """Return the model, which is always in training; refuse evaluation."""
        if not mode:
            self._refuse("eval()", "evaluates")
        return self

    def state_dict(self, *_: object, **__: object) -> NoReturn:
        self._refuse("state_dict()", "saves")

    def load_state_dict(self, *_: object, **__: object) -> NoReturn:
        self._refuse("load_state_dict()", "loads")

    def _refuse(self, what: str, does: str) -> NoReturn:
        raise UsageError(
            f"{what} of a split model: this process has only a part of it. Load weights before replica.split(), or "
            f"with --init-from; a script that {does} it does so with the job's model.safetensors"
        )


class _HandedOut(torch.autograd.Function):
    """Function that returns its outputs to a script, and calls `back` in its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, back: Callable[..., None], outputs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.back(gradients)
        return None, None, None


def _placed(here: Cut, inputs: tuple[object, ...], named: Mapping[str, object]) -> tuple[object, ...]:
    """Return a call's arguments in the order of the model's forward, as many as it was traced with.

    Further arguments are left out if they have their defaults, with which the model was traced.
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
    """Keep the script's generators as they are: nodes draw from their own keys, and differently at each partition."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        yield


def _zeros(here: Cut) -> object:
    """Return zeros in the form of an output that is not computed any more."""

    def zeros(shape: object) -> object:
        if not isinstance(shape, Shape):
            return shape
        return torch.zeros(shape.at(here.part.samples[0]), dtype=shape.dtype, device=here.part.device)

    return pytree.tree_map(zeros, here.gives)


def _samples(arguments: object) -> int:
    """Return the number of samples in the first tensor that has any."""
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return len(leaf)
    raise UsageError("a split model is called without a tensor that has samples in its first dimension")


def _like(leaf: object) -> object:
    """Return what an argument has in common in all minibatches: for a tensor, its dtype and the shape of a sample."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return f"{str(leaf.dtype).removeprefix('torch.')} {['n', *leaf.shape[1:]] if leaf.ndim else []}"
