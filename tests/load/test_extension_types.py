"""The stub of the extension says what the extension has."""

from __future__ import annotations

import ast
from pathlib import Path

from tensorizer import _C

STUB = Path(_C.__file__).parent / "_C.pyi"
INHERITED = {"name", "value"}  # of enumerations


def public_names(namespace):
    return {name for name in vars(namespace) if not name.startswith("_")}


def declared(body):
    names = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return names


def test_the_stub_names_what_the_extension_has_and_nothing_else():
    stub = declared(ast.parse(STUB.read_text(encoding="utf-8")).body)
    assert set(stub) == public_names(_C)
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef) and isinstance(getattr(_C, name), type):
            inside = {n for n in declared(node.body) if not n.startswith("_")}
            here, bases = getattr(_C, name), getattr(_C, name).__mro__[1:]
            above = set().union(*(public_names(base) for base in bases))  # a stub may narrow what is inherited
            assert inside - INHERITED - above == public_names(here) - INHERITED - above, name
