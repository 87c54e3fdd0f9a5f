"""cli/meeting.py: what is said where the ranks cannot meet, in one line and within its limit."""

from __future__ import annotations

import json
import os
import re
import socket

import pytest
import torch.distributed
from test_ranks import free_port
from torch.distributed import HashStore, PrefixStore

from cli import meeting
from cli.errors import ConfigError, Failed

HOST = socket.gethostname()
WAYS = "Give all machines the address and port of rank 0's, and each its own composer --node_rank; let the port through"
pytestmark = pytest.mark.timeout(60, func_only=True)


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process a rank of several, on a machine of its own."""
    for name in ("POLL_SEC", "TELL_SEC", "AGAIN_SEC"):
        monkeypatch.setattr(meeting, name, 0.05)
    monkeypatch.setattr(meeting, "_hosts", [])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # by another test's run: variables count

    def be(rank: int, num: int, host: str = "127.0.0.1", port: object = None) -> None:
        own = {"RANK": rank, "WORLD_SIZE": num, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": host}
        for name, value in {**own, "MASTER_PORT": free_port() if port is None else port}.items():
            monkeypatch.setenv(name, str(value))

    return be


def refused(kind: type[Exception], work, *given) -> str:
    with pytest.raises(kind) as error:
        work(*given)
    return str(error.value)


def test_a_name_that_does_not_resolve_is_asked_for_until_the_limit(as_rank):
    as_rank(1, 2, "nosuch.invalid")
    said = refused(Failed, meeting._open_store, 0.1, "")
    place = f"nosuch.invalid:{os.environ['MASTER_PORT']}"
    assert re.fullmatch(rf"MASTER_ADDR: nothing answers at {place} \([^)]+\) for 0.1 s, as rank 1 .*{WAYS}\.", said)


@pytest.mark.parametrize("port", ["", "abc", "0", "65536"])
def test_a_place_that_is_none_is_refused(as_rank, port):
    as_rank(0, 2, port=port)
    assert refused(ConfigError, meeting._open_store, 0.1, "") == (
        f"MASTER_ADDR and MASTER_PORT: '127.0.0.1' and '{port}', for 2 ranks. A name and a port from 1 to 65535; composer "
        "--master_addr HOST --master_port PORT sets both."
    )


def test_a_port_in_use_is_refused(as_rank):
    with socket.socket() as one:
        one.bind(("", 0))
        one.listen()
        port = one.getsockname()[1]
        as_rank(0, 2, port=port)
        said = refused(ConfigError, meeting._open_store, 0.1, "")
    assert said == (
        f"MASTER_PORT: {port} cannot be opened on {HOST} (Address already in use). Rank 0 needs a free one: composer "
        "--master_port, the same everywhere."
    )


def test_where_rank_0_has_not_come_the_others_say_so(as_rank):
    as_rank(1, 2)
    place = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    assert refused(Failed, meeting._open_store, 0.2, ", or give health.meet_sec more") == (
        f"MASTER_ADDR: nothing answers at {place} (Connection refused) for 0.2 s, as rank 1 ({HOST}) sees it. {WAYS}, or "
        "give health.meet_sec more."
    )


def test_a_port_where_something_else_listens_is_given_up_and_named(as_rank):
    """It takes the connection and never answers: torch's store would wait without an end."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        as_rank(1, 2, port=other.getsockname()[1])
        assert refused(Failed, meeting._open_store, 0.3, "") == (
            f"MASTER_PORT: what answers at {place} is not rank 0 (no word for 0.3 s), as rank 1 ({HOST}) sees it. Something "
            "else holds the port there, or rank 0 has just ended. Start all machines again, with another port."
        )


def test_rank_0_whose_address_is_another_machines_says_so(as_rank, capfd):
    """An address of RFC 5737, which nobody has."""
    as_rank(0, 2, "192.0.2.7")
    said = refused(Failed, meeting._open_store, 0.3, "")
    assert said.startswith(f"MASTER_ADDR: nothing answers at 192.0.2.7:{os.environ['MASTER_PORT']} (")
    assert said.endswith(f") for 0.3 s, as rank 0 ({HOST}) sees it. {WAYS}.")
    assert "192.0.2.7" not in capfd.readouterr().err


