"""Steps whose tokens are drawn after they are launched."""

from penstock.workers.engines.native.cuda.copies import LateStep, Pending


def test_tokens_are_drawn_once_at_the_latest_for_the_result() -> None:
    drawn = []

    def draw() -> Pending:
        drawn.append(1)
        return Pending(lambda: [(7, None)])

    late = LateStep(draw)
    assert not drawn
    late.draw()
    assert [late.result(), late.result()] == [[(7, None)], [(7, None)]]
    assert drawn == [1]


def test_the_result_alone_draws_them_too() -> None:
    assert LateStep(lambda: Pending(lambda: [(3, None)])).result() == [(3, None)]
