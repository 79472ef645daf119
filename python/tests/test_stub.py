"""The stub says what the compiled module is; one build of it serves every Python, with torch or without."""

import ast
import inspect
import subprocess
from pathlib import Path

import pytest

from polder import _core

STUB = ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef) and hasattr(_core, node.name)}


def parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def test_every_public_name_stands_in_the_stub() -> None:
    names = {node.name for node in STUB.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert {name for name in dir(_core) if not name.startswith("_")} <= names


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_members_that_its_stub_has(name: str) -> None:
    actual = getattr(_core, name)
    bases = [base.id for base in CLASSES[name].bases if isinstance(base, ast.Name) and base.id in CLASSES]
    body = [node for of in (*bases, name) for node in CLASSES[of].body]
    stubbed = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    # A buffer shows its methods from Python 3.12 on; the stub's base has them.
    inherited = set(dir(object)) | {"__weakref__", "__module__", "__buffer__", "__release_buffer__"}
    assert set(dir(actual)) - inherited == set(stubbed) - inherited
    for member, node in stubbed.items():
        if any(isinstance(by, ast.Name) and by.id == "property" for by in node.decorator_list):
            continue
        call = actual if member == "__new__" else getattr(actual, member)
        assert [p for p in inspect.signature(call).parameters if p != "self"] == parameters(node), member


@pytest.mark.parametrize("name", [node.name for node in STUB.body if isinstance(node, ast.FunctionDef)])
def test_a_function_has_the_parameters_that_its_stub_has(name: str) -> None:
    node = next(node for node in STUB.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert list(inspect.signature(getattr(_core, name)).parameters) == parameters(node)


def test_the_compiled_module_is_for_every_python_and_linked_to_neither_python_nor_torch() -> None:
    module = _core.__file__
    assert module.endswith(".abi3.so")
    linked = subprocess.run(["ldd", module], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in linked
    assert "torch" not in linked and "python" not in linked.replace(module, "")
