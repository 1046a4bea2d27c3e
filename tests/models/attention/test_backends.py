"""The table of fused operators: what a GPU would run, seen on a machine without one, and on one that has it.

Values on CUDA's operators are held by their formulas in ``test_attention.py`` (``cuda_operators``); here is what real
ones are handed: fake tensors check schemas, shapes and strides.
"""

import dataclasses

import pytest
import torch
from oracles import Operators
from torch._dynamo import _trace_wrapped_higher_order_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from birthmark import kernel_devices
from birthmark.errors import UsageError
from birthmark.models.attention.attention import Attention
from birthmark.models.attention.fused import backends, kernels
from birthmark.models.attention.positions import POSITIONS
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.plan.rehearsal import as_on

ESTIMATED = CalibrationConfig(correlation="estimated")
JOINT, SEPARATE = CalibrationConfig(squares="joint"), CalibrationConfig(squares="separate")
#: Arms of the kernel that sums squares: in every type, and in 16 bits.
JOINT_ARMS, JOINT_IN_16_BITS = ("joint", "joint, window, sink"), ("exact", "correlated")
ARMS = {
    "plain": AttentionConfig(),
    "learned sink": AttentionConfig(normaliser="softmax_sink"),
    "off by one": AttentionConfig(normaliser="softmax_off_by_one"),
    "key and value bias": AttentionConfig(kv_bias="key_value"),
    "four learned keys": AttentionConfig(kv_bias="key_value", kv_bias_tokens=4),
    "window": AttentionConfig(window=160),
    "prefix": AttentionConfig(prefix=40),
    "exact": AttentionConfig("calibrated"),
    "exact, two attentions": AttentionConfig("calibrated", calibration=SEPARATE),
    "joint": AttentionConfig("calibrated", calibration=JOINT),
    "joint, window, sink": AttentionConfig("calibrated", calibration=JOINT, window=160, normaliser="softmax_sink"),
    "correlated": AttentionConfig("calibrated", calibration=ESTIMATED),
    "alibi": AttentionConfig(),
    "gate per head": AttentionConfig(gate="head"),
    "headnorm as released": AttentionConfig("headnorm_released"),
    "differential": AttentionConfig("differential_norm", normaliser="differential"),
}


def build(name, width, dtype, device="cpu", length=600):
    """One attention with four query heads on two key/value heads, and what it is called with."""
    positions = "alibi" if name == "alibi" else "rope"
    shape = {
        "d_model": 4 * width,
        "n_heads": 4,
        "max_seq_len": length,
        "n_kv_heads": None if name == "differential" else 2,
    }
    config = ModelConfig(**shape, positions=positions, attention=ARMS[name])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # modules of fake tensors do not change theirs
    try:
        module = Attention(config, 0).train()
    finally:
        torch.set_default_dtype(before)
    if device != "cpu":
        module = module.to(device)
    x = torch.empty(2, length, 4 * width, dtype=dtype, device=device, requires_grad=True)
    return module, x, POSITIONS[positions](config).place(length, torch.device(device))


@pytest.mark.parametrize(
    ("width", "of_values", "is_ragged"), [(5, 5, True), (8, 6, False), (4, 5, True), (12, 12, False)]
)
def test_rows_of_no_whole_16_bytes_keep_a_fused_kernel(width, of_values, is_ragged, monkeypatch):
    """In float32, where torch's own attention runs: of such rows it would make the matrix of all weights on a GPU."""
    called = []

    def fused(q, k, v, scale):
        called.append("fused")
        return v, None

    def torchs_own(q, k, v, **_):
        called.append("torch's")
        return v

    monkeypatch.setattr(kernels, "_fused", fused)
    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", torchs_own)
    q, v = torch.zeros(1, 2, 3, width), torch.zeros(1, 2, 3, of_values)
    kernels.causal_attention(q, q, v, 1.0)
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    kernels.causal_attention(q, q, v, 1.0)
    assert called == ["torch's", "fused" if is_ragged else "torch's"]


