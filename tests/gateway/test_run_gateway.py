import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_model import write


def test_settings_of_a_model_that_are_not_applied_are_named_at_the_start(tmp_path: Path) -> None:
    """Else answers differ from those of transformers, and nothing says why."""
    path = write(tmp_path)
    (path / "generation_config.json").write_text('{"no_repeat_ngram_size": 3, "top_k": 20}')
    # A folder that is not there ends the start behind it, before a broker is needed.
    command = ["gateway", "--model", str(path), "--log-format", "json", "--allowed-local-media-path", "/nonexistent"]
    ended = subprocess.run([sys.executable, "-m", "penstock", *command], capture_output=True, text=True, timeout=120)
    lines = [json.loads(line) for line in (ended.stdout + ended.stderr).splitlines() if line.startswith("{")]
    (said,) = [line for line in lines if line["event"] == "generation_default_ignored"]
    assert (said["key"], said["value"], said["level"]) == ("no_repeat_ngram_size", 3, "warning")
    assert said["file"] == str(path / "generation_config.json")
