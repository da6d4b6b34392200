import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from penstock.operate.dashboard.pages import HEIGHT, WIDTH, sparkline


@given(st.lists(st.none() | st.floats(0, 1e12), max_size=50))
def test_every_chart_is_well_formed_and_stays_in_its_frame(values: list[float | None]) -> None:
    svg = ET.fromstring(sparkline(values, label="rates"))
    for shape in svg:
        for point in shape.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def test_a_gap_in_the_values_is_a_gap_in_the_line() -> None:
    svg = ET.fromstring(sparkline([1.0, 2.0, None, 3.0, 4.0], label="rates"))
    assert sum(shape.tag == "polyline" for shape in svg) == 2
    assert svg.attrib["aria-label"] == "rates"
