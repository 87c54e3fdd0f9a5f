"""ranks/rendezvous.py: what is said where the ranks cannot meet, in one line and within its limit."""

from __future__ import annotations

import json
import os
import re
import socket

import pytest
import torch.distributed
from test_collectives import free_port
from torch.distributed import HashStore, PrefixStore, Store

from common.errors import ConfigError, Failed
from ranks import rendezvous

HOST = socket.gethostname()
pytestmark = pytest.mark.timeout(60, func_only=True)


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process a rank of several, on a machine of its own."""
    for name in ("POLL_SEC", "STAY_SEC", "RETRY_SEC"):
        monkeypatch.setattr(rendezvous, name, 0.05)
    monkeypatch.setattr(rendezvous, "_hosts", [])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # by another test's run: variables count

    def be(rank: int, num: int, host: str = "127.0.0.1", port: object = None) -> None:
        own = {"RANK": rank, "WORLD_SIZE": num, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": host}
        for name, value in {**own, "MASTER_PORT": free_port() if port is None else port}.items():
            monkeypatch.setenv(name, str(value))

    return be


def refused(kind: type[Exception], work, *args) -> str:
    with pytest.raises(kind) as error:
        work(*args)
    return str(error.value)


def come(store: Store, rank: int, host: str, num: int) -> PrefixStore:
    """Let another rank have come, on a machine of its own, which counts so many ranks."""
    met = PrefixStore("easel/meeting/0", store)
    met.set(str(rank), json.dumps({"host": host, "of": num, "local": 1}))
    return met


@pytest.mark.parametrize(("host", "reason"), [("nosuch.invalid", r"[^)]+"), ("127.0.0.1", "Connection refused")])
def test_an_address_where_nothing_answers_is_tried_until_the_limit(as_rank, host, reason):
    as_rank(1, 2, host)
    output = refused(Failed, rendezvous._open_store, 0.2, ", or raise health.init_timeout_sec")
    place = f"{host}:{os.environ['MASTER_PORT']}"
    assert re.match(rf"MASTER_ADDR: nothing answers at {place} \({reason}\) for 0.2 s, as rank 1 ", output)


def test_an_invalid_port_or_one_in_use_is_refused(as_rank):
    for port in ("", "abc", "65536"):
        as_rank(0, 2, port=port)
        output = refused(ConfigError, rendezvous._open_store, 0.1, "")
        text = f"MASTER_ADDR and MASTER_PORT: '127.0.0.1' and '{port}', for 2 ranks. A name and a port from 1 to"
        assert output.startswith(text)
    with socket.create_server(("", 0)) as one:
        port = one.getsockname()[1]
        as_rank(0, 2, port=port)
        output = refused(ConfigError, rendezvous._open_store, 0.1, "")
    assert output.startswith(f"MASTER_PORT: {port} cannot be opened on {HOST} (Address already in use). ")


def test_a_port_where_something_else_listens_is_named(as_rank):
    """It takes the connection and never answers: torch's store would wait without an end."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        as_rank(1, 2, port=port)
        output = refused(Failed, rendezvous._open_store, 0.3, "")
    text = f"MASTER_PORT: what answers at 127.0.0.1:{port} is not rank 0 (no answer for 0.3 s), as rank 1 "
    assert output.startswith(text)


def test_rank_0_names_the_missing_ranks_to_all(as_rank):
    as_rank(0, 4)
    store = rendezvous._open_store(5.0, "")
    met = come(store, 2, "b", 4)
    output = refused(Failed, rendezvous._check_in, store, 0.2, ", or raise health.init_timeout_sec")
    assert output == (
        "ranks: after 0.2 s 2 of 4 ranks are there; missing: 1, 3. Start every machine with this MASTER_ADDR "
        "and MASTER_PORT, or raise health.init_timeout_sec."
    )
    assert met.get("ended").decode() == f"1 {output}"


def test_ranks_that_count_differently_are_refused_on_both_sides(as_rank):
    store = HashStore()
    come(store, 1, "b", 4)
    as_rank(0, 2)
    output = refused(ConfigError, rendezvous._check_in, store, 5.0, "")
    assert output.startswith(f"WORLD_SIZE: 2 at rank 0 ({HOST}), 4 at rank 1 (b). All machines need the same: ")
    as_rank(3, 4)
    assert refused(ConfigError, rendezvous._check_in, store, 5.0, "") == output.replace("1 (b)", f"3 ({HOST})")


def test_a_rank_that_comes_twice_is_refused(as_rank):
    store = HashStore()
    come(store, 1, "b", 3).add("came/1", 1)
    as_rank(1, 3)
    assert refused(ConfigError, rendezvous._check_in, store, 5.0, "") == (
        f"RANK: 1 connected twice, from b and from {HOST}. Give each machine its own composer --node_rank, from 0 on."
    )


def test_ranks_that_have_met_know_each_others_machines(as_rank, monkeypatch):
    store = HashStore()
    for rank in (1, 2):
        met = come(store, rank, f"n{rank}", 3)
    as_rank(0, 3)
    rendezvous._check_in(store, 5.0, "")
    assert rendezvous.rank_hosts() == [HOST, "n1", "n2"] == json.loads(met.get("all"))
    assert rendezvous.format_ranks([1]) == "rank 1 (n1)"
    assert rendezvous.format_ranks([0, 2]) == f"ranks 0 ({HOST}), 2 (n2)"
    monkeypatch.setattr(rendezvous, "_hosts", ["a"] * 20)
    assert rendezvous.format_ranks(list(range(10))).endswith("7 (a) and 2 more")
