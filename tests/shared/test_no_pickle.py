"""No part of pagemill loads what executes code: such calls on a socket were remote code execution elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("shared", "services", "kernels", "cli") for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "eval", "exec"}


def forbidden(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Attribute(attr=("recv_pyobj" | "send_pyobj" | "recv_serialized") as name):
                yield name
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield name


def test_no_module_unpickles_or_executes_what_it_receives() -> None:
    assert len(SOURCES) > 20
    found = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if (names := list(forbidden(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code", ["import pickle", "from dill import loads", "socket.recv_pyobj()", "eval(text)", "import joblib.x"]
)
def test_the_search_finds_what_it_is_for(code: str) -> None:
    assert list(forbidden(ast.parse(code)))
