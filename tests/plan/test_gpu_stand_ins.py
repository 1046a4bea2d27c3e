"""What stands in for a GPU in a rehearsal, against torch itself."""

import ast
from pathlib import Path

import torch

import birthmark
from birthmark.plan.rehearsal import KERNELS, WIDE

ROOT = Path(birthmark.__file__).parent


def registered():
    """Functions that autocast treats on a GPU and leaves alone on a CPU, from torch's own registry."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            treats = torch._C._dispatch_has_kernel_for_dispatch_key
            if treats(name, "AutocastCUDA") and not treats(name, "AutocastCPU"):
                found.add(name.removeprefix("aten::").partition(".")[0])
    return found


#: Of these, a GPU's autocast makes arguments alike in place of making them wide (torch's documentation of amp); the
#: products of einsum are narrow on both, and so are fused attentions.
OTHERS = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "scatter_add", "einsum"}
OTHERS |= {"_scaled_dot_product_flash_attention"}


def test_wide_functions_are_those_of_a_gpus_autocast():
    assert registered() >= WIDE
    used = set()
    for file in (ROOT / "models").rglob("*.py"):
        used |= {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    assert (registered() - OTHERS) & used <= WIDE


def test_the_fused_kernels_keep_the_shapes_that_they_replace():
    q_BHTK, k_BHTK, v_BHTK = torch.randn(3, 2, 4, 6, 8).unbind()
    calls = {"scaled_dot_product_attention": (q_BHTK, k_BHTK, v_BHTK), "rms_norm": (q_BHTK, (8,), torch.ones(8))}
    for name, arguments in calls.items():
        real = getattr(torch.nn.functional, name)(*arguments)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            stand_in = KERNELS[name](*fake)
        assert (stand_in.shape, stand_in.dtype) == (real.shape, real.dtype)
