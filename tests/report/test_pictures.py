"""Pictures are drawn by a library that is loaded when one is drawn, and whose settings stay those of others."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import birthmark.report
from birthmark.report.pictures.heads import draw_head_maps
from birthmark.report.pictures.saving import save_png

pytestmark = pytest.mark.heavy


def test_pictures_leave_the_settings_of_others_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = draw_head_maps([("at birth", np.full((2, 2), 0.25))], "sink mass")
    save_png(figure, tmp_path / "sink.png")
    assert (tmp_path / "sink.png").read_bytes().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_importing_reports_needs_no_matplotlib():
    code = "import sys, birthmark.report.run_page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for file in (Path(birthmark.report.__file__).parent / "pictures").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not module.startswith("engine.") or module == "engine.letters", file
