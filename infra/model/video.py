"""Videos: their format, and how many frames of which size they have; sampled frames as pixels.

Files are decoded by PyAV, which is FFmpeg, in a child process with limits on its time and memory: a file that breaks a
decoder ends the child, not a server. Only the formats and codecs named here are reached, none of which opens other
files or addresses.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, NamedTuple

FORMATS = {"video/mp4": "mov", "video/webm": "matroska"}  # media type -> FFmpeg's demuxer
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4"})
NAMES = "an MP4, MOV, WebM or Matroska video with H.264, H.265, VP8, VP9, AV1 or MPEG-4"
MISSING = "videos need PyAV (pip install 'penstock[video]')"
MAX_PIXELS = 16_777_216  # of a frame, 4096 x 4096
MAX_DECODED = 20_000_000_000  # pixels of all frames, which take a core up to a minute: 9,600 frames of 1920 x 1080
PROBE_S, DECODE_S = 5.0, 120.0  # of CPU time; of waiting for it, three times as long
MEMORY_BYTES = 4 << 30  # of the child's address space
THREADS = 2  # of a decoder


class BadVideo(ValueError):
    """A file cannot be used as a video. The text follows its name: "is cut off"."""


class VideoFacts(NamedTuple):
    """``frames``: in the file. ``fps``: of them per second. ``height``, ``width``: of an upright one, pixels."""

    frames: int
    fps: float
    height: int
    width: int


def kind_of(data: bytes) -> str:
    """The media type, from the first bytes; "": not one of the formats."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "video/mp4"
    return "video/webm" if data.startswith(b"\x1a\x45\xdf\xa3") else ""


def available() -> bool:
    """Whether videos can be decoded here."""
    return find_spec("av") is not None


class Decoder:
    """The process that reads one file, until ``end``, which may be called from any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.ended = False

    def end(self) -> None:
        with self._lock:
            self.ended = True
            if self._process is not None:
                self._process.kill()

    def run(self, command: Sequence[str], data: bytes, seconds: float) -> tuple[int, bytes]:
        """Its exit status and what it wrote.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        with self._lock:
            if self.ended:
                return -signal.SIGKILL, b""
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        with process:
            try:
                written, _ = process.communicate(data, seconds)
            except BaseException:
                process.kill()
                raise
            finally:
                with self._lock:
                    self._process = None
        return process.returncode, written


def probe(data: bytes, max_frames: int, decoder: Decoder | None = None) -> VideoFacts:
    """What is in a file. The first frame is decoded, the others are counted. Blocks; for a thread.

    Args:
        decoder: by which another thread ends it.

    Raises:
        BadVideo: it is broken, of another kind, too long, or takes too much time or memory.
    """
    head, _ = _ask(data, {"max_frames": max_frames}, PROBE_S, decoder or Decoder())
    return VideoFacts(head["frames"], head["fps"], head["height"], head["width"])


def decode(data: bytes, facts: VideoFacts, frames: Sequence[int], height: int, width: int) -> bytes:
    """RGB pixels of some frames, resized: (frames, height, width, 3) bytes. Blocks; for a thread.

    Args:
        frames: their numbers, ascending.

    Raises:
        BadVideo: it is broken, or takes too much time or memory.
    """
    wanted = {"numbers": list(frames), "frames": facts.frames, "height": height, "width": width}
    _, pixels = _ask(data, wanted, DECODE_S, Decoder())
    if len(pixels) != len(frames) * height * width * 3:
        raise BadVideo("cannot be decoded")
    return pixels


def _ask(data: bytes, wanted: dict[str, Any], seconds: float, decoder: Decoder) -> tuple[dict[str, Any], bytes]:
    """What a child answers: a line of JSON, then pixels."""
    if not available():
        raise BadVideo(f"is a video; {MISSING}")
    if not (kind := kind_of(data)):
        raise BadVideo(f"is not {NAMES}")
    question = json.dumps({"format": FORMATS[kind], "cpu_s": seconds, **wanted}).encode() + b"\n"
    command = [sys.executable, "-m", __name__]
    try:
        status, written = decoder.run(command, question + data, 3 * seconds)
    except subprocess.TimeoutExpired:
        raise BadVideo(f"takes more than {3 * seconds:g} s to decode") from None
    line, _, pixels = written.partition(b"\n")
    if status == -signal.SIGXCPU:
        raise BadVideo(f"takes more than {seconds:g} s of CPU time to decode")
    if decoder.ended:
        raise BadVideo("is no longer wanted")
    if status or not line:
        raise BadVideo("cannot be decoded: it takes too much memory, or breaks the decoder")
    head = json.loads(line)
    if "error" in head:
        raise BadVideo(head["error"])
    return head, pixels


