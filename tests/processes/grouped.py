"""One process of a group that is held to what fabrics promise."""

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore

from distbelief.core.conversations.grouping import Assemble, Member
from distbelief.core.messages import Address
from distbelief.core.settings import Plan, Settings
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.process_group import ProcessGroup
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.testing import Side, check_fabric

SECONDS = 60.0


def play(connection: Connection, rank: int, ranks: int, port: int) -> None:
    """One rank of so many, which meet at a store."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
    meetings, groups = count(), count()

    def meet() -> None:
        """Wait until all are here."""
        number = next(meetings)
        store.set(f"{number} {rank}", "")
        store.wait([f"{number} {other}" for other in range(ranks)])

    def side(_: str, size: int, found: Sequence[Bucket]) -> Side:
        """A group of all, formed anew each time."""
        one, group = ProcessGroup(rank, torch.device("cpu"), "127.0.0.1"), next(groups)
        store.set(f"store {group} {rank}", one.store)
        stores = [store.get(f"store {group} {other}").decode() for other in range(ranks)]
        members = tuple(Member(f"replica {i}", Address("", 0), False, name) for i, name in enumerate(stores))
        slot, total = one.open(size, found)
        plan = Plan(Settings(), lay_out([Tensor("weight", (4,), "float32")]), (), 0)
        assert one.form(Assemble(group, plan, members, 0, 0, 0, ""), lambda: False)
        return Side(one, slot, total, one.close)

    check_fabric(side, rank, ranks, meet, ["native", "native, formed anew"])
    meet()
    connection.send_bytes(b"done")