@pytest.mark.parametrize("beside", [False, True])
def test_a_compiled_graph_holds_the_whole_attention_and_copies_no_gradient(beside, monkeypatch):
    """As a GPU's backend of one layout: a compiler that is asked for strides of a gradient copies all of them."""

    def refused(backward):
        pytest.fail("the backward pass asks for strides")

    monkeypatch.setattr(_trace_wrapped_higher_order_op, "autograd_function_backward_rewritten", refused)
    backend = dataclasses.replace(backends.BACKENDS["cpu"][0], one_layout=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(2, 17, 4, 16, generator=generator).transpose(1, 2) for _ in range(4))
    others = torch.randn(2, 4, 17, 1, generator=generator) if beside else None

    def attend(q, k, v):
        return backends.FusedAttention.apply(q, k, v, others, None, backend, 0.25, True, None)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    # The gradient comes by positions, and by heads, which is not how the output lies.
    for given in (upstream, upstream.contiguous()):
        found = torch.autograd.grad(compiled(*leaves), leaves, given)
        scores = (leaves[0] @ leaves[1].mT / 4).masked_fill(~torch.ones(17, 17).tril().bool(), -torch.inf)
        scores = scores if others is None else torch.cat([scores, others], -1)
        wanted = torch.autograd.grad(scores.softmax(-1)[..., :17] @ leaves[2], leaves, given)
        for got, exact in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (72, torch.bfloat16), (128, torch.float32)])
def test_every_arm_runs_fused_on_cuda_forward_and_backward(name, width, dtype):
    length, kind = 600, ARMS[name]
    names, shapes = set(), set()

    def note(function, args, found):
        names.add(function.name().partition(".")[0].removeprefix("aten::"))
        shapes.update(tuple(x.shape) for x in tree_iter(found) if isinstance(x, torch.Tensor))

    with FakeTensorMode(), as_on("cuda"), Operators(note):
        module, x, place = build(name, width, dtype)
        out = module(x, place)
        out.sum().backward()
        assert out.shape == x.shape
        assert all(p.grad.shape == p.shape for p in (x, *module.parameters()))
    assert not any(len(shape) > 1 and min(shape[-2:]) >= length for shape in shapes)
    flash = dtype == torch.bfloat16
    one_window = flash and kind.window is not None
    stem = {True: "_flash_attention", False: "_scaled_dot_product_flash_attention"}[one_window]
    expected = {stem + ("_forward" if one_window else ""), stem + "_backward"}
    efficient = "_scaled_dot_product_efficient_attention"
    expected = expected if flash else {efficient, efficient + "_backward"}
    if name in JOINT_ARMS or (flash and name in JOINT_IN_16_BITS):
        expected = {"birthmark::causal_walk", "birthmark::causal_walk_backward"}
    assert {n for n in names if "attention" in n or "::causal" in n} == expected


@pytest.mark.parametrize("row", backends.BACKENDS["cuda"], ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_schemas_take_what_is_handed_over_on_cuda(row, dtype):
    """On fake tensors of the device itself; autograd needs a real one."""
    if dtype not in row.dtypes:
        return
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 70, n, 64, dtype=dtype, device="cuda").transpose(1, 2) for n in (6, 2, 2))
        for causal, window in [(True, None), (False, None), *([(True, 9)] if row.windows else [])]:
            out, lse, more = row.forward(q, k, v, 0.125, causal, window)
            assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), dtype)
            assert (lse.shape[:2], lse.dtype, lse.shape[2] >= 70) == (q.shape[:2], torch.float32, True)
            found = row.backward(torch.empty_like(out), q, k, v, out, lse, more, 0.125, causal, window)
            assert [(x.shape, x.dtype, x.device.type) for x in found] == [(x.shape, dtype, "cuda") for x in (q, k, v)]


