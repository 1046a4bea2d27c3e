"""The kernel in C of bf16 attention on CPUs: its operators, and how it is compiled. Its numbers: test_kernels.py."""

import os
import subprocess
import sys

import pytest
import torch

from birthmark.models import c_library
from birthmark.models.attention.fused import kernels, native

runs_here = pytest.mark.skipif(bool(native.why_not()), reason=f"the kernel in C does not run: {native.why_not()}")


@pytest.fixture
def forgotten():
    """As in a process that has not asked for the kernel yet."""
    c_library.kernel.cache_clear()
    yield
    c_library.kernel.cache_clear()


def qkv(length=150, n_heads=4, n_kv_heads=2, width=24, of_values=40):
    """bf16, ``[2, heads, T, width]``, with the heads of a position side by side."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n_heads, width), (n_kv_heads, width), (n_kv_heads, of_values)]
    return [torch.randn(2, length, *shape, generator=generator).bfloat16().transpose(1, 2) for shape in shapes]


@runs_here
@pytest.mark.parametrize("wants", [True, False])
def test_the_operators_are_what_compiled_graphs_take_them_for(wants):
    """Schema, gradient, and the shapes and strides of fake tensors, by torch's own checks."""
    torch.library.opcheck(native._forward, (*(x.requires_grad_() for x in qkv()), 30, 0.2, wants, True))


@runs_here
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 149, 150, 1000])
def test_windows_equal_the_explicit_matrix(window):
    ours = [(3 * x if i == 0 else x).requires_grad_() for i, x in enumerate(qkv())]
    reference = [x.detach().double().requires_grad_() for x in ours]
    q, k, v = reference[0], *(x.repeat_interleave(2, 1) for x in reference[1:])
    behind = torch.arange(150)[:, None] - torch.arange(150)
    scores = (q @ k.mT * 0.2).masked_fill((behind < 0) | (behind >= window), -torch.inf)
    found = native.causal_tiles(*ours, 0.2, wants_sums=True, window=window)
    wanted = scores.softmax(-1) @ v, scores.logsumexp(-1), scores.softmax(-1).square().sum(-1)
    torch.testing.assert_close(found[0].double(), wanted[0], atol=1e-2, rtol=8e-3)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2].double(), wanted[2], atol=1e-5, rtol=1e-5)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found]
    got = torch.autograd.grad(found, ours, upstream)
    expected = torch.autograd.grad(wanted, reference, [x.double() for x in upstream])
    for g, e in zip(got, expected, strict=True):
        assert float((g.double() - e).norm()) <= 5e-3 * float(e.norm()) + 1e-4


def test_tests_of_models_run_on_one_thread():
    assert torch.get_num_threads() == 1


@runs_here
def test_numbers_do_not_depend_on_threads_or_strides():
    """With one sequence and one key/value head, threads share a head."""
    q, k, v = (x[:1, : 2 if i == 0 else 1] for i, x in enumerate(qkv(300)))
    threads, found = torch.get_num_threads(), []
    try:
        for n, layout in ((1, torch.clone), (2, torch.clone), (3, lambda x: x.mT.contiguous().mT)):
            torch.set_num_threads(n)
            ours = [layout(x).detach().requires_grad_() for x in (q, k, v)]
            out, lse, squares = kernels.attention_with_squares(*ours, 0.2)
            found.append([out, lse, squares, *torch.autograd.grad(out.float().sum() + squares.sum(), ours)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@runs_here
def test_scores_of_thousands_overflow_nothing_and_nan_stays():
    q, k, v = (x.requires_grad_() for x in qkv(width=16, of_values=16))
    out, lse, squares = kernels.attention_with_squares(300 * q, 10 * k, v, 1.0)
    gradients = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) for x in (out, lse, squares, *gradients))
    assert float(lse.detach().max()) > 1e3
    assert torch.equal(squares[..., 0], torch.ones(2, 4))
    poisoned = q.detach().clone()
    poisoned[0, 1, 70, 3] = torch.nan
    out, lse, squares = kernels.attention_with_squares(poisoned, k, v, 1.0)
    for x in (out.sum(-1), lse, squares):
        assert torch.nonzero(x.isnan()).tolist() == [[0, 1, 70]]


