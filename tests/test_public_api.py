"""Every public name is documented, and shown in an example that runs."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import specdec

ROOT = Path(__file__).parents[1]
INTERNAL = {"specdec.hf.compat"}  # names of transformers, for `specdec.hf` alone


def public_modules() -> list[ModuleType]:
    names = [
        module.name
        for module in pkgutil.walk_packages(specdec.__path__, "specdec.")
        if module.name not in INTERNAL and not any(part.startswith("_") for part in module.name.split("."))
    ]
    return [importlib.import_module(name) for name in ["specdec", *names]]


def offered(modules: list[ModuleType]) -> dict[str, Any]:
    """What the `__all__` of a module offers, by full name; modules within modules are looked at themselves."""
    named = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in getattr(module, "__all__", ())
    }
    return {name: value for name, value in named.items() if not inspect.ismodule(value)}


def public_objects(modules: list[ModuleType]) -> dict[str, Any]:
    """The classes and functions among them that are the library's own."""
    return {
        name: value
        for name, value in offered(modules).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("specdec.")
    }


def public_constants(modules: list[ModuleType]) -> set[str]:
    """The last parts of the other names."""
    return {name.rpartition(".")[2] for name in offered(modules).keys() - public_objects(modules).keys()}


def documented_objects() -> list[Any]:
    """What the directives of the reference pages document."""
    found = []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for kind, name in re.findall(r"^\.\. auto(\w+):: (\S+)$", page.read_text(), re.MULTILINE):
            if kind == "module":
                module = importlib.import_module(name)
                defined = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
                found += [getattr(module, member) for member in getattr(module, "__all__", defined)]
            else:
                parent, _, member = name.rpartition(".")
                found.append(getattr(importlib.import_module(parent), member))
    return found


def undocumented(objects: dict[str, Any], documented: list[Any]) -> list[str]:
    return sorted(name for name, value in objects.items() if not any(value is other for other in documented))


def without_docstring(objects: dict[str, Any]) -> list[str]:
    return sorted(
        name for name, value in objects.items() if not (vars(value).get("__doc__") or value.__doc__ or "").strip()
    )


def running_code() -> str:
    """All code that runs as an example: doctests of the package and of the pages, and the example programs."""
    sources = [path.read_text() for path in [*ROOT.glob("specdec/**/*.py"), *ROOT.glob("docs/**/*.md")]]
    prompts = [line for text in sources for line in text.splitlines() if re.match(r"\s*(>>>|\.\.\.) ", line)]
    programs = [path.read_text() for path in ROOT.glob("examples/*.py")]
    return "\n".join([*prompts, *programs])


def without_example(objects: dict[str, Any], code: str) -> list[str]:
    words = set(re.findall(r"\w+", code))
    return sorted(name for name in objects if name.rpartition(".")[2] not in words)


def test_every_public_name_is_in_the_reference():
    assert undocumented(public_objects(public_modules()), documented_objects()) == []


def test_every_public_constant_is_named_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    constants = public_constants(public_modules())
    assert "VOCAB" in constants
    assert {name for name in constants if f"`{name}`" not in pages} == set()


def test_every_public_name_has_a_docstring():
    assert without_docstring(public_objects(public_modules())) == []


def test_every_public_name_is_used_in_an_example_that_runs():
    assert without_example(public_objects(public_modules()), running_code()) == []


def test_the_checks_can_fail():
    class Bare:
        pass

    bare = {"specdec.Bare": Bare}
    assert undocumented(bare, documented_objects()) == ["specdec.Bare"]
    assert without_docstring(bare) == ["specdec.Bare"]
    assert without_example(bare, "BareMinimum()") == ["specdec.Bare"]


def test_import_needs_no_kernels():
    code = "import sys; sys.modules.update(triton=None, specdec_kernels=None); import specdec"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_import_loads_no_kernels():
    code = "import sys, specdec; print(*sorted(name for name in sys.modules if name.startswith('specdec_kernels')))"
    result = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.split() == []
