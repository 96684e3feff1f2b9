"""Benchmarks measure what they say, and refuse what cannot be measured; all of them are tried in tests/slow."""

import dataclasses
import fcntl
import json
import mmap
import multiprocessing
import socket
import threading

import pytest
import torch

from benchmarks import BENCHES, wire
from benchmarks.parts import loops, plain, timing
from benchmarks.parts.peers import Peers
from benchmarks.parts.shards import Ours
from distbelief.errors import JobFailed, UsageError


def run(name, tmp_path, **options):
    path = tmp_path / "made" / f"{name}.json"
    bench = BENCHES[name]
    result = bench.run(
        dataclasses.replace(bench.defaults(quick=True), quick=True, quiet=True, json=str(path), **options)
    )
    assert json.loads(path.read_text()) == result
    assert multiprocessing.active_children() == []
    return result


def test_wire_measures_every_carrier_beside_every_limit(tmp_path, capfd):
    """And writes down on what machine."""
    result = run("wire", tmp_path)
    for one in result["sizes"].values():
        assert set(one["seconds"]) == {*wire.OURS, *wire.LIMITS}
        assert min(one["seconds"].values()) > 0
        assert set(one["of_direct"]) == {*wire.OURS, "direct update and copy"}
        assert min(one["of_direct"].values()) > 0
    assert (result["bench"], result["machine"]["torch"]) == ("wire", torch.__version__)
    assert result["machine"]["cores"] >= 1
    assert result["figures"]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("carrier", ["shared", "tls"])
def test_a_carrier_that_loses_an_update_is_not_reported_as_fast(carrier):
    with Peers() as peers:
        ours = Ours(peers, carrier, 4096)
        assert ours.trips(3) > 0
        ours.check()
        ours.pushes += 1
        with pytest.raises(JobFailed, match="after 4 pushes"):
            ours.check()
        ours.close()


def test_a_peer_that_dies_is_named_and_the_others_are_ended():
    with Peers() as peers:
        peer = peers.start("doomed", 1, _leave)
        with pytest.raises(JobFailed, match="doomed ended with status 3"):
            peer.hear()
    assert not peer.process.is_alive()


def _leave(connection):
    connection.close()
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("wire", {"sizes": (100,)}, "--sizes 100: must be a positive multiple of 128"),
        ("train", {"models": ("mpl",)}, "did you mean 'mlp'"),
        ("allreduce", {"rate": 10}, "--rate 10: is for a network between --namespaces or --encrypted"),
        ("straggle", {"replicas": 1}, "must be 2 or more, and 0 or more"),
        ("straggle", {"pad": -1.0}, "must be 2 or more, and 0 or more"),
        ("split", {"parts": ("tensor",)}, "did you mean 'tensors'"),
        ("split", {"microbatches": (4, 17)}, "--microbatches 17: must be from 1 to 16"),
        ("split", {"device": "cuda:99"}, "--device cuda:99: not available here"),
        ("split", {"parts": ("tensors",), "models": ("gru",)}, "--parts tensors --models gru: together measure"),
    ],
)
def test_what_cannot_be_measured_is_refused(name, options, told):
    bench = BENCHES[name]
    with pytest.raises(UsageError, match=told):
        bench.run(bench.options(quiet=True, **options))


def test_rounds_are_bounded_and_take_turns():
    order = []
    taken = timing.interleave({"a": lambda: order.append("a") or 1.0, "b": lambda: order.append("b") or 2.0}, 2)
    assert order == ["a", "b", "b", "a"]
    assert timing.ratio(taken["b"], taken["a"]) == 2
    with pytest.raises(UsageError, match="--repeats 0"):
        timing.interleave({}, 0)


@pytest.mark.parametrize(
    ("how", "applied"), [("two buffers", 12), (loops.SERVED, 12), (loops.ROUNDS, 6), ("all-reduce", 6)]
)
def test_a_plain_loop_of_two_applies_every_gradient_once(how, applied, monkeypatch):
    """Of constant gradients 1 and 3, three steps each: in rounds and all-reduce a step is their mean. As threads."""
    lock, served = threading.Lock(), how in (loops.SERVED, loops.ROUNDS)
    monkeypatch.setattr(fcntl, "lockf", lambda _, kind, __: lock.release() if kind == fcntl.LOCK_UN else lock.acquire())
    models, bells = [torch.nn.Linear(3, 5) for _ in range(2)], [socket.socketpair() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    begun = torch.nn.utils.parameters_to_vector(models[0].parameters()).detach()
    memory = memoryview(mmap.mmap(-1, plain.room(models[0], 5)))
    shared = [plain.share(0, memory, model, rank, 2) for rank, model in enumerate(models)]
    shared[0].vectors[2:] = begun

    def gradients(rank):
        for _ in range(3):
            for parameter in models[rank].parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + 2 * rank)
            yield 1

    def loop(rank):
        if served:
            landing, bell = 2 if how == loops.ROUNDS else 3 + rank, bells[rank][1].fileno()
            return plain.served(models[rank], gradients(rank), shared[rank], bell, landing)
        return loops.LOOPS[how](models[rank], gradients(rank), 0.5, shared[rank])

    bell_ends = [one.fileno() for one, _ in bells]
    server = threading.Thread(target=plain.serve, args=[shared[0].vectors, bell_ends, 0.5, how == loops.ROUNDS])
    threads = [*(threading.Thread(target=list, args=[loop(rank)]) for rank in range(2)), *[server] * served]
    for thread in threads:
        thread.start()
    for thread in threads[:2]:
        thread.join()
    for _, end in bells:
        end.close()  # with which the server ends
    threads[-1].join()
    for one, _ in bells:
        one.close()
    made = [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
    assert any(torch.allclose(one, begun - 0.5 * applied, atol=1e-5) for one in made)
