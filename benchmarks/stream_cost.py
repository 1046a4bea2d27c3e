"""Cost of a pass by block beside the plain one: a birth drawn and measured either way, in turn in one process.

    python benchmarks/stream_cost.py [--shape llama-160m] [--repeats 5] [--n_sequences 8] [--seq_len 128]

*plain* draws the whole birth, then measures it; *streamed* draws and measures it block by block. Both draw every weight
once and make one pass, without a birth to compare with. The ratio of the passes is (streamed − drawing) / measuring, of
processor times: drawing runs on all cores, and other programs on the machine count for less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from birthmark.data.probes import random_probe
from birthmark.measure.measurement import measure
from birthmark.models.birth import born
from birthmark.models.by_block import DecoderByBlock, DrawnWeights
from birthmark.trainer.by_name.shipped_configs import find_config
from birthmark.trainer.config_file import read_config


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of processor time, and the result."""
    start = time.process_time()
    found = function()
    return time.process_time() - start, found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-160m")
    for name, default in (("repeats", 5), ("n_sequences", 8), ("seq_len", 128), ("batch_size", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    config = read_config(find_config(args.shape)).model
    probe = random_probe(config.vocab_size, args.n_sequences, args.seq_len, 0)
    ratios = []
    for i in range(args.repeats + 1):
        drawing, model = timed(lambda: born(config, 0))
        plain, _ = timed(lambda model=model: measure(model, probe, batch_size=args.batch_size))
        del model
        streamed, _ = timed(
            lambda: measure(DecoderByBlock(config, DrawnWeights(config, 0)), probe, batch_size=args.batch_size)
        )
        if i == 0:
            continue  # the first round warms up
        ratios.append((streamed - drawing) / plain)
        print(f"draw {drawing:.2f} s, measure {plain:.2f} s, streamed {streamed:.2f} s: {ratios[-1]:.2f}", flush=True)
    print(f"{args.shape}: median {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")


if __name__ == "__main__":
    main()
