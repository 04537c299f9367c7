"""Who may import whom: the direction that CONTRIBUTING.md states, read from the source of every module."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "slurm_affinode"

# Upwards. What stands in one row does not know each other, but for SIBLINGS.
LAYERS = (
    {"model"},
    {"core"},
    {"slurm", "gpu", "checkpoint", "history", "store"},
    {"analysis", "report"},
    {"workflow", "agent"},
    {"demo", "api"},
    {"cli"},
)
# For all, know nobody.
SUPPORT = {
    "errors", "files", "jsonvalues", "kerneltext", "limits", "memory", "packed", "patience", "pinned",
    "process", "resources", "sizes", "starter", "timespec", "tomllines", "urls", "users",
    "zones",
}  # fmt: skip
CONFIG = {"config", "configvalues", "nodeconfig", "tierconfig", "zombieconfig"}  # for all but model and core
# Of SUPPORT: not for model and core, which decide and do nothing.
EFFECTS = {"files", "memory", "packed", "patience", "pinned", "process", "resources", "starter"}

# (who, whom): one row, and yet. The columns of the tables are Slurm's; a report renders an analysis; the command line
# asks the agents of the nodes.
SIBLINGS = {
    ("store", "slurm.schema"),
    ("report", "analysis"),
    ("workflow", "agent.client"),
    ("workflow", "agent.settings"),
}
# A library that has one owner: a part of the package, or a module.
OWNERS = {
    "click": ("cli",),
    "rich": ("cli",),
    "subprocess": ("process",),
    "sqlalchemy": ("store",),
    "jinja2": ("report",),
    "pandas": ("api",),
    "pynvml": ("gpu.nvml",),
    "cuda": ("checkpoint.cuda_driver",),
    "pyslurm": ("slurm.pyslurm_worker",),
    "prometheus_client": ("gpu", "workflow.exporter"),
    "polars": ("slurm", "history", "store", "analysis", "report", "workflow", "demo", "cli"),
}
IMPURE = {
    "asyncio",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "random",
    "shutil",
    "signal",
    "socket",
    "threading",
    "time",
}


@cache
def modules() -> dict[str, ast.Module]:
    """Module (without the package's name) -> its syntax tree."""
    found = {}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        name = ".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return found


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Full names of all that a module imports, inside of functions, too: ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(one.value) for one in node.args if isinstance(one, ast.Constant))


@cache
def imports() -> Mapping[str, set[str]]:
    """What each module imports."""
    return {name: set(imported(name, tree)) for name, tree in modules().items()}


def own(name: str) -> set[str]:
    """What a module imports of the package: ``slurm.schema.JOBS``."""
    mine = (one.removeprefix(PACKAGE + ".") for one in imports()[name] if one.startswith(PACKAGE + "."))
    return {one for one in mine if one != "__version__"}


def part(name: str) -> str:
    return name.partition(".")[0]


def rank(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part(name) in layer)


def module_of(name: str) -> str:
    """The module that has ``name``: a module has itself."""
    return name if name in modules() else name.rpartition(".")[0]


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def allowed(name: str, target: str) -> bool:
    mine, its = part(name), part(target)
    if mine == its:
        return True
    if mine in SUPPORT:
        return its in SUPPORT
    if mine in CONFIG:
        return its in SUPPORT | CONFIG | {"model"}
    if its in SUPPORT:
        return not (rank(name) <= 1 and its in EFFECTS)
    if its in CONFIG:
        return rank(name) > 1
    if rank(target) < rank(name):
        return True
    return any(within(name, who) and within(target, whom) for who, whom in SIBLINGS)


def test_every_part_of_the_package_has_its_place() -> None:
    """A folder or module that is added is put into a layer, so that the rules reach it."""
    assert {part(name) for name in modules()} - {"__init__"} == set().union(*LAYERS, SUPPORT, CONFIG)


def test_imports_point_one_way() -> None:
    """No module knows a higher layer, nor its own row but where that is said above."""
    wrong = [f"{name} imports {target}" for name in modules() for target in own(name) if not allowed(name, target)]
    assert wrong == []


def test_no_exception_outlives_its_need() -> None:
    """Each pair of SIBLINGS is there."""
    pairs = [(name, target) for name in modules() for target in own(name)]
    unused = [one for one in SIBLINGS if not any(within(a, one[0]) and within(b, one[1]) for a, b in pairs)]
    assert unused == []


def test_a_library_is_known_to_its_owner_alone() -> None:
    """A vendor's types and errors stop where they come in."""
    strangers = [
        f"{name} imports {library}"
        for name, targets in imports().items()
        for library, owners in OWNERS.items()
        if any(within(target, library) for target in targets) and not any(within(name, owner) for owner in owners)
    ]
    assert strangers == []


def test_what_decides_does_nothing() -> None:
    """``model`` and ``core``: the standard library, and of that nothing with an effect, nor a look at a clock."""
    for name, tree in modules().items():
        if part(name) not in ("model", "core"):
            continue
        tops = {part(target) for target in imports()[name]} - {PACKAGE}
        assert tops <= sys.stdlib_module_names - IMPURE, name
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not {one for one in calls if re.search(r"(^|\.)(now|utcnow|today|open|print)$", one)}, name


def test_no_two_modules_need_each_other() -> None:
    """There is an order in which all modules can be read: no circle, not even one hidden in a function."""
    left = {name: {module_of(one) for one in own(name)} for name in modules()}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert left == {}


def test_the_direction_is_the_one_that_contributors_are_told() -> None:
    """CONTRIBUTING.md names these layers, from the top."""
    line = re.search(r"`(cli -> [^`]*)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert line is not None
    told = [set(row.split(" | ")) for row in line[1].split(" -> ")]
    assert told == [layer for layer in reversed(LAYERS) if layer != {"demo", "api"}]


def test_headings_of_tables_are_in_one_style() -> None:
    """Lower case, but for names and units: what ``print_table`` and ``add_column`` are given as text."""
    shouted = [
        f"{name}: {word.value}"
        for name, tree in modules().items()
        if part(name) == "cli"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("print_table", "add_column")) and call.args
        for word in ast.walk(call.args[0])
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
        and re.match(r"[A-Z]", word.value) and not re.match(r"(GPUs?\b|GPU-h)", word.value)
    ]  # fmt: skip
    assert shouted == []
