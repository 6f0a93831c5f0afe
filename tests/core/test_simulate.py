"""`horoclone simulate`: what a tree of request lists costs at any size, counted, and the replay of a step."""

from __future__ import annotations

import json

import pytest

from horoclone import simulate
from horoclone.launch import tool

FANOUT = 8


@pytest.mark.parametrize("per_node", [1, 8])
def test_a_node_sends_and_receives_the_same_at_any_size(per_node):
    for ranks in (16, 64, 1024):
        row = simulate.agreement(ranks, ranks_per_node=per_node, fanout=FANOUT, steps=1, processing=False)
        assert 0 < row["node_messages"] <= 2 * (FANOUT + 1), row
        assert 0 < row["node_bytes"] <= 512, row
        assert row["root_messages"] <= 2 * (FANOUT + per_node), row


def test_one_node_sends_nothing_over_the_network_and_a_star_everything_to_its_root():
    assert simulate.agreement(8, ranks_per_node=8, steps=1, processing=False)["node_messages"] == 0
    star = simulate.agreement(64, fanout=0, steps=1, processing=False)
    assert star["root_messages"] == 2 * 63


def test_only_messages_take_time_where_processing_is_off():
    costs = {
        "local": {"send": 0, "latency": 0, "receive": 0},
        "network": {"send": 0, "latency": 10, "receive": 0},
    }
    row = simulate.agreement(64, costs=costs, steps=2, processing=False)
    assert row["latency_us"] == pytest.approx(2 * 10 * row["depth"])


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        simulate.agreement(0)


def test_a_step_without_computing_takes_what_its_bytes_take():
    given = {"gradient_mb": 25.0, "compute_ms": 0.0, "latency_us": 0.0, "agreement_us": 0.0}
    one_node = simulate.step_ms(8, ranks_per_node=8, link_gbit=8, local_gb_s=25, **given)
    assert one_node == pytest.approx(2 * 7 / 8)  # 25 MB at 25 GB/s
    two_nodes = simulate.step_ms(2, ranks_per_node=1, link_gbit=8, local_gb_s=25, **given)
    assert two_nodes == pytest.approx(25.0)  # 2 (n-1)/n = 1 time 25 MB at 1 GB/s


def test_layers_come_from_a_file_of_plan_and_wrong_ones_are_refused(capsys, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"layers": [[1, 2], [3, 2]], "ways": []}))
    assert simulate.layers_of(str(file)) == ((1.0, 2.0), (3.0, 2.0))
    assert (
        tool.main(["simulate", "--ranks", "8", "--steps", "1", "--layers", str(file), "--cross-barrier"]) == 0
    )
    assert capsys.readouterr().out.splitlines()[-1].startswith("8 ranks agree in ")
    for wrong in ('{"ways": []}', "[[1, -2]]", "[[0, 1]]", "[]", "no"):
        file.write_text(wrong)
        assert tool.main(["simulate", "--ranks", "8", "--layers", str(file)]) == 2, wrong
    result = tmp_path / "result.json"
    assert tool.main(["simulate", "--ranks", "8", "--layers", "resnet99", "--json", str(result)]) == 2
    assert not result.exists()
    assert "resnet99: neither resnet50" in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_json(capsys, tmp_path):
    file = tmp_path / "simulated.json"
    assert tool.main(["simulate", "--ranks", "8,64", "--steps", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "tree" in printed and "star" in printed
    rows = json.loads(file.read_text())["rows"]
    assert [(row["ranks"], row["shape"]) for row in rows] == [
        (n, s) for n in (8, 64) for s in ("tree", "star")
    ]
    assert tool.main(["simulate", "--ranks", "0"]) == 2
