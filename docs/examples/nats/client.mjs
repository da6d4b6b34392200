// Submits a chat over NATS, streams its answer, and reads on where messages were lost.
// npm install @nats-io/transport-node @nats-io/jetstream
// node client.mjs "What is 347 + 586?"
import { createHash, randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect, createInbox, headers } from "@nats-io/transport-node";
import { jetstream } from "@nats-io/jetstream";

const SILENCE_MS = 10_000;
const { server, user, pass } = login();
const nc = await connect({ servers: server, user, pass, maxReconnectAttempts: -1 });
const question = process.argv[2] ?? "What is 347 + 586?";
const id = process.argv[3] ?? randomUUID(); // save it with the next number, and go on after a restart
await answer(id, { model: "demo", messages: [{ role: "user", content: question }], max_tokens: 200, stream: true }, write);
process.stdout.write("\n");
await nc.close();

function login() {
  const { client_nats } = JSON.parse(readFileSync(process.env.STATE ?? ".penstock/state.json"));
  return { server: client_nats.server, user: client_nats.user, pass: client_nats.password };
}

function write(body) {
  process.stdout.write(JSON.parse(body).choices?.[0]?.delta?.content ?? "");
}

// Every message of an answer once, in order. Submitting again with the same id runs nothing twice.
async function answer(id, body, onMessage) {
  const key = createHash("sha256").update(id).digest("hex").slice(0, 32);
  const reader = randomUUID();
  const waiting = new Map();
  let next = 0, wait = 1000, timer, again, finish, fail;
  const done = new Promise((resolve, reject) => ([finish, fail] = [resolve, reject]));

  function take(error, message) {
    const number = message?.headers?.get("Penstock-Seq");
    if (error || !number) return retry(wait, message?.headers?.get("Penstock-Error")); // of this read, not of the answer
    const had = next;
    waiting.set(Number(number), message);
    for (let ready; (ready = waiting.get(next)); next++) {
      waiting.delete(next);
      const code = ready.headers.get("Penstock-Error");
      if (code) return fail(new Error(`${code}: ${ready.string()}`));
      onMessage(ready.string());
      if (ready.headers.get("Penstock-Final")) return finish();
    }
    if (next > had) wait = 1000;
    retry(waiting.size ? wait : SILENCE_MS);
  }

  function retry(after, code) {
    if (["request_erased", "answer_ended", "invalid_request"].includes(code)) return fail(new Error(code));
    clearTimeout(timer);
    timer = setTimeout(read, after);
  }

  function read() {
    again?.unsubscribe(); // one read at a time
    const inbox = createInbox();
    again = nc.subscribe(inbox, { callback: take });
    nc.publish("ps.read", JSON.stringify({ key: id, from: next, reader }), { reply: inbox });
    wait = Math.min(2 * wait, 8000);
    retry(wait);
  }

  const live = nc.subscribe(`ps.answer.${key}`, { callback: take });
  const marked = headers();
  marked.set("Nats-Msg-Id", id);
  await jetstream(nc).publish("ps.submit.demo", JSON.stringify(body), { headers: marked });
  (async () => {
    for await (const change of nc.status()) if (change.type === "reconnect") retry(0);
  })();
  retry(SILENCE_MS);
  try {
    await done;
  } finally {
    clearTimeout(timer);
    live.unsubscribe();
    again?.unsubscribe();
  }
}