@runs_here
def test_the_kernel_is_compiled_once_for_a_user(tmp_path, monkeypatch, forgotten, python):
    """Also by processes that begin at the same time, and not at all where it lies in the cache."""
    asks = "from birthmark.models.attention.fused import native; raise SystemExit(native.why_not() or 0)"
    several = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for process in [subprocess.Popen([python, "-c", asks], env=several) for _ in range(2)]:
        assert process.wait() == 0
    kept = list((tmp_path / "birthmark").iterdir())
    assert [file.suffix for file in kept] == [".so"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.is_built()


@runs_here
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C compiler (no-such-compiler)"),
        ("sh -c 'echo unknown option >&2; exit 1'", "fails (unknown option)"),
        ("sh -c 'while [ $1 != -o ]; do shift; done; echo text > $2' sh", "cannot be made or loaded"),
        (" ", "CC is empty"),
    ],
)
def test_without_a_compiler_blocks_of_products_take_its_place(compiler, reason, tmp_path, monkeypatch, forgotten):
    q, k, v = qkv()
    ours = kernels.attention_with_lse(q, k, v, 0.2)
    c_library.kernel.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert reason in native.why_not()
    theirs = kernels.attention_with_lse(q, k, v, 0.2)
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)
    assert not torch.equal(ours[1], theirs[1])


def test_without_a_home_it_is_not_built(homeless):
    with pytest.raises(c_library.CannotCompileError, match="no home"):
        c_library.load(native._SOURCE)


#: Takes the place of the C library's function: the call with this number from now gets no memory.
_REFUSING = """
#include <stdlib.h>
int refused_call;
void *aligned_alloc(size_t alignment, size_t size) {
    void *memory = NULL;
    int refuses = __atomic_fetch_sub(&refused_call, 1, __ATOMIC_SEQ_CST) == 1;
    return refuses || posix_memalign(&memory, alignment, size) ? NULL : memory;
}
"""
_IN_SHORT_MEMORY = """
import ctypes, sys, torch
from birthmark.models.attention.fused import native

torch.set_num_threads(2)
refused_call = ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "refused_call")
q, k, v = (torch.randn(2, 2, 100, 32).bfloat16().requires_grad_() for _ in range(3))
forward = lambda: native.causal_tiles(q, k, v, 0.2, wants_sums=False)[0]
out = forward()
backward = lambda: torch.cat(torch.autograd.grad(out.float().sum(), (q, k, v), retain_graph=True))
before = backward()
for call in (forward, backward):
    for thread in (1, 2):
        refused_call.value = thread
        try:
            call()
            raise SystemExit(f"thread {thread} was refused its memory, and nobody said so")
        except MemoryError as error:
            print(error)
        refused_call.value = 0
assert torch.equal(forward(), out) and torch.equal(backward(), before)
"""


@runs_here
def test_a_thread_without_memory_ends_the_whole_call(tmp_path):
    """By an error, and not in a wait for that thread; the next call is as good as any."""
    source, library = tmp_path / "refusing.c", tmp_path / "refusing.so"
    source.write_text(_REFUSING)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    command, short = [sys.executable, "-c", _IN_SHORT_MEMORY, str(library)], {**os.environ, "LD_PRELOAD": str(library)}
    ran = subprocess.run(command, env=short, capture_output=True, text=True, timeout=120)
    assert not ran.returncode, ran.stderr
    assert ran.stdout.splitlines() == 4 * ["attention over 100 positions: no memory is left for its workspace"]


@pytest.mark.parametrize("has_amx", [True, False])
def test_processors_whose_products_are_another_case_are_left_to_torch(has_amx, monkeypatch, forgotten):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(c_library, "load", lambda *_: pytest.fail("compiled"))
    assert ("AMX" if has_amx else "AVX-512") in native.why_not()
