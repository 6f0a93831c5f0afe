"""The dashboard for Grafana asks for what a job serves: names, labels and their values, checked against a real scrape."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
OF_PROMETHEUS = {"instance", "job"}  # labels that it adds to every sample
SELECTOR = re.compile(r"(horoclone_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
Samples = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "horoclone.json").read_text())
    return read


@pytest.fixture(scope="module")
def served(start_watched: Any) -> Samples:
    """name of a sample -> label -> its values, of a job with two ranks."""
    job = start_watched(2)
    job.wait_until_calm()
    found: Samples = defaultdict(lambda: defaultdict(set))
    for family in job.scrape().values():
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
    return found


def targets(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    found = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(found) >= 15
    return found


def labels_after(expression: str, served: Samples) -> set[str]:
    """Those that the result of an expression has: what `by` names, nothing after a plain sum, else the metric's own."""
    grouped = re.match(r"\w+ by \(([^)]*)\)", expression)
    if grouped:
        return set(re.findall(r"\w+", grouped[1]))
    if re.match(r"(?:sum|max|min|avg|count|quantile)\b", expression):
        return set()
    (name,) = {found[1] for found in SELECTOR.finditer(expression)}
    return set(served[name]) | OF_PROMETHEUS


def wrong_selectors(query: str, served: Samples) -> list[str]:
    wrong = []
    for name, matchers in SELECTOR.findall(query):
        if name not in served:
            wrong.append(f"{name} is not served")
            continue
        asked = MATCHER.findall(matchers)
        assert MATCHER.sub("", matchers).strip(" ,") == "", matchers
        for label, operator, value in asked:
            if label not in set(served[name]) | OF_PROMETHEUS:
                wrong.append(f"{name} has no label {label}")
            elif "$" not in value and operator == "=" and value not in served[name][label]:
                wrong.append(f"{label} of {name} is never {value}")
    return wrong


def test_queries_select_samples_labels_and_values_that_a_job_serves(
    dashboard: dict[str, Any], served: Samples
) -> None:
    queries = [target["expr"] for target in targets(dashboard)]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    wrong = {query: said for query in queries if (said := wrong_selectors(query, served))}
    assert not wrong, wrong
    for query in queries:
        assert SELECTOR.search(query), query
        for names in re.findall(r"\bby \(([^)]*)\)", query):
            for name, _ in SELECTOR.findall(query):
                assert set(re.findall(r"\w+", names)) <= set(served[name]) | OF_PROMETHEUS, query


def test_what_is_wrong_would_be_seen(served: Samples) -> None:
    assert wrong_selectors('sum(horoclone_rank_state{state="lost",rank=~"$rank"})', served) == []
    assert wrong_selectors('horoclone_rank_state{state="gone"}', served) == [
        "state of horoclone_rank_state is never gone"
    ]
    assert wrong_selectors('horoclone_rank_up{node="a"}', served) == ["horoclone_rank_up has no label node"]
    assert wrong_selectors("rate(horoclone_steps[1m])", served) == ["horoclone_steps is not served"]
    assert labels_after("avg by (reason) (rate(horoclone_waited_seconds_total[1m]))", served) == {"reason"}


def test_legends_name_labels_that_the_result_has(dashboard: dict[str, Any], served: Samples) -> None:
    seen = 0
    for target in targets(dashboard):
        shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
        has = labels_after(target["expr"], served)
        assert shown <= has, (target["expr"], shown - has)
        seen += len(shown)
    assert seen >= 7


def test_rates_are_taken_of_what_only_grows(dashboard: dict[str, Any]) -> None:
    for target in targets(dashboard):
        for name in re.findall(r"(?:rate|increase)\((horoclone_\w+)", target["expr"]):
            assert re.search(r"_(?:total|bucket|sum|count)$", name), target["expr"]
        if target["format"] == "heatmap":
            assert "_bucket" in target["expr"] and "by (le)" in target["expr"], target["expr"]


def test_variables_are_defined_and_ask_for_labels(dashboard: dict[str, Any], served: Samples) -> None:
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(?:\{)?(\w+)", json.dumps([dashboard["panels"], dashboard["templating"]])))
    assert used - {"__all", "__rate_interval"} == set(variables)
    for one in variables.values():
        if one["type"] != "query":
            continue
        found = re.fullmatch(r"label_values\((horoclone_\w+)(?:\{[^}]*\})?, (\w+)\)", one["query"]["query"])
        assert found and found[2] in set(served[found[1]]) | OF_PROMETHEUS, one["query"]
        if found[2] not in OF_PROMETHEUS:
            assert served[found[1]][found[2]] == {"0", "1"}


def test_states_that_have_a_colour_are_states(dashboard: dict[str, Any], served: Samples) -> None:
    (panel,) = (one for one in dashboard["panels"] if one["type"] == "state-timeline")
    named = {re.sub(r"\W", "", one["matcher"]["options"]) for one in panel["fieldConfig"]["overrides"]}
    assert named == served["horoclone_rank_state"]["state"] - {"running"}


def test_prometheus_is_told_the_port_that_the_page_gives_the_job() -> None:
    (port,) = re.findall(r"--metrics-port (\d+) -np", (FOLDER / "README.md").read_text())
    assert f'targets: ["127.0.0.1:{port}"]' in (FOLDER / "prometheus.yml").read_text()
