"""The import rules of the design, read from the source of every module: nothing is executed to find out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "minite").rglob("*.py"))

# Package (or top-level module) -> what else of minite it may import.
_BASE = {"errors", "config"}
_NUMERIC = _BASE | {"formats", "backends"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "ports": set(),
    "config": {"errors", "models"},  # models for shapes: torch-free
    "models": _BASE,
    "formats": _BASE,
    "backends": _BASE | {"formats"},
    "layers": _NUMERIC,
    "sync": _NUMERIC | {"types", "models"},
    "losses": _BASE | {"types"},
    "diagnostics": _BASE | {"types"},
    "learner": _NUMERIC | {"types", "models", "layers", "sync", "losses", "diagnostics"},
    "sampler": _NUMERIC | {"types", "models", "layers", "sync", "ports"},
    "driver": _NUMERIC | {"types", "ports", "models", "sync", "losses", "diagnostics", "learner", "sampler"},
    "launch": _BASE | {"models", "sync", "sampler"},  # sampler.sglang: options and method of slime's engines
}
ALLOWED["evaluation"] = ALLOWED["driver"] | {"driver"}
ALLOWED["cli"] = set(ALLOWED)

# Third-party package -> the one folder that may import it.
HOMES = {
    "megatron": "minite/learner",
    "sglang": "minite/sampler/sglang",
    "ray": "minite/driver",
    "triton": "minite/backends/triton",
    "numba": "minite/backends/cpu",
    "matplotlib": "minite/diagnostics",
}
# imported inside a function, where a recipe or an argument asks for it
LAZY = {"transformers", "prometheus_client", "wandb", "reasoning_gym", "lm_eval"}
SERVED = {"minite/driver/reasoning_served.py"}  # but in a file that only a process of its own imports
NEVER = {"slime_plugin", "slime", "tests", "scripts"}


def imports(tree: ast.AST, module: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands. ``from minite import x`` counts as minite.x."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base in ("minite", "") else [base]
            found += [(node.lineno, name) for name in names]
    return found


def owner(path: str) -> str:
    """minite/config/load.py -> config; minite/types.py -> types."""
    return path.split("/")[1].removesuffix(".py")


def import_errors(path: str, source: str) -> list[str]:
    """Every import of one file that breaks a rule. ``path`` is relative to the repository, with slashes."""
    tree = ast.parse(source)
    module = path.removesuffix(".py").replace("/", ".")
    package, errors = owner(path), []
    inside_functions = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, _ in imports(node, module)
    }
    for line, name in imports(tree, module):
        top, _, rest = name.partition(".")
        if top == "minite" and rest:
            target = rest.partition(".")[0]
            if target != package and target in ALLOWED and target not in ALLOWED.get(package, set()):
                errors.append(f"{path}:{line}: {package} must not import minite.{target}")
        elif top in HOMES and not path.startswith(HOMES[top] + "/"):
            errors.append(f"{path}:{line}: {top} is imported in {HOMES[top]} only")
        elif top in LAZY and path not in SERVED and line not in inside_functions:
            errors.append(f"{path}:{line}: {top} is imported inside functions only")
        elif top in NEVER:
            errors.append(f"{path}:{line}: minite must not import {top}")
    return errors


def environment_errors(path: str, source: str) -> list[str]:
    """Uses of environment variables outside config/env.py."""
    if path == "minite/config/env.py":
        return []
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in words)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and words & {a.name for a in node.names})
    ]
    return [f"{path}:{line}: environment variables belong to minite/config/env.py" for line in lines]


def import_time_errors(path: str, source: str) -> list[str]:
    """Module-level statements that do something: calls whose result is dropped, loops, with; hidden import failures."""
    tree, errors = ast.parse(source), []
    for node in tree.body:
        acts = isinstance(node, ast.For | ast.While | ast.With | ast.Try | ast.Delete)
        if acts or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            errors.append(f"{path}:{node.lineno}: something happens at import")
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            silent = all(isinstance(statement, ast.Pass | ast.Assign) for statement in node.body)
            if caught & {"ImportError", "ModuleNotFoundError"} and silent:
                errors.append(f"{path}:{node.lineno}: a failed import is hidden")
    return errors


CHECKS = [import_errors, environment_errors, import_time_errors]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_file_keeps_the_rules(check):
    assert len(FILES) > 50
    errors = [e for file in FILES for e in check(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))]
    assert not errors, "\n" + "\n".join(errors)


def test_every_package_has_a_rule():
    assert {owner(file.relative_to(ROOT).as_posix()) for file in FILES} - {"__init__"} <= set(ALLOWED)


def test_allowed_imports_have_no_cycle_but_config_and_models():
    """config reads shapes from models; of those only hf_config, which config never loads, needs config to run."""
    reach = {package: set(targets) for package, targets in ALLOWED.items() if package != "cli"}
    reach["models"] = reach["models"] - {"config"}
    for _ in reach:  # longer paths than there are packages do not exist
        reach = {package: targets.union(*(reach[t] for t in targets)) for package, targets in reach.items()}
    assert not [package for package in reach if package in reach[package]]


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("minite/config/a.py", "import minite.formats.nvfp4", "config must not import minite.formats"),
        ("minite/config/a.py", "from minite import layers", "config must not import minite.layers"),
        ("minite/sampler/embedded/a.py", "from minite.learner import worker", "sampler must not import minite.learner"),
        ("minite/learner/a.py", "def f():\n    from minite.sampler import x", "learner must not import minite.sampler"),
        ("minite/formats/a.py", "from ..backends import x", "formats must not import minite.backends"),
        ("minite/losses/a.py", "from minite.learner.worker import W", "losses must not import minite.learner"),
        ("minite/types.py", "import minite.errors", "types must not import minite.errors"),
        ("minite/driver/a.py", "import megatron.core", "megatron is imported in minite/learner only"),
        ("minite/cli/runs.py", "def f():\n    import ray", "ray is imported in minite/driver only"),
        ("minite/sampler/embedded/a.py", "from sglang import x", "sglang is imported in minite/sampler/sglang only"),
        ("minite/backends/a.py", "import triton", "triton is imported in minite/backends/triton only"),
        ("minite/driver/a.py", "from transformers import A", "transformers is imported inside functions only"),
        ("minite/layers/a.py", "import slime_plugin.loss", "minite must not import slime_plugin"),
        ("minite/layers/a.py", "import os\nx = os.environ", "environment variables belong"),
        ("minite/layers/a.py", "from os import getenv", "environment variables belong"),
        ("minite/layers/a.py", "print(1)", "something happens at import"),
        ("minite/layers/a.py", "for i in []:\n    pass", "something happens at import"),
        (
            "minite/layers/a.py",
            "def f():\n    try:\n        import a\n    except ImportError:\n        a = None",
            "hidden",
        ),
    ],
)
def test_the_checks_see_a_breach(path, source, expected):
    found = [error for check in CHECKS for error in check(path, source)]
    assert len(found) == 1 and expected in found[0], found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("minite/learner/a.py", "from megatron.core import x\nfrom minite.sync import y\nimport torch"),
        ("minite/driver/a.py", "def f():\n    from transformers import A\n    import ray"),
        ("minite/config/env.py", "import os\nx = os.environ"),
        ("minite/layers/a.py", '"""Doc."""\nfrom . import b\nx = f()\n\ndef f() -> None: ...\n'),
    ],
)
def test_the_checks_pass_what_is_allowed(path, source):
    assert not [error for check in CHECKS for error in check(path, source)]


@pytest.mark.parametrize("module", ["minite", "minite.config", "minite.models"])
def test_import_is_quick_and_light(module):
    """Under a second of CPU time, the interpreter's own start included, and nothing heavy with it."""
    heavy = ["torch", "numpy", "ray", "megatron", "triton", "numba", "transformers", "sglang", "matplotlib"]
    code = f"import sys, time, {module}; print(time.process_time(), [m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    seconds, loaded = out.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert float(seconds) < 1.0
