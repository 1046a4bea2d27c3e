"""Every metric however its probe comes: in parts, in copies that are merged, and in parts on two processes."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_streams import STREAMS, Probe, probe, results


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)


def whole(name, of):
    make, show = STREAMS[name]
    metric = make()
    show(metric, of, slice(None))
    return results(metric)


@settings(max_examples=8, deadline=None)
@given(splits=st.lists(st.integers(0, 10), max_size=4), seed=st.integers(0, 9))
@pytest.mark.parametrize("name", STREAMS)
def test_the_split_of_the_probe_into_batches_does_not_matter(name, splits, seed):
    make, show = STREAMS[name]
    metric, of, borders = make(), probe(seed), [0, *sorted(splits), 10]
    for start, stop in pairwise(borders):
        lent = Probe(*(x.clone() for x in of))
        show(metric, lent, slice(start, stop))
        # A pass uses the memory of what it shows again; tokens stay.
        for x in lent._replace(tokens=torch.empty(0)):
            x.fill_(torch.nan)
    assert_same(results(metric), whole(name, of), rtol=1e-9, atol=1e-12)


#: Those of sequences keep lists, which ranks alone merge.
MERGED = [name for name in STREAMS if name != "sinks of sequences"]


@pytest.mark.parametrize("name", MERGED)
def test_merged_states_are_one_probe(name):
    make, show = STREAMS[name]
    first, *others = metrics = [make() for _ in range(4)]
    for metric, part in zip(metrics, (slice(0, 2), slice(2, 2), slice(2, 7), slice(7, 10)), strict=True):
        show(metric, probe(), part)
    for other in others:
        first.merge_state(other)
    assert_same(results(first), whole(name, probe()), rtol=1e-9, atol=1e-12)


#: Rank 0 sees nothing at first, and what it sees then comes behind the other's. Sums are not gathered.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
import torch.distributed as dist
from metric_streams import STREAMS, probe, results

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
gather = dist.all_gather
found = {{}}
for name, (make, show) in STREAMS.items():
    metric = make()
    dist.all_gather = None if name in ("contraction", "effective rank", "variance") else gather
    for seen, mine in ((6, (slice(0, 0), slice(0, 6))[rank]), (10, (slice(9, 10), slice(6, 9))[rank])):
        show(metric, probe(), mine)
        metric._computed = None
        found |= {{f"{{seen}}.{{name}}.{{array}}": value for array, value in results(metric).items()}}
np.savez(out, **found)
"""


def test_two_processes_with_a_part_each_compute_the_whole_and_go_on(two_ranks):
    expected = {}
    for n in (6, 10):
        of = probe()
        seen = of._replace(**{name: getattr(of, name)[:, :n] for name in ("states", "queries", "keys", "weights")})
        seen = seen._replace(logits=of.logits[:n], tokens=of.tokens[:n])
        expected |= {f"{n}.{name}.{array}": value for name in STREAMS for array, value in whole(name, seen).items()}
    assert len(expected) == 2 * (2 + 4 + 2 + 11 + 2 + 3 + 3 + 2 + 2 + 3 + 2 + 6 + 3 + 7 + 14)
    for file in two_ranks(SCRIPT, ".npz"):
        assert_same(dict(np.load(file)), expected, rtol=1e-6, atol=1e-7)
