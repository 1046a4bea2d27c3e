"""What the processes of a run share and agree on, in a real group of two."""

import json

import torch

from birthmark.measure.ranks import (
    batches_of_rank,
    check_same,
    from_rank_zero,
    max_over_ranks,
    rank,
    sum_over_ranks,
    world_size,
)

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from birthmark.measure.ranks import check_same, from_rank_zero, gather_rows, max_over_ranks, batches_of_rank, rank
from birthmark.measure.ranks import on_all_ranks, sum_over_ranks, world_size
from birthmark.errors import RunError, UsageError

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)

def said(act, *arguments):
    try:
        return act(*arguments)
    except (UsageError, RunError, KeyError) as error:
        return f"{type(error).__name__}: {error}"

def refuse():
    raise UsageError("not so")

def refuse_on_one():
    if rank() == 1:
        refuse()

x, own = torch.arange(5), torch.tensor([1.0 + rank()])
results = {
    "rank": [rank(), world_size()],
    "parts": [[part.tolist(), counts] for part, counts in batches_of_rank(x, 2)],
    "none": [[part.tolist(), counts] for part, counts in batches_of_rank(x[:1], 2)],
    "rows": gather_rows(torch.stack([r for part, counts in batches_of_rank(x, 2) if counts for r in part]), 5).tolist(),
    "sum": [sum_over_ranks(own).item(), own.item()],
    "largest": max_over_ranks(7 * rank()),
    "first": from_rank_zero(lambda: [rank(), "same"]),
    "refused": said(from_rank_zero, refuse),
    "refused by one": said(on_all_ranks, refuse_on_one),
    "made": on_all_ranks(rank),
    "bug": said(from_rank_zero, lambda: {}["x"]),
    "same": said(check_same, "seed", "1", "mend it"),
    "other": said(check_same, "seed", str(rank()), "mend it"),
}
print(json.dumps(results))
"""


def test_two_processes_share_and_agree(tmp_path, as_ranks):
    results, statuses = as_ranks(SCRIPT, tmp_path / "store")
    assert statuses == [0, 0]
    a, b = map(json.loads, results)
    assert (a["rank"], b["rank"]) == ([0, 2], [1, 2])
    # As many batches for both: what fills up does not count.
    assert (a["parts"], b["parts"]) == ([[[0, 1], True], [[2], True]], [[[3, 4], True], [[0], False]])
    assert (a["none"], b["none"]) == ([[[0], True]], [[[0], False]])
    assert (a["sum"], b["sum"]) == ([3, 1], [3, 2])
    assert (a["bug"], b["bug"]) == ("KeyError: 'x'", "RunError: rank 0: KeyError: 'x'")
    assert (a["refused by one"], b["refused by one"]) == ("RunError: rank 1: UsageError: not so", "UsageError: not so")
    assert (a["made"], b["made"]) == (0, 1)
    for results in (a, b):
        assert results["largest"] == 7
        assert results["rows"] == [0, 1, 2, 3, 4]
        assert results["first"] == [0, "same"]
        assert results["refused"] == "UsageError: not so"
        assert results["same"] is None
        assert results["other"] == "RunError: seed of rank 1 is not that of rank 0: mend it"


def test_without_a_group_one_process_is_all():
    x = torch.arange(5)
    assert (rank(), world_size(), max_over_ranks(3), from_rank_zero(lambda: 4)) == (0, 1, 3, 4)
    assert [(part.tolist(), counts) for part, counts in batches_of_rank(x, 3)] == [([0, 1, 2], True), ([3, 4], True)]
    assert sum_over_ranks(x) is x
    check_same("seed", "1", "mend it")
