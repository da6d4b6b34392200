"""What FastStream costs a job is measured on jobs that were all taken."""

from tests.perf import jobs


async def test_every_way_takes_all_jobs_of_a_round() -> None:
    took = await jobs.compare(20, 1)
    assert took.keys() == jobs.WAYS.keys()
    assert all(seconds > 0 for [seconds] in took.values())
