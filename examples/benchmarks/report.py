"""Writes one benchmark's figures to `docs/benchmarks/<topic>.json`, with what is needed to run it again."""

import json
import platform
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "benchmarks"


def _revision() -> str:
    """The commit that is checked out, and whether files other than reports differ from it."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    revision = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    changed = git(["git", "diff", "--quiet", "HEAD", "--", ".", f":!{FOLDER.relative_to(ROOT)}"]).returncode
    return revision + ("-dirty" if changed else "") if revision else "unknown"


REVISION = _revision()  # when a run begins


def figure(value: float, unit: str, against: str) -> dict[str, Any]:
    """One figure: a number, its unit, and what it is measured against in the same run."""
    return {"value": value, "unit": unit, "against": against}


def write(
    topic: str,
    figures: dict[str, dict[str, Any]],
    *,
    device: str,
    versions: dict[str, str] | None = None,
    revision: str | None = None,
    quiet: bool = False,
) -> Path:
    """Writes the file that the documentation's tables are generated from, and prints the table unless `quiet`."""
    result = {
        "topic": topic,
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]),
        "revision": revision or REVISION,
        "versions": versions or installed(),
        "device": device,
        "figures": figures,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{topic}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, entry in figures.items() if not quiet else ():
        print(f"{name:50} {entry['value']:10.4g} {entry['unit']:16} {entry['against']}")
    return path


def installed() -> dict[str, str]:
    """Versions of what the figures depend on."""
    return {name: metadata.version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()}


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
