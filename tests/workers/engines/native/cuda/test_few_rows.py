from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engines.native.cuda.few_rows import FEW, MORE, PROGRAMS, shape_for

SHARED_MEMORY = 227 * 1024  # of a multiprocessor


@given(rows=st.integers(1, 300), columns=st.integers(1, 2000).map(lambda n: 16 * n), inner=st.integers(1, 1000))
def test_splits_cover_the_inner_dimension_in_whole_steps_that_fit_into_shared_memory(
    rows: int, columns: int, inner: int
) -> None:
    shape = shape_for(rows, columns, inner * 16)
    if shape is None:
        return
    assert inner * 16 % (shape.splits * shape.depth) == 0
    assert rows <= shape.rows <= MORE
    assert shape.stages * shape.depth * (shape.rows + shape.columns) <= SHARED_MEMORY
    assert shape.splits == 1 or -(-columns // shape.columns) * shape.splits <= PROGRAMS


def test_more_rows_are_left_to_torch_sooner_if_there_are_many_columns() -> None:
    wide, narrow = (28672, 4096), (4096, 14336)
    assert shape_for(FEW, *wide) is not None
    assert shape_for(FEW + 1, *wide) is None
    assert shape_for(MORE, *narrow) is not None
    assert shape_for(MORE + 1, *narrow) is None


def test_an_inner_dimension_that_no_step_divides_is_left_to_torch() -> None:
    assert shape_for(8, 4096, 4096 + 16) is None
