"""The page of the vLLM plugin and its dashboard against what there is: settings, metrics, log lines."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kvferry import _native

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/vllm.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/kvferry.json").read_text())
CONNECTORS = ("KvferryConnector", "KvferryStorageConnector")
# What Prometheus and vLLM add by themselves.
OUTER_LABELS = {"instance", "model_name", "engine"}
NAME = re.compile(r"\bkvferry_[a-z_]+\b")


def metrics() -> dict[str, tuple[str, str | None]]:
    """Kind and label of every series, by the name that Prometheus shows."""
    found: dict[str, tuple[str, str | None]] = {}
    for connector in CONNECTORS:
        for name, kind, _, label, *_ in _native.metrics(connector)[0]:
            if kind == "histogram":
                found |= {f"{name}_bucket": ("counter", "le"), f"{name}_sum": ("counter", None)}
                found |= {f"{name}_count": ("counter", None)}
            found[name] = (kind, label)
    return found


METRICS = metrics()
HAS_STORAGE = any(name.startswith("kvferry_storage_") for name in METRICS)


def rows(page: str) -> list[list[str]]:
    """All rows of the page's tables."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_page_has_every_option(connector: str) -> None:
    after = PAGE.split("\n## Options\n")[1].split(f"\n`{connector}`:\n")[1]
    table = after.split("\n\n")[0]
    wanted = [[f"`{key}`", default, text] for key, default, text in _native.describe_settings(connector)]
    assert rows(table) == [["key", "default", "meaning"], ["---", "---", "---"], *wanted]


def test_metrics_and_options_that_the_page_names_exist() -> None:
    names = set(NAME.findall(PAGE))
    assert len(names) > 15
    assert not names - METRICS.keys()
    options = {key for connector in CONNECTORS for key, _, _ in _native.describe_settings(connector)}
    table = PAGE.split("\n## Coming from NixlConnector\n")[1].split("\n\n")[1]
    ours = {key for row in rows(table)[2:] for key in re.findall(r"`([a-z_]+)`", row[2])}
    assert {"lease_duration", "side_channel_port", "recompute_threshold_tokens"} <= ours <= options


def test_the_page_of_metrics_has_them_all() -> None:
    """`docs/vllm.md` leaves the list to it."""
    listed = rows((ROOT / "docs/metrics.md").read_text())
    there = {(row[0], row[1], row[2], row[3].strip("`").partition("=")[0], row[4]) for row in listed if len(row) == 5}
    for connector in CONNECTORS:
        for name, kind, unit, label, text, _ in _native.metrics(connector)[0]:
            assert (f"`{name}`", kind, unit, label or "", text) in there


def test_log_lines_and_errors_of_the_page_are_in_the_code() -> None:
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/kvferry/**/*.py")]
    code = "\n".join(path.read_text() for path in sources)
    # Texts over several lines, of Rust and of Python.
    code = re.sub(r'\\\n\s*|"\n\s*f?"', "", code)
    section = PAGE.split("\n## Troubleshooting\n")[1].split("\n## ")[0]
    texts = [text for row in rows(section) for text in re.findall(r"`([^`]+)`", row[0] if len(row) == 2 else row[1])]
    assert len(texts) > 30
    for text in texts:
        assert text in code, text


def expressions() -> list[tuple[str, str]]:
    """(panel or alert, expression)."""
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    section = PAGE.split("\n**Alerts** worth having:\n")[1].split("\n\n")[0]
    alerts = [(row[0], row[1].strip("`").replace("\\|", "|")) for row in rows(section)[2:]]
    assert len(alerts) > 3
    return found + alerts


@pytest.mark.parametrize(("panel", "expression"), expressions(), ids=lambda text: text[:40])
def test_every_expression_is_about_metrics_that_exist(panel: str, expression: str) -> None:
    names = NAME.findall(expression)
    assert names, expression
    if not HAS_STORAGE and all(name.startswith("kvferry_storage_") for name in names):
        pytest.skip("this build of the plugin publishes no figures of shared storage")
    for name in names:
        kind, label = METRICS[name]
        # A counter is looked at by its growth, a gauge as it is.
        assert (f"rate({name}" in expression) == (kind == "counter"), f"{name} is a {kind}"
        for matched in re.findall(rf"{name}{{([^}}]*)}}", expression):
            assert set(re.findall(r"(\w+)[!=]~?", matched)) <= OUTER_LABELS | {label}, f"labels of {name}"
    labels = {METRICS[name][1] for name in names}
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", by)) <= OUTER_LABELS | labels, f"labels of {names}"
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_grafana_can_import_the_dashboard() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels if panel["type"] == "row"]
    wanted = ["Loads and failures", "Bytes", "Leases", "Confirmation and freeing", "Storage", "Peers"]
    assert titles == wanted
    source = {"type": "prometheus", "uid": "${datasource}"}
    places = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & places, f"{panel['title']} overlaps another panel"
        places |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == source and all(it["datasource"] == source for it in panel["targets"])
        assert len({it["refId"] for it in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            # What the legend names is what is summed by.
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {label for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in re.split(r",\s*", by)}
            assert shown == kept - {"le"}
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables.keys() | {"__rate_interval"}


def test_the_page_of_the_suite_has_every_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="the suite needs aiohttp")
    monkeypatch.syspath_prepend(str(ROOT / "tests/vllm"))
    from e2e import scenarios
    from e2e.suite import SCENARIOS

    scenarios.load()
    page = (ROOT / "docs/vllm-e2e.md").read_text()
    section = page.split("\n## Scenarios\n")[1].split("\n## ")[0]
    listed = {
        (setup, pattern)
        for row in rows(section)[2:]
        for pattern in re.findall(r"`([^`]+)`", row[0])
        for setup in row[1].split(", ")
    }
    there = {(it.setup.name, it.name) for it in SCENARIOS}

    def matches(name: tuple[str, str], row: tuple[str, str]) -> bool:
        return name[0] == row[0] and fnmatch.fnmatch(name[1], row[1])

    assert [name for name in there if not any(matches(name, row) for row in listed)] == []
    assert [row for row in listed if not any(matches(name, row) for name in there)] == []
    setups = {row[0].strip("`") for row in rows(page.split("\n## Scenarios\n")[0])}
    assert {it.setup.name for it in SCENARIOS} <= setups


@pytest.mark.parametrize("page", ["vllm.md", "vllm-e2e.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs" / page).read_text())
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / "docs" / link).exists(), link
