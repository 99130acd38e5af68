"""Every example program runs, on a tiny model, without the demo extra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


SAYS = {
    "quickstart": "Same tokens as plain greedy decoding: yes",
    "block_drafter": "Same tokens as plain greedy decoding: yes",
    "feature_drafter": "Same tokens as plain greedy decoding: yes",
    "hybrid_target": "Same tokens as plain greedy decoding: yes",
    "device_rounds": "Same tokens as plain greedy decoding, both: yes",
}
"""What an example must have found."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, tmp_path):
    result = subprocess.run(
        [sys.executable, str(example), "--tiny"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert SAYS.get(example.stem, "") in result.stdout
    assert result.stdout.strip()
    assert "Warning" not in result.stderr, result.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was unpacked or downloaded
