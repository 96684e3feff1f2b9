"""Time: recurrent layers at partitions, over chunks of the sequence; while one layer computes a chunk, the layer below
computes the next.

Partitions wait for their first chunk forward and their last one backward. If upper layers work longer, chunks begin
short and grow by that factor, so that no partition waits for the next chunk (lot streaming; Potts and Baker 1989,
*Flow shop scheduling with lot streaming*).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument

from distbelief.errors import UsageError
from distbelief.split.layers import Indices, edges
from distbelief.split.tidying import Shape
from distbelief.split.tracing import Traced

RECURRENT = (nn.GRU, nn.LSTM, nn.RNN)
State = fx.Node | tuple[fx.Node, ...]
"""State of a stack or a layer between time steps; an LSTM's is two tensors."""
CHUNKS = 4
ELEMENTWISE = 320
"""Operations that take as long as a gate's elementwise work for one unit and step."""


def unrolled(
    traced: Traced, nodes: Sequence[fx.Node], partitions: int, chunks: int
) -> tuple[Traced, dict[fx.Node, int]]:
    """Return the model with a node for each recurrent layer and chunk, and the partitions of those nodes."""
    stacks = [node for node in nodes if type(traced.called(node)) in RECURRENT]
    if not stacks:
        raise UsageError("--split time: there is no nn.GRU, nn.LSTM or nn.RNN to pipeline over chunks of its sequence")
    unrolling = _Unrolling(traced, partitions, chunks, _works(traced, stacks))
    for node in traced.graph.nodes:
        unrolling.take(node, node in stacks)
    unrolling.drop_unused()
    return replace(traced, model=unrolling.model, graph=unrolling.graph, shapes=unrolling.shapes), unrolling.partitions


def _works(traced: Traced, stacks: Sequence[fx.Node]) -> list[int]:
    """Return the operations of each recurrent layer for a step."""
    works: list[int] = []
    for node in stacks:
        stack = traced.layer(node)
        assert isinstance(stack, nn.RNNBase)
        takes = [stack.input_size] + [stack.hidden_size] * (stack.num_layers - 1)
        works += [stack.all_weights[0][0].shape[0] * (2 * (size + stack.hidden_size) + ELEMENTWISE) for size in takes]
    return works


def chunk_edges(steps: int, chunks: int, growth: float) -> tuple[int, ...]:
    """Return the edges of chunks that grow by a factor, as nearly as whole steps allow; equal chunks for 1.

    >>> chunk_edges(28, 7, 1.0), chunk_edges(28, 7, 1.3)
    ((0, 4, 8, 12, 16, 20, 24, 28), (0, 2, 4, 6, 10, 14, 20, 28))
    """
    if growth == 1.0:
        return edges(steps, chunks)
    longest = chunks if growth > 1 else 0

    def grown(chunk: int) -> float:
        return float(growth ** (chunk - longest))  # relative to the largest, so that it cannot overflow

    cuts = [0]
    for chunk in range(1, chunks + 1):
        wanted = round(steps * (grown(chunk) - grown(0)) / (grown(chunks) - grown(0)))
        cuts.append(min(max(wanted, cuts[-1] + 1), steps - (chunks - chunk)))
    return tuple(cuts)


