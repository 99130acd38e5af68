"""The summary of a request is plain data and reads well before, in and after a request."""

import json

from specdec.control import Goodput, GoodputSummary
from tests.control.simulation import CPU, Simulation, World, curve, steady


def test_before_anything_happened():
    summary = Goodput().summary()
    assert summary.speedup == 1.0
    assert str(summary) == "speed-up        none expected: plain rounds are fastest"
    assert json.loads(json.dumps(summary.to_dict()))["budgets"] == {}


def test_after_a_request():
    controller = Goodput()
    world = World(**steady(0.8, rows=2, tokens=60, seed=0), draft=lambda _: 0.05, verify=curve(CPU))
    simulation = Simulation(controller, world)
    simulation.run(60)
    summary = controller.summary()
    assert isinstance(summary, GoodputSummary)
    assert sum(summary.widths.values()) == len(simulation.widths)
    assert summary.widths == {width: simulation.widths.count(width) for width in sorted(set(simulation.widths))}
    assert summary.budgets == {size: simulation.budgets.count(size) for size in sorted(set(simulation.budgets))}
    assert summary.speedup > 1.2
    loaded = json.loads(json.dumps(summary.to_dict()))
    assert loaded["widths"].keys() == {str(width) for width in summary.widths}
    assert all(0 <= cell["accepted"] <= 1 for cell in loaded["acceptance"].values())
    assert [line[15] for line in str(summary).splitlines()] == [" "] * 6
