"""The loss over chunks of rows, against the formula in float64, torch's own operator and a count of memory."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from birthmark import kernel_devices
from birthmark.models import linear_cross_entropy as loss
from birthmark.models.linear_cross_entropy import IGNORED, linear_cross_entropy

N, V, D = 300, 1000, 32


@pytest.fixture
def chunks(monkeypatch):
    """Several chunks, each of several blocks, the last of both cut short; the table's gradient in parts."""
    monkeypatch.setattr(loss, "_LEAST_BYTES", 1)
    monkeypatch.setattr(loss, "_BYTES_PER_LOGIT", 1.0)
    monkeypatch.setattr(loss, "_BLOCK_CPU", 7 * V)
    monkeypatch.setattr(loss, "_TABLE_PART", 300 * D)
    assert N % loss.chunk_rows(N, V, 4) < loss.chunk_rows(N, V, 4) < N / 2


def rows(dtype=torch.float32, ignored=True):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, D, generator=generator).to(dtype).requires_grad_() for n in (N, V))
    targets = torch.randint(V, (N,), generator=generator)
    if ignored:
        targets[::7] = IGNORED
    return x, weight, targets


def by_hand(x, weight, targets, z_loss=0.0, cap=None):
    """Objective and losses in float64, and the gradients of three times the objective."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    logits = x @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    counted = targets != IGNORED
    lse = logits.exp().sum(-1).log()
    losses = torch.where(counted, lse - logits[torch.arange(N), targets.clamp_min(0)], 0)
    objective = losses.sum() / counted.sum() + z_loss * (lse**2)[counted].mean()
    return objective, losses, torch.autograd.grad(3 * objective, (x, weight))


def relative(ours, exact):
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("z_loss", "cap"), [(0.0, None), (1e-2, None), (0.0, 4.0), (1e-2, 4.0)])
def test_losses_and_gradients_are_those_of_the_formula(chunks, z_loss, cap, plain):
    x, weight, targets = rows()
    x.detach().mul_(0.3)  # shares in float64's range
    exact, losses, gradients = by_hand(x, weight, targets, z_loss, cap)
    found = linear_cross_entropy(x, weight, targets, z_loss=z_loss, cap=cap, plain=plain)
    (3 * found.objective).backward()
    torch.testing.assert_close(found.per_token.double(), losses, rtol=1e-5, atol=1e-5)
    assert float(found.objective.detach()) == pytest.approx(float(exact.detach()), rel=1e-6)
    parts = float(found.cross_entropy), float(found.z_loss)
    assert not any(part.requires_grad for part in (found.cross_entropy, found.z_loss, found.per_token))
    assert found.routing is None
    assert sum(parts) == pytest.approx(float(exact), rel=1e-6)
    assert parts[0] == pytest.approx(float(losses.sum() / (targets != IGNORED).sum()), rel=1e-6)
    for ours, gradient in zip((x.grad, weight.grad), gradients, strict=True):
        assert relative(ours, gradient) < 1e-6


@pytest.mark.parametrize("cap", [None, 4.0])
def test_gradients_in_bf16_are_as_exact_as_those_of_the_plain_formula(chunks, cap):
    x, weight, targets = rows()
    exact = by_hand(x, weight, targets, cap=cap)[2]
    errors = {}
    for plain in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            objective = linear_cross_entropy(x, weight, targets, cap=cap, plain=plain).objective
        ours = torch.autograd.grad(3 * objective, (x, weight))
        assert {gradient.dtype for gradient in ours} == {torch.float32}
        errors[plain] = [relative(*pair) for pair in zip(ours, exact, strict=True)]
    assert max(errors[True]) < 0.02
    for chunked, plain in zip(errors[False], errors[True], strict=True):
        assert chunked <= 1.02 * plain


def test_a_certain_prediction_has_a_small_loss_and_an_impossible_one_a_finite_one(chunks):
    x, weight = torch.zeros(N, D), torch.zeros(V, D)
    x[:, 0], weight[5, 0] = 1.0, 200.0
    targets = torch.full((N,), 5)
    targets[1] = 6
    losses = linear_cross_entropy(x, weight, targets, plain=False).per_token
    assert losses[0] == 0
    assert losses[1] == 200


def test_without_gradients_the_losses_are_the_same(chunks):
    x, weight, targets = rows()
    trained = linear_cross_entropy(x, weight, targets, z_loss=1e-2, plain=False)
    with torch.no_grad():
        seen = linear_cross_entropy(x, weight, targets, z_loss=1e-2, plain=False)
    assert trained.routing is seen.routing is None
    assert all(torch.equal(one, other) for one, other in zip(trained[:-1], seen[:-1], strict=True))
    assert not seen.objective.requires_grad


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(chunks, frozen):
    x, weight, targets = rows()
    exact = by_hand(x, weight, targets)[2]
    (x, weight)[frozen].requires_grad_(False)
    (3 * linear_cross_entropy(x, weight, targets, plain=False).objective).backward()
    assert (x, weight)[frozen].grad is None
    assert relative((x, weight)[1 - frozen].grad, exact[1 - frozen]) < 1e-6


def test_a_table_that_was_gathered_in_bf16_gets_its_gradient_in_bf16(chunks):
    x, weight, targets = rows()
    exact = by_hand(x, weight.bfloat16(), targets)[2]
    narrow = weight.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (3 * linear_cross_entropy(x, narrow, targets, plain=False).objective).backward()
    assert narrow.grad.dtype == torch.bfloat16
    assert relative(narrow.grad, exact[1]) < 0.01


def test_gradients_that_were_scaled_are_not_taken_twice(chunks):
    x, weight, targets = rows()
    objective = linear_cross_entropy(x, weight, targets, plain=False).objective
    (2 * objective).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * objective).backward()
    objective = linear_cross_entropy(x, weight, targets, plain=False).objective
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(objective, x, create_graph=True)


@pytest.mark.heavy
def test_a_compiled_graph_calls_it_as_it_is(chunks):
    x, weight, targets = rows()

    def objective(x, weight, targets):
        with torch.autocast("cpu", torch.bfloat16):
            return 2 * linear_cross_entropy(x, weight, targets, z_loss=1e-3, cap=20.0, plain=False).objective

    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    results = []
    for function in (objective, compiled):
        value = function(x, weight, targets)
        results.append((value.detach(), *torch.autograd.grad(value, (x, weight))))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(eager, ours)


def peak_bytes(function):
    """The most that is allocated at once while ``function`` runs, what there was before left out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        function()
    sizes = [event.nbytes() for event in traced.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(sum(sizes[: i + 1]) for i in range(len(sizes)))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 32)])
