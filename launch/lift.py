"""Write a technique as one file, which needs nothing of this repository: `make lift`.

    python launch/lift.py tp_llama file.py

A script's technique is all that stands above "what is shown with it". Of the modules that it
imports, the file has the definitions that are used, in the order in which they depend on each
other. With a technique that splits a model comes what a training asks of it: the sum of gradients,
their norm and clipping, the full state, the folder. What needs the harness is left out, and named.
"""

import argparse
import ast
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASKS = ROOT / "tasks"
SHOWN = "what is shown with it"
HARNESS = "harness", "loading", "checkpoints", "shared_memory"
SPLITS = {("utils.shards", "refuse_on_slices"), ("utils.sequence", "convert_attention")}
FOR_TRAINING = {
    "utils.full_model": ["clip_grad_norm_", "full_state_dict", "grad_norm", "save_pretrained"],
    "utils.replicas": ["sum_gradients"],
}
# What splits the model that these take.
TAKEN = {"kv_cache": ("tp_llama", "tensor_parallelize"),
         "ulysses_finetune": ("ulysses_forward", "sequence_parallelize")}  # fmt: skip


class Module:
    """A module of the project: its definitions, and what it imports."""

    def __init__(self, name):
        self.name, self.path = name, TASKS / f"{name.replace('.', '/')}.py"
        self.text = self.path.read_text()
        self.lines = self.text.splitlines(keepends=True)
        self.tree = ast.parse(self.text)
        above, found, _ = self.text.partition(SHOWN)
        self.end = above.count("\n") if found else None  # of the technique, in a script
        self.definitions = {}  # {name: the statement that binds it}
        self.imports = {}  # {name: (project's module, its name there)}
        self.libraries = {}  # {name: an import statement}
        for node in self.tree.body:
            for name in bound_by(node):
                self.definitions[name] = node
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and file_of(node.module):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = node.module, alias.name
        self.before = set()  # the project's modules that this one is loaded after
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.add_library(node)

    def add_library(self, node):
        if isinstance(node, ast.ImportFrom) and file_of(node.module):
            self.before.add(node.module)
            return
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if name in HARNESS:
                continue
            named = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            of = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            self.libraries[name] = f"{of}import {named}"

    def technique(self):
        """The names of what stands above "what is shown with it"."""
        if self.end is None:
            sys.exit(f"error: {self.path.name} has no line {SHOWN!r}")
        return [name for name, node in self.definitions.items() if node.lineno < self.end]

    def source(self, node):
        """A statement's text, with the comment above it, without imports of the project."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while (
            first and self.lines[first - 1].startswith("#") and "----" not in self.lines[first - 1]
        ):
            first -= 1
        dropped = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom) and file_of(inner.module):
                dropped |= set(range(inner.lineno - 1, inner.end_lineno))
                if not self.lines[inner.end_lineno].strip():
                    dropped.add(inner.end_lineno)
        kept = [i for i in range(first, node.end_lineno) if i not in dropped]
        return "".join(self.lines[i] for i in kept).rstrip() + "\n"


def file_of(name):
    """Whether a module's name is one of the project's."""
    return bool(name) and (TASKS / f"{name.replace('.', '/')}.py").exists()


def bound_by(node):
    """The names that a top-level statement binds; imports, but for those in a `try`, bind none."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Try):
        inner = [statement for handler in node.handlers for statement in handler.body]
        imports = [one for one in [*node.body, *inner] if isinstance(one, ast.ImportFrom)]
        return {alias.asname or alias.name for one in imports for alias in one.names}
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = (name for target in targets for name in ast.walk(target))
    return [name.id for name in names if isinstance(name, ast.Name)]


@cache
def load(name):
    return Module(name)


def used_by(node):
    """The names that a statement uses."""
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def find_needed(module, names):
    """{(module, name)} of the definitions that these need; and of those that need the harness."""
    needed, refused = set(), set()

    def visit(module, name):
        """Whether a definition does without the harness."""
        if (module, name) in needed | refused:
            return (module, name) in needed
        needed.add((module, name))  # for those that need each other
        node = load(module).definitions[name]
        free = load(module).end is None or node.lineno < load(module).end
        for used in sorted(used_by(node)):
            if used in HARNESS:
                free = False
            elif used in load(module).imports:
                free &= visit(*load(module).imports[used])
            elif used in load(module).definitions and used != name:
                free &= visit(module, used)
        if not free:
            needed.discard((module, name))
            refused.add((module, name))
        return free

    for name in names:
        visit(module, name)
    # What is refused may have brought others, which nothing else needs.
    kept = set()

    def keep(module, name):
        if (module, name) in kept:
            return
        kept.add((module, name))
        for used in used_by(load(module).definitions[name]):
            if used in load(module).imports:
                keep(*load(module).imports[used])
            elif used in load(module).definitions:
                keep(module, used)

    for name in names:
        if (module, name) in needed:
            keep(module, name)
    return kept, {name for of, name in refused if of == module and name in names}


def in_order(modules):
    """Modules, each behind those that it imports at its top; within functions, at a call."""
    done, begun = [], set()

    def visit(name):
        if name in begun:
            return
        begun.add(name)
        for other in sorted(load(name).before & modules.keys()):
            visit(other)
        done.append(name)

    for name in sorted(modules):
        visit(name)
    return done


def lift(task):
    """The file's text, and the names of the technique's functions that it leaves out."""
    module = load(task)
    needed, refused = find_needed(task, module.technique())
    if task in TAKEN:
        script, name = TAKEN[task]
        needed |= find_needed(script, [name])[0]
    if needed & SPLITS:
        for of, names in FOR_TRAINING.items():
            needed |= find_needed(of, names)[0]
    names_of = defaultdict(set)
    for of, name in needed:
        names_of[of].add(name)
    owner, libraries, parts = {}, set(), []
    for of in in_order(names_of):
        part = load(of)
        statements = []
        for name in part.definitions:
            if name in names_of[of]:
                if owner.setdefault(name, of) != of:
                    sys.exit(f"error: {name} is in {of} and in {owner[name]}")
                node = part.definitions[name]
                if node not in statements:
                    statements.append(node)
        for node in sorted(statements, key=lambda node: node.lineno):
            used = used_by(node)
            libraries |= {part.libraries[name] for name in used if name in part.libraries}
            parts.append(part.source(node))
    licence = (ROOT / "LICENSE").read_text().splitlines()
    notice = next(line for line in licence if line.startswith("Copyright"))
    docstring = ast.get_docstring(module.tree, clean=False)
    plain = sorted(line for line in libraries if line.startswith("import "))
    others = sorted(libraries - set(plain))
    head = [
        f'"""{docstring}"""\n',
        f"# Written by `make lift TASK={task}`. {licence[0]}. {notice}.\n",
        "\n".join([*plain, *others]) + "\n\n",
    ]
    return "\n".join(head) + "\n\n".join(parts), refused


def main():
    scripts = sorted(path.stem for path in TASKS.glob("*.py"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "task", choices=scripts, metavar="TASK", help=f"one of {', '.join(scripts)}"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    args = parser.parse_args()
    text, refused = lift(args.task)
    try:
        args.out.write_text(text)
    except OSError as error:
        sys.exit(f"error: {args.out}: cannot be written ({error.strerror})")
    print(f"wrote {args.out}: {text.count(chr(10))} lines")
    if refused:
        print(f"left out, for they need the harness: {', '.join(sorted(refused))}")


if __name__ == "__main__":
    main()
