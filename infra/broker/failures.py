"""Why no nats-server runs. The texts are for users."""


class NoServerBinary(Exception):
    """No usable nats-server; the text says what was tried and how to get one."""


class ServerFailed(Exception):
    """The server did not come up; the text ends with its last log lines."""
