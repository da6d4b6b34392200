from penstock.cli.figures import counted


def test_one_is_singular_and_all_others_are_not() -> None:
    assert [counted(n, "request") for n in (0, 1, 2048)] == ["0 requests", "1 request", "2,048 requests"]
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
