"""The calculation of the costs of a fleet of cells."""

import argparse

import pytest

from tests.perf.fleet import Asking, Parts, fleet

ARGS = argparse.Namespace(rate=10.0, gateway_us=500.0, router_us=300.0, broker_us=150.0)
SMALL, PARTS, ASKING = Parts(20.0, 1.0, 1.0, 1.0), Parts(30.0, 100.0, 10.0, 50.0), Asking(40.0, 15.0, 10.0)


def test_a_request_costs_the_same_in_more_cells_and_a_cell_has_its_part_of_the_requests() -> None:
    few, many = (fleet(100 * cells, cells, ARGS, SMALL, PARTS, ASKING) for cells in (16, 64))
    assert few.gateway == many.gateway == 500 + 16 * 40 + 50
    assert few.short == 500 + 17 * 50
    assert few.router == many.router == 300 + 10 + 16 * 45, "16 cells decide, and one places it"
    assert few.broker == 150 + 16 * 10
    assert few.router_cores == many.router_cores == pytest.approx(0.04 + 1000 * few.router / 1e6)
    assert many.most == pytest.approx(4 * few.most)
    assert many.loads == pytest.approx(4 * few.loads)


def test_of_few_cells_all_are_asked() -> None:
    assert fleet(200, 2, ARGS, SMALL, PARTS, ASKING).gateway == 500 + 2 * 40 + 50
