"""`birthmark audit` of our own runs."""

import json
import shutil

from birthmark.launch.cli import main


def test_a_run_is_a_suite_and_a_damaged_checkpoint_of_it_is_named(run_of_two_checkpoints, capsys, tmp_path):
    run = shutil.copytree(run_of_two_checkpoints.path, tmp_path / "run")
    assert main(["audit", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found["checkpoints"]] == [0, 2, 4]
    assert found["checkpoints"][2]["cosine_with_first"] > 0.5
    file = max((run / "checkpoints").glob("step-*4/*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert main(["audit", str(run), "--json"]) == 3
    (_, _, damaged) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert damaged["findings"][0]["kind"] == "damaged"
    assert "its SHA-256 is not the one in state.json" in damaged["findings"][0]["what"]
