"""What a step of declared buckets enters once their plan is persistent: how many functions, and the journey in the docs."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "csrc" / "tests" / "engine" / "functions_of_a_step.py"
PAGE = ROOT / "docs" / "architecture.md"

# Functions of the optimised library that the middle one of 51 steps may enter. Steps differ by some, as hc-engine may
# take part of the work and a rank may have to sleep.
LIMIT = 40


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its breakpoints are those of x86-64")
@pytest.mark.long(60)
@pytest.mark.timeout(300)
def test_a_step_enters_few_functions_and_the_journey_names_their_files(script: ModuleType) -> None:
    # A busy machine lets hc-engine take part of nearly every step: what one run of three shows, the step can do.
    for _ in range(3):
        found = script.trace()
        if len(found.functions) <= LIMIT:
            break
    count = len(found.functions)
    assert count <= LIMIT, f"{count} functions; csrc/tests/engine/functions_of_a_step.py prints them"
    assert count > 20, "the step is no longer seen whole"
    absent, _ = script.compare_journey(found.files, PAGE.read_text())
    assert not absent, (
        "docs/architecture.md, one gradient's journey, names places that the step does not enter"
    )


PAGE_OF_TWO_ROWS = """
## One gradient's journey

| # | where | thread | what |
|---|---|---|---|
| 1 | `torch/reducer.py`, `synchronize()` | user | Python |
| 2 | `csrc/python`, `api.cc` | user | submits |
| 3 | `engine/intake`, `engine/gone` | driver | runs |

## Threads
| 4 | `engine/other` | | |
"""


def test_the_journey_is_compared_by_file_and_by_folder(script: ModuleType) -> None:
    files = ["api.cc", "engine/intake/queue.h", "net/mesh.cc"]
    assert script.compare_journey(files, PAGE_OF_TWO_ROWS) == (["engine/gone"], ["net/mesh.cc"])
    assert not script.is_at("engine/intake_other/queue.h", "engine/intake")
    assert script.is_at("engine/intake/queue.h", "engine/intake/queue")


def test_names_are_shown_without_their_arguments(script: ModuleType) -> None:
    for name, short in {
        "hc_wait": "hc_wait",
        "hc::Engine::step(bool (*)(int), int) const": "hc::Engine::step",
        "hc_wait::{lambda()#1}::operator()() const": "hc_wait::{lambda()#1}::operator()",
        "hc::Loop<f(int)>::run(hc::Call const&)": "hc::Loop<f(int)>::run",
    }.items():
        assert script.without_arguments(name) == short


def test_functions_of_the_standard_library_do_not_count(script: ModuleType) -> None:
    for name in (
        "hc_wait",
        "hc::Loop::step(bool)",
        "void hc::fold<int>(std::span<int>)",
        "bool hc::a<std::b>::c()",
    ):
        assert script.is_ours(name), name
    for name in ("std::vector<hc::Operation*>::push_back(hc::Operation*)", "void std::a<hc::b>::c<d>()"):
        assert not script.is_ours(name), name
    assert script.is_ours(
        "std::_Function_handler<bool (), hc::f()::{lambda()#1}>::_M_invoke(std::_Any_data const&)"
    )


def test_a_function_is_found_in_the_file_that_defines_it(script: ModuleType) -> None:
    sources = script.Sources()
    assert sources.file_of("hc::Loop::advance") == "engine/progress/loop.cc"
    assert sources.file_of("hc::InPlaceAllreduce::step") == "collective/shared/shared.cc"
    assert sources.file_of("hc_release") == "api.cc"
    assert sources.file_of("hc::nobody::knows") == ""
