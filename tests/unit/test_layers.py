"""Import rules between modules, as documented in CONTRIBUTING.md, checked in the source of every module."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from slurm_affinode.base.extras import LIBRARIES

ROOT = Path(__file__).parents[2]
PACKAGE = "slurm_affinode"

# From bottom to top. Parts of one layer do not import each other, except for SIBLINGS.
LAYERS = (
    {"model"},
    {"core"},
    {"slurm", "gpu", "checkpoint", "metrics", "db"},
    {"engines"},
    {"analysis", "report"},
    {"traces"},
    {"suspension", "whatif", "prediction"},
    {"agent", "pipeline", "zombies"},
    {"demo", "api"},
    {"cli"},
)
# Every layer may import it; it imports no layer.
SUPPORT = "base"
# Modules of SUPPORT that model and core may not import: the configuration, and modules with side effects.
CONFIG = {"base.config", "base.node_config"}
EFFECTS = {
    "base.files", "base.fork_server", "base.http", "base.input_files", "base.pidfd", "base.process", "base.resources",
    "base.threads", "base.timeouts",
}  # fmt: skip

# (importer, imported) within one layer. The table columns follow Slurm; a report renders an analysis; clean-up uses
# the ingests of the pipeline and the agents of the nodes; agents discover engines as the exporter does.
SIBLINGS = {
    ("agent", "pipeline.engine_discovery"),
    ("db", "slurm.accounting.schema"),
    ("report", "analysis"),
    ("zombies", "agent.client"),
    ("zombies", "agent.settings"),
    ("zombies", "pipeline"),
}
# Libraries that only some parts of the package or modules may import.
OWNERS = {
    "click": ("cli",),
    "rich": ("cli",),
    "subprocess": ("base.process",),
    "sqlalchemy": ("db",),
    "boto3": ("metrics.parquet.objects",),
    "botocore": ("metrics.parquet.objects",),
    "obstore": ("metrics.parquet.objects",),
    "jinja2": ("report",),
    "pandas": ("api",),
    "pynvml": ("gpu.nvml",),
    "cuda": ("checkpoint.cuda.driver",),
    "httpx": ("base.http",),
    "urllib.request": ("base.http",),
    "http.client": (),
    "lightgbm": ("prediction.quantile_model",),
    "pyslurm": ("slurm.pyslurm_worker",),
    "dask": ("pipeline.dask_workers",),
    "dask_jobqueue": ("pipeline.dask_workers",),
    "distributed": ("pipeline.dask_workers",),
    "prometheus_client": ("gpu", "pipeline.exporter"),
    "polars": (
        "base.columns",
        "slurm",
        "metrics",
        "db",
        "engines",
        "analysis",
        "report",
        "traces",
        "whatif",
        "prediction",
        "pipeline",
        "zombies",
        "demo",
        "cli",
    ),
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
    """Return module (without the package's name) -> syntax tree."""
    result = {}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        name = ".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        result[name.removesuffix(".__init__")] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return result


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield the full names of all imports, also those in functions: ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{item.name}" for item in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


@cache
def imports() -> Mapping[str, set[str]]:
    """Return the imports of each module."""
    return {name: set(imported(name, tree)) for name, tree in modules().items()}


def package_imports(name: str) -> set[str]:
    """Return the imports from the package: ``slurm.schema.JOBS``."""
    names = (item.removeprefix(PACKAGE + ".") for item in imports()[name] if item.startswith(PACKAGE + "."))
    return {item for item in names if item != "__version__"}


def part(name: str) -> str:
    return name.partition(".")[0]


def rank(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part(name) in layer)


def module_of(name: str) -> str:
    """Return the module that defines ``name``; a module is its own."""
    return name if name in modules() else name.rpartition(".")[0]


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def allowed(name: str, target: str) -> bool:
    source_part, target_part = part(name), part(target)
    if source_part == target_part:
        return True
    if source_part == SUPPORT:
        return name in CONFIG and target_part == "model"
    if target_part == SUPPORT:
        return not (rank(name) <= 1 and module_of(target) in EFFECTS | CONFIG)
    if rank(target) < rank(name):
        return True
    return any(within(name, importer) and within(target, target_place) for importer, target_place in SIBLINGS)


def test_every_module_belongs_to_a_layer() -> None:
    """Each folder or module is in a layer, so that the rules apply to it."""
    assert {part(name) for name in modules()} - {"__init__"} == set().union(*LAYERS, {SUPPORT})


def test_imports_point_one_way() -> None:
    """No module imports from a higher layer, or from its own layer except for SIBLINGS."""
    wrong = [
        f"{name} imports {target}"
        for name in modules()
        for target in package_imports(name)
        if not allowed(name, target)
    ]
    assert wrong == []


def test_every_exception_is_used() -> None:
    """Every pair of SIBLINGS is used."""
    pairs = [(name, target) for name in modules() for target in package_imports(name)]
    unused = [
        sibling for sibling in SIBLINGS if not any(within(a, sibling[0]) and within(b, sibling[1]) for a, b in pairs)
    ]
    assert unused == []


def test_library_is_imported_only_by_its_owner() -> None:
    """No other part depends on its types and errors."""
    strangers = [
        f"{name} imports {library}"
        for name, targets in imports().items()
        for library, owners in OWNERS.items()
        if any(within(target, library) for target in targets) and not any(within(name, owner) for owner in owners)
    ]
    assert strangers == []


NODES = {
    "agent", "checkpoint", "cli.agent", "cli.completion", "cli.doctor", "cli.entry", "cli.exporter", "cli.hooks",
    "cli.images", "cli.job", "cli.keep", "cli.setup", "cli.status", "cli.suspend", "cli.zombies_install",
    "cli.zombies_policy", "gpu", "pipeline.suspension_mail", "slurm.pyslurm_worker", "suspension",
}  # fmt: skip
"""Modules that run where the extra ``analysis`` is not installed."""
GUARDED = {
    ("cli.entry", "cli.main"), ("cli.job", "cli.job_source"), ("cli.job", "pipeline.report"),
    ("cli.job", "report.job_page"), ("cli.keep", "db.audit"), ("cli.keep", "db.repository"),
    ("cli.zombies_policy", "zombies.find"), ("pipeline.doctor", "metrics.aliases"),
    ("pipeline.doctor", "pipeline.data_checks"),
}  # fmt: skip
"""(importer, imported) in functions: commands of a lazy group, and imports after ``extras.missing``."""


def test_nodes_import_no_library_of_the_extra() -> None:
    """Not even in functions, apart from those that check whether it is installed."""
    reached: set[str] = set()
    left = {name for name in modules() if any(within(name, place) for place in NODES)}
    while left:
        name = left.pop()
        reached.add(name)
        targets = {module_of(item) for item in package_imports(name)} & modules().keys()
        left |= {target for target in targets - reached if (name, target) not in GUARDED}
    wrong = {
        f"{name} imports {target}"
        for name in reached
        for target in imports()[name]
        if any(within(target, library) for library in LIBRARIES)
    }
    assert wrong == {"slurm.identifiers imports polars"}  # only for types
    assert {pair for pair in GUARDED if pair[1] not in map(module_of, package_imports(pair[0]))} == set()


def test_deciding_modules_have_no_side_effects() -> None:
    """``model`` and ``core`` use only side-effect-free modules of the standard library, and no clock."""
    for name, tree in modules().items():
        if part(name) not in ("model", "core"):
            continue
        tops = {part(target) for target in imports()[name]} - {PACKAGE}
        assert tops <= sys.stdlib_module_names - IMPURE, name
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not {call for call in calls if re.search(r"(^|\.)(now|utcnow|today|open|print)$", call)}, name


def test_modules_have_no_import_cycles() -> None:
    """There are no import cycles, not even in functions."""
    left = {name: {module_of(item) for item in package_imports(name)} for name in modules()}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert left == {}


def test_packages_do_not_import_each_other() -> None:
    """A package and one inside it may, as far as their modules have no cycle."""
    pairs = {
        (name.rpartition(".")[0], module_of(item).rpartition(".")[0])
        for name in modules()
        for item in package_imports(name)
        if part(name) != SUPPORT  # the configuration has types of the model
    }
    beside = {(a, b) for a, b in pairs if not within(a, b) and not within(b, a)}
    assert {(a, b) for a, b in beside if (b, a) in beside} == set()


def test_contributing_documents_the_same_layers() -> None:
    """CONTRIBUTING.md lists the same layers, from top to bottom."""
    line = re.search(r"`(cli -> [^`]*)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert line is not None
    documented = [set(row.split(" | ")) for row in line[1].split(" -> ")]
    assert documented == [layer for layer in reversed(LAYERS) if layer != {"demo", "api"}]


def test_headings_of_tables_are_in_one_style() -> None:
    """Column headings for ``print_table`` and ``add_column`` are lower case, except for names and units."""
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


SMALL = 80
"""Lines below which a module needs two importers."""
PROGRAMS = {
    "api", "checkpoint.cuda.helper", "metrics.spool", "pipeline.suspension_mail",
    "slurm.pyslurm_worker", "suspension.job.memory_pressure",
}  # fmt: skip
"""Modules that are run or imported from outside of the package."""


def importers() -> Mapping[str, set[str]]:
    """Module -> the modules of the package that import it."""
    result: dict[str, set[str]] = {name: set() for name in modules()}
    for name in modules():
        for item in package_imports(name):
            if module_of(item) in result:
                result[module_of(item)].add(name)
    return result


def test_small_modules_have_two_importers() -> None:
    lines = {name: (tree.body[-1].end_lineno or 0) if tree.body else 0 for name, tree in modules().items()}
    packages = {name.rpartition(".")[0] for name in modules()} | {"__init__"}
    small = {
        name
        for name, known in importers().items()
        if lines[name] < SMALL and len(known) < 2 and part(name) != "cli" and name not in packages | PROGRAMS
    }
    assert small == set()


def test_every_module_is_used_by_the_product() -> None:
    packages = {name.rpartition(".")[0] for name in modules()} | {"__init__"}
    unused = {name for name, known in importers().items() if not known and part(name) != "cli"}
    assert unused - packages - PROGRAMS == set()


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: place for name, place in places.items() if len(place) > 1} == {}


ELSEWHERE = {"Hash"}
"""Protocols whose second implementation is not in this repository: the hash objects of ``hashlib``."""


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def members(node: ast.ClassDef, classes: Mapping[str, list[ast.ClassDef]]) -> set[str]:
    """Return the methods and attributes of a class and of its bases, which are found by name."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    of_class = {id(item) for statement in node.body for item in ast.iter_child_nodes(statement)}
    for entry in ast.walk(node):
        if isinstance(entry, ast.Name) and isinstance(entry.ctx, ast.Store) and id(entry) in of_class:
            names.add(entry.id)
        elif isinstance(entry, ast.Attribute) and isinstance(entry.ctx, ast.Store) and is_self(entry.value):
            names.add(entry.attr)
    for base in node.bases:
        name = re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2]
        for entry in classes.get(name, []) if name != node.name else ():
            names |= members(entry, classes)
    return names


def test_protocols_have_two_implementations() -> None:
    """One of them may be a fake of the tests. The type of a function (``__call__`` alone) needs none."""
    trees = [*modules().values(), *(ast.parse(file.read_bytes(), str(file)) for file in (ROOT / "tests").rglob("*.py"))]
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        classes.setdefault(node.name, []).append(node)
    everything = [node for named in classes.values() for node in named]
    has = {id(node): members(node, classes) for node in everything}
    defined = (node for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef))
    rare = {
        node.name
        for node in defined
        if is_protocol(node)
        and has[id(node)] != {"__call__"}
        and sum(has[id(node)] <= has[id(item)] for item in everything if not is_protocol(item)) < 2
    }
    assert rare == ELSEWHERE