def test_rank_0_may_have_an_address_of_the_network_before_it(as_rank, monkeypatch):
    """A service, or a translated address: no interface here has it, but it leads here."""
    as_rank(0, 2)
    monkeypatch.setattr(meeting, "_is_here", lambda host: False)
    store = meeting._open_store(5.0, "")
    store.set("seen", "yes")
    as_rank(1, 2, port=os.environ["MASTER_PORT"])
    assert meeting._open_store(5.0, "").get("seen") == b"yes"


def test_the_addresses_of_this_machine_are_known():
    assert meeting._is_here("127.0.0.1") and meeting._is_here("localhost") and not meeting._is_here("192.0.2.7")


def test_rank_0_says_how_many_came_and_which_are_missing(as_rank):
    as_rank(0, 4)
    store = meeting._open_store(5.0, "")
    met = PrefixStore("easel/meeting/0", store)
    met.set("2", json.dumps({"host": "b", "of": 4, "local": 1}))
    said = refused(Failed, meeting._check_in, store, 0.2, ", or give health.meet_sec more")
    assert said == (
        "ranks: after 0.2 s 2 of 4 ranks are there; missing: 1, 3. Start every machine with this MASTER_ADDR "
        "and MASTER_PORT, or give health.meet_sec more."
    )
    assert met.get("ended").decode() == f"1 {said}", "whoever came hears it"


def test_ranks_that_count_differently_are_refused_on_both_sides(as_rank):
    store = HashStore()
    met = PrefixStore("easel/meeting/0", store)
    met.set("1", json.dumps({"host": "b", "of": 4, "local": 1}))
    as_rank(0, 2)
    said = refused(ConfigError, meeting._check_in, store, 5.0, "")
    assert said == (
        f"WORLD_SIZE: 2 at rank 0 ({HOST}), 4 at rank 1 (b). All machines need the same: composer --world_size, the ranks of "
        "all machines together."
    )
    as_rank(3, 4)
    assert refused(ConfigError, meeting._check_in, store, 5.0, "") == said.replace("1 (b)", f"3 ({HOST})")


def test_a_rank_that_comes_twice_is_refused(as_rank):
    store = HashStore()
    met = PrefixStore("easel/meeting/0", store)
    met.add("came/1", 1)
    met.set("1", json.dumps({"host": "b", "of": 3, "local": 1}))
    as_rank(1, 3)
    assert refused(ConfigError, meeting._check_in, store, 5.0, "") == (
        f"RANK: 1 came twice, from b and from {HOST}. Give each machine its own composer --node_rank, from 0 on."
    )


def test_ranks_that_have_met_know_each_others_machines(as_rank):
    store = HashStore()
    met = PrefixStore("easel/meeting/0", store)
    for rank in (1, 2):
        met.set(str(rank), json.dumps({"host": f"n{rank}", "of": 3, "local": 1}))
    as_rank(0, 3)
    meeting._check_in(store, 5.0, "")
    assert meeting.hosts() == [HOST, "n1", "n2"] == json.loads(met.get("all"))
    assert meeting.named([1]) == "rank 1 (n1)" and meeting.named([0, 2]) == f"ranks 0 ({HOST}), 2 (n2)"


def test_many_ranks_are_named_by_some_of_them(monkeypatch):
    monkeypatch.setattr(meeting, "_hosts", ["a"] * 20)
    assert meeting.named(list(range(10))).endswith("7 (a) and 2 more")


def test_the_look_at_the_port_lets_nobody_in(monkeypatch):
    """Another rank that comes at this moment would leave a connection, and the store could not open the port."""
    let_in = []
    monkeypatch.setattr(socket.socket, "listen", lambda self, *given: let_in.append(self.getsockname()))
    meeting._check_port(free_port())
    assert let_in == []
    monkeypatch.undo()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "MASTER_PORT" in refused(ConfigError, meeting._check_port, taken.getsockname()[1])