@pytest.mark.parametrize("name", ["plain", "learned sink", "exact", "alibi", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_stored_once_for_the_heads_that_share_them(name, dtype):
    module, x, place = build(name, 16, dtype, length=200)
    x.data.normal_()
    stored = {}
    with saved_tensors_hooks(lambda t: stored.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        module(x, place).sum().backward()
    # Four query heads of T by K: queries and outputs may be as large as the input, keys and values are half of it. What
    # distances add is 8 channels; a window pads its chunks.
    heads = [t for t in stored.values() if t.ndim == 4 and t.shape[2] > 1 and t.shape[-1] in (16, 24)]
    by_heads = [t.shape[1] for t in heads]
    assert by_heads.count(4) <= 4
    assert by_heads.count(2) >= 2 or dtype == torch.bfloat16


def test_a_row_without_upstream_gradient_still_has_that_of_its_log_sum_exp():
    """Rows of the output's gradient that are 0, all or some of them, in float32 and beside a gradient of size 1e4."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, 30, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    d_lse = torch.randn(1, 2, 30, generator=generator, dtype=torch.float64) * 1e4
    d_out[:, :, ::3], d_lse[:, :, 1::3] = 0, 0
    for zeroed in (d_out, d_out * 0):
        found = []
        for dtype in (torch.float64, torch.float32):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            if dtype == torch.float64:
                unseen = torch.ones(30, 30).triu(1) > 0
                scores = (leaves[0] @ leaves[1].mT * 0.3).masked_fill(unseen, -torch.inf)
                out, lse = scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)
            else:
                out, lse = kernels.attention_with_lse(*leaves, 0.3)
            loss = (out * zeroed.to(dtype)).sum() + (lse * d_lse.to(dtype)).sum()
            found.append(torch.autograd.grad(loss, leaves))
        for wanted, got in zip(*found, strict=True):
            assert float((got - wanted).abs().max()) <= 2e-6 * float(wanted.abs().max()) + 1e-12


@pytest.mark.parametrize("n_keys", [1, 3])
@pytest.mark.parametrize("brought", [False, True], ids=["no value", "values"])
def test_keys_beside_the_tokens_share_the_softmax_and_all_its_gradients(brought, n_keys):
    """Of the output and of both log-sum-exps, alone and together, against the softmax written out."""
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    leaves = [torch.randn(2, n, 21, 8, **draw).requires_grad_() for n in (4, 2, 2)]
    leaves.append((2 * torch.randn(2, 4, 21, n_keys, **draw)).requires_grad_())
    value = torch.randn(4, n_keys, 8, **draw).requires_grad_()
    q, k, v, others = leaves
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = (q @ k.mT * 0.4).masked_fill(torch.ones(21, 21).triu(1) > 0, -torch.inf)
    total = torch.logsumexp(torch.cat([scores, others], dim=-1), -1)
    out = (scores - total[..., None]).exp() @ v
    if brought:
        out = out + (others - total[..., None]).exp() @ value
    wanted = out, scores.logsumexp(-1), total
    got = kernels.attention_beside(q, *leaves[1:3], 0.4, others, value if brought else None)
    upstream = [torch.randn(x.shape, **draw) for x in wanted]
    leaves.append(value)
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [0, 1, 2]):
        both = [
            torch.autograd.grad(sum((found[i] * upstream[i]).sum() for i in chosen), leaves, retain_graph=True)
            for found in ([x + 0 * value.sum() for x in got], [x + 0 * sum(y.sum() for y in leaves) for x in wanted])
        ]
        for name, ours, theirs in zip(("q", "k", "v", "others", "value"), *both, strict=True):
            at = lambda message, name=name, of=chosen: f"{name} of {of}: {message}"  # noqa: E731
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10, msg=at)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_a_gradient_in_another_layout_than_the_output_gives_the_same(cuda_operators):
    """What stands in for cuDNN's operator refuses it: torch's own would run a graph that was made for another one."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64)
    found = []
    for given in (upstream, upstream.transpose(1, 2).contiguous().transpose(1, 2)):
        out, lse = kernels.attention_with_lse(*leaves, 0.3)
        found.append(torch.autograd.grad((out, lse), leaves, (given, torch.ones_like(lse))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_cudnn_is_chosen_where_torch_would_choose_it(monkeypatch):
    """On fake tensors of a GPU whose generation is given; a window, a wide head and a single position are not its."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91800)

    def chosen(capability, shape=(2, 4, 70, 64), dtype=torch.bfloat16, window=None):
        monkeypatch.setattr(cuda, "get_device_capability", lambda index: capability)
        with FakeTensorMode():
            return backends.backend_for("cuda", torch.empty(shape, dtype=dtype, device="cuda:0"), window).name

    assert [chosen((major, 0)) for major in (8, 9, 10)] == ["flash", "cuDNN", "cuDNN"]
    assert chosen((9, 0), window=8) == "flash"
    assert [chosen((9, 0), (2, 4, 70, width)) for width in (128, 136)] == ["cuDNN", "flash"]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    wide = [chosen((9, 0), (2, 4, 70, width)) for width in (136, 256, 264)]
    assert wide == ["cuDNN", "cuDNN", "memory-efficient"]
    assert chosen((9, 0), (2, 4, 1, 64)) == "flash"
    assert chosen((9, 0), dtype=torch.float32) == "memory-efficient"
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert chosen((9, 0)) == "flash"
    monkeypatch.undo()
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen((9, 0)) == "flash"


def test_a_device_without_kernels_is_named():
    with pytest.raises(UsageError, match=r"attention in float64 on cuda: no fused kernel is known"):
        backends.backend_for("cuda", torch.zeros(1, 1, 1, 8, dtype=torch.float64))


def assert_like_float64(name, width, dtype, tolerance, device, length, monkeypatch):
    """Output and gradients of an arm on kernels of a GPU are those of the same one on a CPU in float64."""
    torch.manual_seed(0)
    module, x, place = build(name, width, dtype, device, length)
    with torch.no_grad():
        for parameter in (x, *module.parameters()):
            # The same numbers on every device: of others the terms of λ's gradient may add up to nearly nothing.
            parameter.copy_(torch.randn(parameter.shape) * (width**-0.5 / 2 if parameter.ndim == 2 else 1.0))
    slow, x_slow, _ = build(name, width, torch.float64, length=length)
    slow.load_state_dict({key: value.cpu().double() for key, value in module.state_dict().items()})
    x_slow.data = x.detach().cpu().double()
    tensors = {field: value.cpu() for field, value in vars(place).items() if torch.is_tensor(value)}
    place_slow = dataclasses.replace(place, **tensors)
    upstream = torch.randn(x.shape, dtype=torch.float64)
    results = []
    for one, inputs, where in ((module, x, place), (slow, x_slow, place_slow)):
        if one is slow:
            monkeypatch.setattr(kernel_devices, "chosen_for", None)
        out = one(inputs, where)
        loss = (out * upstream.to(out)).sum()
        results.append([out, *torch.autograd.grad(loss, [inputs, *one.parameters()])])
    for got, wanted in zip(*results, strict=True):
        assert float((got.cpu().double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(("width", "dtype", "tolerance"), [(64, torch.bfloat16, 3e-2), (20, torch.float32, 2e-5)])
def test_on_a_gpu_every_arm_equals_the_cpu_in_float64(name, width, dtype, tolerance, monkeypatch):
    assert_like_float64(name, width, dtype, tolerance, "cuda", 600, monkeypatch)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ARMS)
def test_interpreted_every_arm_equals_the_cpu_in_float64(name, cuda_operators, small_tiles, monkeypatch):
    """This project's kernels under Triton's interpreter, torch's operators as formulas."""
    assert_like_float64(name, 24, torch.float32, 2e-5, "cpu", 70, monkeypatch)


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_compiled_graph_has_no_break(device):
    """Forward and backward, with gradients of log-sum-exps, other keys, and heads in the layout of their projection;
    and gives what the same does without a graph."""

    def attend(q_BTHK, k_BHTK, v_BHTK, others_BHTN):
        q = 2 * q_BTHK.transpose(1, 2)
        out, lse, total = kernels.attention_beside(q, k_BHTK, v_BHTK, 0.3, others_BHTN, v_BHTK[0, :, :1])
        alone, lse_alone = kernels.attention_with_lse(q, k_BHTK, v_BHTK, 0.3)
        return out + alone + (lse + total + lse_alone)[..., None]

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = [torch.randn(2, 64, 4, 64), *(torch.randn(2, 4, 64, 64) for _ in range(2)), torch.randn(2, 4, 64, 1)]
    leaves = [x.to(device, dtype if x.shape[-1] > 1 else None).requires_grad_() for x in made]
    exact_leaves = [x.detach().cpu().double().requires_grad_() for x in leaves]
    exact = attend(*exact_leaves)
    wanted = [exact.detach(), *torch.autograd.grad(exact.square().sum(), exact_leaves)]
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = function(*leaves)
        found = [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
        for got, of_it in zip(found, wanted, strict=True):
            error = float((got.detach().cpu().double() - of_it).norm() / of_it.norm())
            assert error < (3e-2 if device == "cuda" else 1e-5)
