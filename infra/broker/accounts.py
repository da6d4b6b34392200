"""The tenants' accounts in the server's configuration: what the pipeline exports, and what a tenant imports of it.

A tenant's account holds its users and its inboxes. The subjects of the NATS API lead from it into the pipeline's
account, with the tenant's name inserted, and back; no other subjects do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schemas.subjects import Subjects

# An answer may take as long as a request's deadline; the reply subject expires when it has been silent for this long.
REPLY_S = "2h"


@dataclass(frozen=True, slots=True)
class Login:
    """``password`` is written unchanged: quoted, or the name of a variable."""

    user: str
    password: str


def exports(s: Subjects) -> str:
    """The block of the pipeline's account. It names no tenant, so that a new one does not change it."""
    n = s.namespace
    reply = f'response_type: "stream", response_threshold: "{REPLY_S}"'
    lines = (
        f'{{ service: "{n}.submit.*.>" }}',
        f'{{ service: "{n}.ask.*.>", {reply} }}',
        f'{{ service: "{n}.read.*", {reply} }}',
        f'{{ service: "{n}.cancel.*" }}',
        f'{{ stream: "{n}.answer.*.>" }}',
        f'{{ stream: "{n}.to.*.>" }}',
    )
    return "    exports: [\n" + "".join(f"      {line}\n" for line in lines) + "    ]\n"


def publishes(s: Subjects) -> tuple[str, ...]:
    """What a tenant's user may publish."""
    return s.all("submit"), s.all("ask"), f"{s.namespace}.read", s.cancel


def subscribes(s: Subjects) -> tuple[str, ...]:
    return s.all("answer"), s.all("reply"), "_INBOX.>"


def account(tenant: str, logins: Sequence[Login], s: Subjects) -> str:
    """One tenant's account, with its users: one, or two while its password is being changed."""
    n = s.namespace
    services = (
        (f"{n}.submit.{tenant}.>", f"{n}.submit.>"),
        (f"{n}.ask.{tenant}.>", f"{n}.ask.>"),
        (f"{n}.read.{tenant}", f"{n}.read"),
        (f"{n}.cancel.{tenant}", s.cancel),
    )
    streams = (
        (f"{n}.answer.{tenant}.>", f"{n}.answer.>"),
        (s.mailbox(tenant, s.all("reply")), s.all("reply")),
        (s.mailbox(tenant, "_INBOX.>"), "_INBOX.>"),
    )
    imports = "".join(
        f'      {{ {kind}: {{ account: APP, subject: "{subject}" }}, to: "{to}" }}\n'
        for kind, pairs in (("service", services), ("stream", streams))
        for subject, to in pairs
    )
    users = "".join(_user(login, s) for login in logins)
    return f"""  T_{tenant.replace("-", "_")} {{
    imports: [
{imports}    ]
    users: [
{users}    ]
  }}
"""


def _user(login: Login, s: Subjects) -> str:
    allow, listen = (", ".join(f'"{one}"' for one in list_) for list_ in (publishes(s), subscribes(s)))
    return f"""\
      {{ user: "{login.user}", password: {login.password}, permissions: {{
        publish: {{ allow: [{allow}] }}
        subscribe: {{ allow: [{listen}] }}
      }}}}
"""