def test_memory_beyond_the_table_and_the_gradients_is_at_most_1_2_bytes_per_logit(dtype, width):
    n, vocab_size = 4096, 16384  # 67 million logits
    x, weight = torch.randn(n, width, requires_grad=True), torch.randn(vocab_size, width, requires_grad=True)
    targets = torch.randint(vocab_size, (n,))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            objective = linear_cross_entropy(x, weight, targets).objective
        objective.backward()

    gradients = 4 * (n + vocab_size) * width
    table_in_bf16 = 2 * vocab_size * width if dtype == torch.bfloat16 else 0
    peak = peak_bytes(step) - gradients - table_in_bf16
    assert peak <= 1.2 * n * vocab_size
    # What a plan says of it; products may take some memory of their own.
    x.grad = weight.grad = None
    planned = loss.workspace_bytes(x, weight, dtype)(n) - table_in_bf16
    assert planned == pytest.approx(peak, rel=0.05)


def test_few_logits_are_held_at_once_on_a_cpu_alone(monkeypatch):
    called = []
    monkeypatch.setattr(loss, "_chunked", lambda *args: called.append(args) or (torch.zeros(()),) * 5)
    x, weight, targets = rows()
    linear_cross_entropy(x, weight, targets)
    assert not called
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    linear_cross_entropy(x, weight, targets)
    assert len(called) == 1


def test_chunks_hold_a_byte_per_logit_at_most():
    for n, vocab_size, itemsize in ((2048, 32000, 2), (4096, 128_256, 2), (65536, 32000, 4), (1, 2, 4)):
        held = loss.chunk_rows(n, vocab_size, itemsize)
        assert 1 <= held <= min(n, 2048)
        assert held * vocab_size * itemsize <= max(n * vocab_size, 1 << 26)


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("z_loss", "cap"), [(0.0, None), (1e-2, 4.0)])
def test_on_a_gpu_losses_and_gradients_are_those_of_the_formula(monkeypatch, dtype, tolerance, z_loss, cap):
    """Through the kernel, in several chunks; in bf16 the table's gradient is summed in float32 over them."""
    monkeypatch.setattr(loss, "_LEAST_BYTES", 1)
    x, weight, targets = rows(dtype)
    x.detach().mul_(0.3)
    assert loss.chunk_rows(N, V, dtype.itemsize) < N
    assert loss._one_kernel(x.cuda(), dtype) is not None
    exact, losses, gradients = by_hand(x, weight, targets, z_loss, cap)
    ours = [tensor.detach().cuda().requires_grad_() for tensor in (x, weight)]
    found = linear_cross_entropy(*ours, targets.cuda(), z_loss=z_loss, cap=cap)
    (3 * found.objective).backward()
    assert float(found.objective.detach()) == pytest.approx(float(exact), rel=tolerance)
    torch.testing.assert_close(found.per_token.cpu().double(), losses, rtol=tolerance, atol=5 * tolerance)
    for tensor, gradient in zip(ours, gradients, strict=True):
        assert relative(tensor.grad.cpu(), gradient) < tolerance
