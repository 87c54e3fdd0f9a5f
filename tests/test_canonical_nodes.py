"""The number of canonical nodes: found when a run begins, kept with it, and 1 in runs of before."""

from __future__ import annotations

import pytest
from test_checkpoints import newest, same_training
from two_machines import machines, said_by

from benchmark import main
from run_folder.files import read_config

pytestmark = pytest.mark.timeout(60, func_only=True)


@pytest.mark.long
@pytest.mark.timeout(300, func_only=True)
def test_the_number_of_nodes_that_a_run_began_on_stays_its_order_of_samples(miniature, tmp_path, capsys):
    def words(name: str, *more: str) -> list[str]:
        cache = f"data.local={tmp_path / 'cache'}"  # of both machines, as on a disk that they share
        return miniature.small(tmp_path, name, cache, "save.every_images=16", "measure.warmup_batches=1", *more)

    for name, key in (("a", []), ("two", ["data.num_canonical_nodes=2"])):
        command = ["benchmark.py", *words(name, "max_duration=2ba", *key)]
        with machines(command, command) as ranks:
            said = said_by(*ranks)
        assert [rank.returncode for rank in ranks] == [0, 0], said
        assert main(words(name, "max_duration=4ba", *key)) == 0  # on one node
    assert read_config(tmp_path / "a")["data.num_canonical_nodes"] == 2
    ends = [newest(tmp_path, name) for name in ("a", "two")]
    assert [end["identity"]["data.num_canonical_nodes"] for end in ends] == [2, 2] and same_training(*ends)
    capsys.readouterr()
    assert main(words("a", "data.num_canonical_nodes=1", "max_duration=6ba")) == 2
    assert f"data.num_canonical_nodes: 1, but {tmp_path}/a was begun with 2. " in capsys.readouterr().err
