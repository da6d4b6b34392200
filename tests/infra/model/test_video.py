"""Video files: what they are, their sampled frames, and a refusal of whatever is broken, in bounded time and memory."""

import io
import signal
import struct
from pathlib import Path
from typing import Any

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.infra.model import video
from penstock.infra.model.video import BadVideo, VideoFacts
from tests.properties import examples
from tests.workers.engines.native.qwen_vl import film

FILM = film(30, 10, 64, 48)


def frames_of(raw: bytes) -> list[Image.Image]:
    with av.open(io.BytesIO(raw)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


@pytest.mark.parametrize(
    ("codec", "form", "kind"),
    [("libx264", "mp4", "video/mp4"), ("libvpx", "webm", "video/webm"), ("mpeg4", "matroska", "video/webm")],
)
def test_frames_are_those_of_the_file_resized_by_pillow(codec: str, form: str, kind: str) -> None:
    raw = film(20, 5, 96, 64, codec, form)
    facts = video.probe(raw, 100)
    assert (video.kind_of(raw), facts) == (kind, VideoFacts(20, 5.0, 64, 96))
    wanted = [0, 7, 19]
    pixels = video.decode(raw, facts, wanted, 24, 40)
    whole = frames_of(raw)
    assert pixels == b"".join(whole[n].resize((40, 24), Image.Resampling.BICUBIC).tobytes() for n in wanted)


def test_a_film_taken_upright_is_shown_upright() -> None:
    box = FILM.index(b"tkhd") + 4  # its matrix begins 40 bytes behind the version
    at = box + 40
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)  # by 90 degrees clockwise
    raw = FILM[:at] + turned + FILM[at + 36 :]
    facts = video.probe(raw, 100)
    assert (facts.height, facts.width) == (64, 48)
    pixels = video.decode(raw, facts, [3], 64, 48)
    assert pixels == frames_of(FILM)[3].rotate(-90, expand=True).tobytes()


def test_a_longer_film_than_allowed_is_refused_with_the_limit() -> None:
    assert video.probe(FILM, 30).frames == 30
    with pytest.raises(BadVideo, match=r"more than 29 frames \(--max-video-frames\)"):
        video.probe(FILM, 29)


def test_more_pixels_than_a_worker_decodes_in_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_DECODED", 30 * 64 * 48 - 1)
    with pytest.raises(BadVideo, match="has 30 frames of 64 x 48 pixels; the limit is 92,159 pixels together"):
        video._read(av, FILM, {"format": "mov", "max_frames": 100})


def test_of_a_film_that_breaks_off_the_last_frame_stays() -> None:
    raw = film(20, 5, 96, 64, "libvpx", "webm")
    short = raw[: len(raw) * 3 // 4]
    facts = video.probe(short, 100)
    assert 5 < facts.frames < 20
    claimed = facts._replace(frames=facts.frames + 3)
    pixels = video.decode(short, claimed, [facts.frames - 1, facts.frames + 2], 8, 8)
    assert pixels[:192] == pixels[192:]
    with pytest.raises(BadVideo, match=f"ends after {facts.frames} of 1000 frames"):
        video.decode(short, facts._replace(frames=1000), [0, 999], 8, 8)


def test_other_files_are_refused_by_what_is_supported(tmp_path: Path) -> None:
    playlist = f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/secret.mp4\n".encode()
    for raw in (b"", b"RIFF....AVI LIST", playlist, b"ffconcat version 1.0\nfile secret.mp4\n", b"\x89PNG\r\n\x1a\n"):
        assert video.kind_of(raw) == ""
        with pytest.raises(BadVideo, match=r"is not an MP4, MOV, WebM or Matroska video with H\.264"):
            video.probe(raw, 100)


def sound(codec: str = "aac", form: str = "mp4") -> bytes:
    data = io.BytesIO()
    with av.open(data, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=44_100)
        frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
        frame.planes[0].update(bytes(4096))
        frame.sample_rate = 44_100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return data.getvalue()


def test_sound_alone_and_other_codecs_are_refused() -> None:
    with pytest.raises(BadVideo, match="has no video stream"):
        video.probe(sound(), 100)
    with pytest.raises(BadVideo, match=r"has codec (\w+); expected an MP4"):
        video.probe(film(4, 5, 32, 32, "ffv1", "matroska"), 100)


def test_a_file_that_takes_too_long_ends_its_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "PROBE_S", 0.01)
    with pytest.raises(BadVideo, match=r"takes more than 0\.03 s to decode"):
        video.probe(FILM, 100)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(-signal.SIGXCPU, "takes more than 5 s of CPU time"), (-signal.SIGSEGV, "breaks the decoder"), (1, "memory")],
)
def test_a_file_that_ends_the_decoder_is_refused(monkeypatch: pytest.MonkeyPatch, status: int, reason: str) -> None:
    monkeypatch.setattr(video.Decoder, "run", lambda *_: (status, b""))
    with pytest.raises(BadVideo, match=reason):
        video.probe(FILM, 100)


def test_without_the_library_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    assert not video.available()
    with pytest.raises(BadVideo, match=r"videos need PyAV \(pip install 'penstock\[video\]'\)"):
        video.probe(FILM, 100)


@examples(12)
@given(at=st.integers(0, len(FILM)), noise=st.binary(min_size=1, max_size=60), cut=st.integers(0, len(FILM)))
def test_damaged_files_are_read_or_refused_but_nothing_else(at: int, noise: bytes, cut: int) -> None:
    raw = (FILM[:at] + noise + FILM[at + len(noise) :])[: max(cut, len(FILM) // 2)]
    try:
        facts = video.probe(raw, 1000)
        pixels = video.decode(raw, facts, [0, facts.frames - 1] if facts.frames > 1 else [0], 8, 8)
    except BadVideo:
        return
    assert len(pixels) % 192 == 0
