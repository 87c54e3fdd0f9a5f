"""The number of canonical nodes: found when a run begins, kept with it, and 1 in runs of before."""

from __future__ import annotations

import pytest
from test_checkpoints import newest, same_training

from benchmark import main
from cli import ranks
from record.config_file import read_config

pytestmark = pytest.mark.timeout(60, func_only=True)


@pytest.fixture
def on_two_nodes(monkeypatch):
    """A start that finds two machines, as far as its number of canonical nodes goes."""

    def start(*words: str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "num_nodes", lambda: 2)
            return main(list(words))

    return start


@pytest.mark.slow
def test_the_number_of_nodes_that_a_run_began_on_stays_its_order_of_samples(miniature, tmp_path, on_two_nodes, capsys):
    def words(name: str, *more: str) -> list[str]:
        return miniature.small(tmp_path, name, "save.every_images=16", "measure.warmup_batches=1", *more)

    assert on_two_nodes(*words("a", "max_duration=2ba")) == 0
    assert read_config(tmp_path / "a")["data.num_canonical_nodes"] == 2
    assert main(words("a", "max_duration=4ba")) == 0  # on one node
    assert main(words("two", "data.num_canonical_nodes=2")) == 0 and main(words("one")) == 0
    ends = {name: newest(tmp_path, name) for name in ("a", "two", "one")}
    assert [ends[name]["identity"]["data.num_canonical_nodes"] for name in ends] == [2, 2, 1]
    assert same_training(ends["a"], ends["two"]) and not same_training(ends["a"], ends["one"])
    capsys.readouterr()
    assert main(words("a", "data.num_canonical_nodes=1", "max_duration=6ba")) == 2
    assert capsys.readouterr().err == (
        f"data.num_canonical_nodes: 1, but {tmp_path}/a was begun with 2. A run resumes as it began: use that value, or "
        "another run_name.\n"
    )


def test_more_canonical_nodes_than_samples_are_refused(miniature, tmp_path, capsys):
    assert main(miniature.small(tmp_path, "a", "data.num_canonical_nodes=193")) == 2
    assert capsys.readouterr().err == (
        "data.num_canonical_nodes: 193 is more than the 192 samples of an epoch. Take a smaller one, or leave it out.\n"
    )