class _Unrolling:
    def __init__(self, traced: Traced, partitions: int, chunks: int, works: Sequence[int]) -> None:
        self.graph = fx.Graph()
        self.shapes: dict[fx.Node, Shape] = {}
        self.partitions: dict[fx.Node, int] = {}
        self.model = copy.copy(traced.model)
        vars(self.model)["_modules"] = dict(traced.model._modules)
        self._traced, self._partitions, self._chunks = traced, partitions, chunks
        self._works, self._begun = works, 0
        self._flows: dict[
            fx.Node, tuple[int, list[fx.Node]]
        ] = {}  # chunks that leave a stack, which the next stack takes unchanged
        self._new: dict[fx.Node, Any] = {}

    def take(self, node: fx.Node, unroll: bool) -> None:
        parent = node.args[0] if node.target is operator.getitem and node.args else None
        if isinstance(parent, fx.Node) and isinstance(held := self._new.get(parent), tuple):
            number = node.args[1]
            assert isinstance(number, int)
            self._new[node] = held[number]
        elif unroll:
            self._new[node] = self._unrolled(node)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._new.__getitem__)
            copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            copy.meta = dict(node.meta)
            self._new[node] = copy
            if node in self._traced.shapes:
                self.shapes[copy] = self._traced.shapes[node]

    def drop_unused(self) -> None:
        """Erase joined and sliced values that nothing uses, which are mostly states."""
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.target in (torch.cat, torch.narrow, operator.getitem):
                self.graph.erase_node(node)

    def _unrolled(self, node: fx.Node) -> Any:
        stack, path = self._traced.layer(node), str(node.target)
        assert isinstance(stack, nn.RNNBase)
        self._check(stack, path)
        args: Any = fx.map_arg(node.args, self._new.__getitem__)
        sequence, state = args[0], args[1] if len(args) > 1 else None
        dimension = 1 if stack.batch_first and len(self.shapes[sequence].fixed) == 3 else 0
        steps = self.shapes[sequence].fixed[dimension]
        chunks = self._chunks or min(steps, CHUNKS * self._partitions)
        if steps < chunks or self.shapes[sequence].growth[dimension]:
            raise UsageError(f"--chunks {self._chunks}: a sequence of {path} has {steps} steps; name at most {steps}")
        every_partition = self._partitions_of(path)
        bounds = chunk_edges(steps, chunks, self._growth(every_partition))
        partitions = every_partition[self._begun : self._begun + stack.num_layers]
        self._begun += stack.num_layers
        layers = [self._layer(stack, path, number) for number in range(stack.num_layers)]
        states = [self._first(state, number, path) for number in range(stack.num_layers)]
        outputs: list[fx.Node] = []
        for flow in self._chunks_of(sequence, dimension, bounds, path):
            for number, name in enumerate(layers):
                flow, states[number] = self._step(node, name, flow, states[number], partitions[number], len(bounds) - 1)
            outputs.append(flow)
        whole = replace(self.shapes[outputs[0]], fixed=self._side(outputs[0], dimension, steps))
        output = self._call(torch.cat, (outputs, dimension), path, whole, partitions[-1])
        self._flows[output] = dimension, outputs
        return output, self._last(states, path, partitions[-1])

    def _side(self, node: fx.Node, dimension: int, to: int) -> tuple[int, ...]:
        fixed = self.shapes[node].fixed
        return (*fixed[:dimension], to, *fixed[dimension + 1 :])

    def _check(self, stack: nn.RNNBase, path: str) -> None:
        if stack.bidirectional:
            raise UsageError(f"{path} is bidirectional: it cannot be pipelined over time")
        if stack.dropout and stack.training:
            raise UsageError(f"{path} has dropout={stack.dropout} inside: put nn.Dropout between stacks instead")
        if stack.proj_size:
            raise UsageError(f"{path} has proj_size={stack.proj_size}: it cannot be pipelined over time")

    def _partitions_of(self, path: str) -> list[int]:
        count = len(self._works)
        if count < self._partitions:
            raise UsageError(
                f"--partitions {self._partitions}: {path} and later stacks have {count} layers; split over at most "
                f"{count}, or another way"
            )
        return [
            partition for partition, (a, b) in enumerate(pairwise(edges(count, self._partitions))) for _ in range(a, b)
        ]

    def _growth(self, partitions: Sequence[int]) -> float:
        if self._partitions == 1:
            return 1.0
        works = list(zip(partitions, self._works, strict=True))
        first, last = (sum(work for at, work in works if at == partition) for partition in (0, self._partitions - 1))
        return float((last / first) ** (1 / (self._partitions - 1)))

    def _chunks_of(self, sequence: fx.Node, dimension: int, bounds: Sequence[int], path: str) -> list[fx.Node]:
        """Return a sequence in chunks: those of the previous stack, or slices."""
        if self._flows.get(sequence, (-1, []))[0] == dimension:
            return self._flows[sequence][1]
        return [self._narrow(sequence, Indices(dimension, *run), path) for run in pairwise(bounds)]

    def _layer(self, stack: nn.RNNBase, path: str, number: int) -> str:
        """Add one layer of a stack, on the stack's own tensors, to the model, and return its name."""
        assert isinstance(stack, RECURRENT)
        takes = stack.input_size if number == 0 else stack.hidden_size
        kind = {"nonlinearity": stack.nonlinearity} if isinstance(stack, nn.RNN) else {}
        make: Any = type(stack)
        layer = make(
            takes, stack.hidden_size, bias=stack.bias, batch_first=stack.batch_first, device="meta", **kind
        ).train(stack.training)
        for name in list(layer._parameters):
            setattr(layer, name, getattr(stack, f"{name.removesuffix('0')}{number}"))
        target = f"{path.replace('.', '_')}_layer_{number}"
        self.model._modules[target] = layer
        return target

    def _first(self, state: State | None, number: int, path: str) -> Any:
        return fx.map_arg(state, lambda whole: self._narrow(whole, Indices(0, number, number + 1), path))

    def _narrow(self, whole: fx.Node, part: Indices, path: str) -> fx.Node:
        arguments = whole, part.dimension, part.start, part.stop - part.start
        return self._call(torch.narrow, arguments, path, part.of(self.shapes[whole]))

    def _step(
        self, node: fx.Node, name: str, flow: fx.Node, state: State | None, partition: int, chunks: int
    ) -> tuple[fx.Node, State]:
        stack = self._traced.layer(node)
        assert isinstance(stack, nn.RNNBase)
        call = self.graph.call_module(name, (flow,) if state is None else (flow, state))
        call.meta.update(path=str(node.target), flops=node.meta["flops"] // stack.num_layers // chunks)
        self.partitions[call] = partition
        shape = self.shapes[flow]
        gives = replace(shape, fixed=(*shape.fixed[:-1], stack.hidden_size), differentiable=True)
        output = self._call(operator.getitem, (call, 0), call.meta["path"], gives, partition)
        batch = [(shape.fixed[at], shape.growth[at]) for at in range(len(shape.fixed) - 1)]
        if len(batch) == 2:
            batch = [(1, 0), batch[0] if stack.batch_first else batch[1], (stack.hidden_size, 0)]
        else:
            batch = [(1, 0), (stack.hidden_size, 0)]
        held = replace(gives, fixed=tuple(side for side, _ in batch), growth=tuple(more for _, more in batch))
        if not isinstance(stack, nn.LSTM):
            return output, self._call(operator.getitem, (call, 1), call.meta["path"], held, partition)
        both = self._call(operator.getitem, (call, 1), call.meta["path"], None, partition)
        return output, tuple(
            self._call(operator.getitem, (both, at), call.meta["path"], held, partition) for at in (0, 1)
        )

    def _last(self, states: Sequence[Any], path: str, partition: int) -> Any:
        if isinstance(states[0], tuple):
            return tuple(self._last([state[number] for state in states], path, partition) for number in (0, 1))
        shape = replace(self.shapes[states[0]], fixed=self._side(states[0], 0, len(states)))
        return self._call(torch.cat, (list(states), 0), path, shape)

    def _call(
        self,
        function: Callable[..., object],
        args: tuple[Argument, ...],
        path: str,
        shape: Shape | None,
        partition: int | None = None,
    ) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta.update(path=path, flops=0)
        if shape is not None:
            self.shapes[node] = shape
        if partition is not None:
            self.partitions[node] = partition
        return node
