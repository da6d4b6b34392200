"""The file of a profile: it comes back as it was written, and what is wrong with another is said."""

from pathlib import Path

import msgspec
import pytest

from penstock.measure.profile.data import BadProfile, Decode, DecodePoint, Prefill, Profile, Setup, load, save
from penstock.measure.profile.profile_endpoint_command import begun

SETUP = Setup(
    model="m", api="chat", gpus=1, attention_dp=1, osl=500, max_context=8192, max_kv_tokens=100_000, max_batch=64
)


def point(isl: int, concurrency: int) -> DecodePoint:
    return SETUP.decode_point(isl, concurrency, 5.0 + concurrency)


def test_points_come_back_in_order_whatever_was_measured_first(tmp_path: Path) -> None:
    prefill, decode = Prefill(), Decode(max_kv_tokens=100_000)
    for isl in (900, 100, 500):
        prefill = prefill.added(isl, isl / 10, 10_000.0)
        for concurrency in (4, 1):
            decode = decode.added(point(isl, concurrency))
    save(tmp_path, Profile(setup=SETUP, url="http://h", prefill=prefill, decode=decode))
    found = load(tmp_path)
    assert found.prefill == Prefill((100, 500, 900), (10.0, 50.0, 90.0), (10_000.0,) * 3)
    assert found.decode == decode
    assert [*zip(decode.decode_isl, decode.decode_concurrency, strict=True)] == [
        (isl, concurrency) for isl in (100, 500, 900) for concurrency in (1, 4)
    ]
    assert decode.z_itl == (6.0, 9.0) * 3
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"schema": 1', '"schema": 2'), "Invalid"),
        (('"prefill_isl": [', '"prefill_isl": [7,'), "arrays of prefill differ in length"),
        (('"gpus": 1', '"gpus": "one"'), "gpus"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    save(tmp_path, Profile(setup=SETUP, url="http://h", prefill=Prefill().added(100, 5.0, 20_000.0)))
    path = tmp_path / "profile.json"
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(BadProfile, match=said):
        load(tmp_path)
    with pytest.raises(BadProfile, match="penstock profile endpoint"):
        load(tmp_path / "nowhere")


def test_a_folder_is_continued_only_with_the_same_setup(tmp_path: Path) -> None:
    stored = Profile(setup=SETUP, url="http://h", prefill=Prefill().added(100, 5.0, 20_000.0))
    save(tmp_path, stored)
    assert begun(tmp_path, SETUP, "http://h", (), overwrite=False) == stored
    other = msgspec.structs.replace(SETUP, gpus=2)
    with pytest.raises(BadProfile, match=r"another setup \(gpus\)"):
        begun(tmp_path, other, "http://h", (), overwrite=False)
    assert begun(tmp_path, other, "http://h", (), overwrite=True).prefill == Prefill()
