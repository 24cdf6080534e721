"""Steps of a whole model by a slice of it, by hand."""

import json

import pytest
from says import says
from slice_case import TINY

from kdtree import ConfigError, cli
from kdtree.config import from_hf
from kdtree.plan import Machine, make_plan
from kdtree.plan.slice import identity, project, read_slice
from kdtree.plan.tensors import expected

SHAPE = TINY | {"moe_intermediate_size": 64}
CONFIG = from_hf(SHAPE)  # 1 dense layer and 5 with experts
ONE = Machine(gpus=1, memory=1e9, reserve=0, bandwidth=1e9, peak=1e11)


def plan(machine=ONE, context=100, nodes=(1, 4, 8), int4=True):
    tensors = expected(CONFIG, "bfloat16")
    return make_plan(CONFIG, tensors, machine, context=context, nodes=nodes, int4=int4)


def sliced(**changed):
    """A dense layer 100 us at a floor of 50, a MoE layer 300 at 200, the head 90 at 80, rest 7."""
    parts = [("rest", 7, None), ("dense layer", 100, 50), ("MoE layer", 300, 200), ("head", 90, 80)]
    parts = [{"name": n, "us": us, "floor_us": floor} for n, us, floor in parts]
    found = {
        "shape": "tiny",
        "identity": identity(CONFIG),
        "context": 100,
        "weights": "random-int4",
        "rows": [{"nodes": nodes, "parts": parts} for nodes in (1, 8)],
    }
    return json.loads(json.dumps(found | changed))


@pytest.mark.parametrize("machine", [ONE, Machine(2, 1e9, 0, 1e9, 1e11)])
def test_steps_by_a_slice(machine):
    made = plan(machine)
    found = project(CONFIG, made, sliced())
    assert [step.nodes for step in found] == [1, 8]
    for got, step in zip(found, (made.steps[0], made.steps[2]), strict=True):
        w = step.weights
        each = (w["attention"] + w["norms"] + step.context) / 6
        dense = each + w["dense MLP"]
        experts = 5 * each + w["shared experts"] + w["router"] + w["routed experts"]
        assert dense + experts + w["head"] == pytest.approx(step.read)
        more = 0.007 + step.all_reduce
        ratio = 100 / 50 * dense + 300 / 200 * experts + 90 / 80 * w["head"] + more
        assert got.ratio == pytest.approx(ratio)
        excess = step.read + (1 * 50 + 5 * 100 + 10) / 1e3 + more
        assert got.excess == pytest.approx(excess)


def test_a_slice_of_something_else():
    other = identity(CONFIG) | {"hidden": 65}
    for changed, name in (
        ({"identity": other}, "dimensions"),
        ({"context": 101}, "tokens of context"),
        ({"weights": "random-bf16"}, "routed experts"),
    ):
        with says(ValueError, f"{name} of the slice, of tiny: not those"):
            project(CONFIG, plan(), sliced(**changed))
    with says(ValueError, "routed experts"):
        project(CONFIG, plan(int4=False), sliced())
    with says(ValueError, "tokens of context of the slice", "101 instead of 100"):
        project(CONFIG, plan(), sliced(context=101))
    with says(ValueError, "the slice has 1, 8 nodes, the plan 4"):
        project(CONFIG, plan(nodes=(4,)), sliced())
    rows = sliced()["rows"]
    del rows[0]["parts"][2]
    with says(ValueError, "the slice has no MoE layer, the model has 5"):
        project(CONFIG, plan(), sliced(rows=rows))


def test_the_command(tmp_path, capsys):
    config, file = tmp_path / "tiny.json", tmp_path / "slice.json"
    config.write_text(json.dumps(SHAPE))
    file.write_text(json.dumps(sliced()))
    flags = ["plan", str(config), "--quantize", "int4", "--slice", str(file)]
    assert cli.main(flags) == 0
    out = capsys.readouterr().out
    assert "A step in ms, 100 tokens" in out  # the slice's, where none is named
    assert "The same by a slice" in out and "by a slice: every layer takes" in out
    assert cli.main([*flags, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["by_slice_ms"]
    assert [step["nodes"] for step in steps] == [1, 8]
    assert cli.main([*flags, "--context", "99"]) == 2
    assert "tokens of context of the slice" in capsys.readouterr().err
    file.write_text("{}")
    with says(ConfigError, "no results of kdtree bench --shape"):
        read_slice(file)
