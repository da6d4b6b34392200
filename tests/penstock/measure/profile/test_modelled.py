"""The mock's profile from its timing model, against the model itself."""

import pytest

from penstock.measure.profile.data import DecodeSurface, mock_profile, ttft_at
from penstock.workers.engines.mock.executor import decode_seconds, prefill_seconds


def test_it_is_what_the_mock_engine_takes() -> None:
    profile = mock_profile()
    pool = profile.setup.max_kv_tokens
    assert pool == 16_384 * 32
    assert ttft_at(profile.prefill, 4000) == pytest.approx(prefill_seconds(1, 0, 4000) * 1e3, rel=1e-3)
    # Longer than a step takes: two chunks.
    chunks = prefill_seconds(1, 0, 8192) + prefill_seconds(1, 8192, 16_000 - 8192)
    assert ttft_at(profile.prefill, 16_000) == pytest.approx(chunks * 1e3, rel=1e-3)
    found = DecodeSurface(profile.decode).itl(4250, 50)
    assert found is not None
    assert found == pytest.approx(decode_seconds(4250 * 50, pool) * 1e3, rel=0.02)


def test_slowness_and_gpus_are_in_the_figures() -> None:
    once, twice = mock_profile(), mock_profile(slowness=2.0, gpus=2)
    assert twice.prefill.prefill_ttft[3] == pytest.approx(2 * once.prefill.prefill_ttft[3])
    assert twice.decode.z_thpt_per_gpu[5] == pytest.approx(once.decode.z_thpt_per_gpu[5] / 4, rel=1e-3)
