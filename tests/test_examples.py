"""Every example program runs, on a tiny model, without the demo extra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(example: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(example), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, tmp_path):
    result = run(example, tmp_path, "--tiny")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "Warning" not in result.stderr, result.stderr


def test_quickstart_gives_the_tokens_of_plain_decoding(tmp_path):
    output = run(ROOT / "examples" / "quickstart.py", tmp_path, "--tiny", "--max-new-tokens", "32").stdout
    assert "Same tokens as plain greedy decoding: yes" in output
    assert "32 plain" in output
