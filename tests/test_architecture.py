"""The dependency rules of the code, so that they hold without anyone remembering them."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kdtree import generation
from kdtree.cache import PAGE
from kdtree.state import MAX_STOPS
from kdtree.tree import MAX_DEPTH, MAX_NODES
from kdtree.weights.formats import GROUP

ROOT = Path(__file__).parent.parent
KERNELS = [*sorted((ROOT / "csrc/cuda").rglob("*.cu")), *sorted((ROOT / "csrc/graph").glob("*.cu"))]
COMMON = (ROOT / "csrc/cuda/common.cuh").read_text()
FOLDERS = ("csrc", "kdtree", "python", "tests", "benchmarks")
SOURCES = [
    p
    for f in FOLDERS
    for p in sorted((ROOT / f).rglob("*.*"))
    if p.suffix in (".py", ".cu", ".cuh", ".cpp", ".h")
]

# A module may import those left of it, never those right of it.
LAYERS = """errors checks files card config sampling outputs ops text tree cache weights layers
models plan verify state request phases record drafters native choice generation graphs launches
costs costs_cache calibration policy budget measure options engine cli __main__""".split()


def imports(path: Path) -> set[str]:
    """The kdtree submodules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    modules = {name.split(".")[1] for name in found if name.startswith("kdtree.")}
    return {name for name in modules if name in LAYERS}


@pytest.mark.parametrize("path", sorted((ROOT / "kdtree").rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_left(path):
    layer = path.relative_to(ROOT / "kdtree").parts[0].removesuffix(".py")
    if layer == "__init__":
        return
    assert imports(path) <= set(LAYERS[: LAYERS.index(layer) + 1])


@pytest.mark.parametrize("path", sorted((ROOT / "kdtree").rglob("*.py")), ids=lambda p: p.stem)
def test_only_ops_and_native_touch_the_libraries(path):
    text = path.read_text()
    if path.parent.name != "ops":
        assert not re.search(r"torch\.ops|_C\b", text)
    if path.stem != "native":
        assert not re.search(r"import .*\b_graph\b", text)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 300


def test_documents_name_files_that_exist():
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        names = re.findall(r"`([\w./-]+\.(?:py|md|cu|cuh|cpp|h|json))`", document.read_text())
        links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
        missing = [n for n in names + links if "/" in n and not (ROOT / n).exists()]
        assert not missing, f"{document.name} names {missing}"


def test_no_launch_outside_launch():
    """Nothing but launch() launches, so nothing can forget to check."""
    for path in sorted((ROOT / "csrc").rglob("*.cu*")):
        assert ("<<<" in path.read_text()) == (path.name == "common.cuh"), path.name


@pytest.mark.parametrize("path", sorted((ROOT / "csrc").rglob("*.*")), ids=lambda p: p.name)
def test_only_faces_include_torch_or_python(path):
    text = path.read_text()
    if not path.name.startswith("ops"):
        assert not re.search(r"#include <(torch|ATen|c10)", text)
    if path.name != "module.cpp":
        assert not re.search(r"#include <(pybind11|Python)", text)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.stem)
def test_kernel_fits_every_card(path, tmp_path):
    """It spills nothing, and its shared memory is within what a block of its cards may have.

    Static arrays are in ptxas' report, dynamic memory in the names of the smem_up_to instances.
    Needs nvcc but neither a GPU nor a CUDA build of torch.
    """

    def run(command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command.split(), capture_output=True, text=True, check=True)

    binary = tmp_path / "kernel.o"
    flags = " ".join(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("90a", "120f"))
    report = run(
        f"nvcc --threads 2 -std=c++20 -O3 --fmad=false {flags} -Xptxas=-v -c {path} -o {binary}"
    ).stderr
    assert set(re.findall(r"(\d+) bytes spill stores", report)) <= {"0"}
    static = max(map(int, re.findall(r"(\d+) bytes smem", report)), default=0)
    (most,) = re.findall(r"kStaticSmem = (\d+) \* 1024", COMMON)
    assert static <= int(most) * 1024
    dynamic = re.findall(r"\bsmem_up_to<(\d+), (\d+)>", run(f"nm --demangle {binary}").stdout)
    assert dynamic or "smem_up_to<" not in path.read_text()  # the names are found
    for bytes_, limit in dynamic:
        assert static + int(bytes_) <= int(limit)


def test_shared_memory_is_what_the_cards_grant():
    """101,376 bytes: the least that NVIDIA's documentation gives for any card we build for."""
    found = dict(re.findall(r"constexpr int (kSmem\w+) = (\d+);", COMMON))
    assert found == {"kSmemEverywhere": "101376", "kSmemSm90": "232448"}


def test_python_knows_the_header_s_constants():
    """What both languages state is stated alike."""
    header = "".join((ROOT / "csrc" / name).read_text() for name in ("kdtree.h", "round.h"))
    found = dict(re.findall(r"constexpr int (k\w+) = (\d+);", header))
    pairs = {"kPage": PAGE, "kGroup": GROUP, "kMaxNodes": MAX_NODES, "kMaxDepth": MAX_DEPTH}
    pairs["kMaxStops"] = MAX_STOPS
    assert {name: int(found[name]) for name in pairs} == pairs
    words = re.findall(r"^  k(\w+),", (ROOT / "csrc/graph/graph.h").read_text(), re.M)
    assert [getattr(generation, name.upper()) for name in words] == [0, 1, 2, 3]


def test_early_kernels_wait():
    """Whatever is launched early waits, in its file or in a header beside it that it includes."""
    for path in KERNELS:
        text = path.read_text()
        unnamed = r"(?:Grid \w+|launch\([^;{]*)\{(?!\s*\.)[^;]*\btrue\s*\}"
        assert not re.search(unnamed, text), f"{path.name}: early without its name"
        if not re.search(r"\.early = true", text):
            continue
        headers = [path.parent / name for name in re.findall(r'#include "([\w.]+)"', text)]
        whole = text + "".join(h.read_text() for h in headers if h.name != "early.cuh")
        assert re.search(r"begin_early\(\);|wait_for_previous\(\);", whole), path.name
