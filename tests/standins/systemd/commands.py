"""The commands of the stand-in; started without packages, so it imports the standard library only."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("SYSTEMD_STANDIN", "/nonexistent"))
UNITS = Path("/etc/systemd/system")
KNOWN = {
    "Unit": {"Description", "Wants", "After", "StartLimitIntervalSec"},
    "Service": {
        *("Type", "User", "Environment", "EnvironmentFile", "ExecStart", "ExecReload"),
        *("StateDirectory", "StateDirectoryMode"),
        *("KillMode", "KillSignal", "TimeoutStopSec", "Restart", "RestartSec", "RestartPreventExitStatus"),
        *("LimitNOFILE", "LimitMEMLOCK", "NoNewPrivileges", "PrivateTmp", "ProtectSystem", "UMask"),
    },
    "Install": {"WantedBy"},
}
Service = dict[str, list[str]]


def main(words: list[str]) -> int:
    verb, *units = [word for word in words if word != "--now"]
    if verb == "_run":
        return run(units[0])
    if verb == "daemon-reload":
        return 0
    for unit in units:
        if verb in ("stop", "restart"):
            stop(unit)
        if verb in ("start", "enable", "restart"):
            start(unit)
        elif verb == "is-active" and not alive(unit):
            return 3
        elif verb not in ("stop", "is-active"):
            sys.exit(f"Unknown command verb {verb}.")
    return 0


def start(unit: str) -> None:
    load(unit)
    if alive(unit):
        return
    STATE.mkdir(exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "_run", unit],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (STATE / f"{unit}.pid").write_text(str(child.pid))


def stop(unit: str) -> None:
    if alive(unit):
        pid = int((STATE / f"{unit}.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        while alive(unit):
            time.sleep(0.05)


def alive(unit: str) -> bool:
    path = STATE / f"{unit}.pid"
    if not path.exists():
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def load(unit: str) -> Service:
    name, _, instance = unit.removesuffix(".service").partition("@")
    path = UNITS / (f"{name}@.service" if instance else f"{name}.service")
    if not path.exists():
        sys.exit(f"Failed to start {unit}.service: Unit {unit}.service not found.")
    section, found = "", {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            if not equals or key not in KNOWN[section]:
                sys.exit(f"{path}: Unknown key name '{key}' in section '{section}'")
            host = socket.gethostname()
            value = value.replace("%i", instance).replace("%H", host).replace("%l", host.partition(".")[0])
            found.setdefault(key, []).append(value)
    return found


def environment(service: Service) -> dict[str, str]:
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    environ |= dict(line.split("=", 1) for line in service.get("Environment", []))
    for file in service.get("EnvironmentFile", []):
        path = Path(file.removeprefix("-"))
        if file.startswith("-") and not path.exists():
            continue
        assert not path.stat().st_mode & 0o077, f"{path} can be read by others"
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                key, _, value = line.partition("=")
                environ[key] = value
    for name in service.get("StateDirectory", []):
        folder = Path("/var/lib") / name
        folder.mkdir(parents=True, exist_ok=True)
        environ["STATE_DIRECTORY"] = str(folder)
    return environ


def run(unit: str) -> int:
    """Run a unit until it is stopped, or ends with a status after which it is not started again."""
    service = load(unit)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    command = shlex.split(service["ExecStart"][0].replace("$$", "$"))
    final = {int(status) for status in " ".join(service.get("RestartPreventExitStatus", [])).split()}
    sign = signal.Signals[service.get("KillSignal", ["SIGTERM"])[0]]
    while not asked:
        with open(STATE / f"{unit}.log", "ab") as log:
            child = subprocess.Popen(
                command, env=environment(service), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        while child.poll() is None and not asked:
            time.sleep(0.05)
        if asked:
            child.send_signal(sign)
            try:
                child.wait(float(service["TimeoutStopSec"][0]))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                (STATE / f"{unit}.killed").touch()
        elif child.returncode in final:
            return child.returncode
        else:
            time.sleep(float(service["RestartSec"][0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