def main() -> None:
    """Answer the question on standard input, in the child."""
    with open(0, "rb") as source, open(1, "wb") as sink:
        question = json.loads(source.readline())
        data = source.read()
        import av  # before its memory is limited: the libraries take some

        _limit(question["cpu_s"])
        try:
            head, pixels = _read(av, data, question)
        except BadVideo as error:
            head, pixels = {"error": str(error)}, []
        except (av.error.FFmpegError, ValueError, EOFError) as error:
            head, pixels = {"error": f"cannot be decoded: {type(error).__name__}"}, []
        sink.write(json.dumps(head).encode() + b"\n")
        for frame in pixels:
            sink.write(frame)


def _limit(cpu_s: float) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, int(cpu_s)),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, hard))


def _read(av: Any, data: bytes, question: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    import io

    with av.open(io.BytesIO(data), format=question["format"]) as container:
        if not container.streams.video:
            raise BadVideo("has no video stream")
        stream = container.streams.video[0]
        context = stream.codec_context
        if context is None or context.name not in CODECS:
            raise BadVideo(f"has codec {getattr(context, 'name', 'unknown')}; expected {NAMES}")
        if context.width * context.height > MAX_PIXELS:
            raise BadVideo(f"has frames of {context.width} x {context.height} pixels; the limit is {MAX_PIXELS:,}")
        context.thread_type, context.thread_count = "AUTO", THREADS
        if "numbers" in question:
            return {}, _frames(container, stream, question)
        return _facts(container, stream, question["max_frames"]), []


def _facts(container: Any, stream: Any, limit: int) -> dict[str, Any]:
    first, count = None, 0
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            count += 1
            if count > limit:
                raise BadVideo(f"has more than {limit} frames (--max-video-frames)")
        if first is None:
            first = next(iter(packet.decode()), None)
    if first is None or not count:
        raise BadVideo("has no frame that can be decoded")
    rate = stream.average_rate or stream.guessed_rate
    if not isinstance(rate, Fraction) or rate <= 0:
        raise BadVideo("has no frame rate")
    height, width = first.height, first.width
    if count * first.height * first.width > MAX_DECODED:
        raise BadVideo(
            f"has {count} frames of {first.width} x {first.height} pixels; the limit is {MAX_DECODED:,} pixels "
            "together. Send a shorter or smaller one"
        )
    if first.rotation % 180:
        height, width = width, height
    return {"frames": count, "fps": float(rate), "height": height, "width": width}


def _frames(container: Any, stream: Any, question: dict[str, Any]) -> list[bytes]:
    """Those that were asked for; where the last ones cannot be decoded, the last that can."""
    from PIL import Image

    wanted, size = question["numbers"], (question["width"], question["height"])
    out: list[bytes] = []
    number = -1
    last = None
    for number, frame in enumerate(container.decode(stream)):
        last = frame
        while len(out) < len(wanted) and wanted[len(out)] == number:
            out.append(_pixels(frame, size, Image))
        if len(out) == len(wanted):
            return out
    if last is None or 2 * (number + 1) < question["frames"]:
        raise BadVideo(f"ends after {number + 1} of {question['frames']} frames")
    return out + [_pixels(last, size, Image)] * (len(wanted) - len(out))


def _pixels(frame: Any, size: tuple[int, int], image: Any) -> bytes:
    if frame.width * frame.height > MAX_PIXELS:  # it may change within a stream
        raise BadVideo(f"has frames of {frame.width} x {frame.height} pixels; the limit is {MAX_PIXELS:,}")
    picture = frame.to_image()
    if turns := frame.rotation % 360:
        picture = picture.rotate(turns, expand=True)
    data: bytes = picture.resize(size, image.Resampling.BICUBIC).tobytes()
    return data


if __name__ == "__main__":
    main()
